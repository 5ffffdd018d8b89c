"""LLM.int8() and NF4 with double quantization, by bitsandbytes through transformers, as that library saves them.

The library quantizes while the whole model loads, so this is the one method of ours that is neither streamed nor
resumed. Nothing runs between loading and saving: on CPUs with bf16 instructions a first forward repacks the weights,
and what is saved then is wrong (bitsandbytes 0.50).
"""

import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from quantize.atomic import atomic_directory
from quantize.checkpoint import Checkpoint, one_line, refuse_nonfinite
from quantize.companions import copy_companions
from quantize.decoder import open_decoder, weights_dtype
from quantize.errors import QuantizeError
from quantize.fingerprint import fingerprint, finished_before, versions
from quantize.gram import relative_weight_error
from quantize.load import silent_transformers
from quantize.manifest import MANIFEST, Manifest, ModuleRecord
from quantize.progress import Progress
from quantize.recipe import Recipe
from quantize.scheme import PER_CHANNEL
from quantize.targets import Targets, choose_targets

NF4_BLOCK = 64
"""Weights that share an NF4 scale; the scales themselves are 8 bits in blocks of 256."""


def quantize_with_bitsandbytes(
    checkpoint: Checkpoint, recipe: Recipe, out: Path, replace: bool, tell: Progress
) -> Manifest:
    """Writes the library's checkpoint OUT, with a manifest of ours. Run again when OUT holds the result of the same
    work, it does nothing. Raises QuantizeError, one line, when the library is not installed, fails, or leaves modules
    out."""
    begin = time.perf_counter()
    if find_spec("bitsandbytes") is None:
        raise QuantizeError(
            f"method: {recipe.method}: bitsandbytes is not installed; run: pip install 'quantgate[bnb]'"
        )
    # It has its own blocks; where ours would divide does not matter to it.
    targets = choose_targets(
        open_decoder(checkpoint), Recipe("int8", group_size=PER_CHANNEL, ignore=recipe.ignore), checkpoint
    )
    if targets.unties:
        raise QuantizeError(f"{checkpoint.path}: bitsandbytes leaves a tied head as it is; put it into ignore")
    tell("checking the source", 0, 3)
    source_digest = checkpoint.weights_digest(refuse_nonfinite(checkpoint))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    used = versions("bitsandbytes")
    identity = fingerprint(checkpoint, recipe, None, device, source_digest, [used["bitsandbytes"]])
    finished = finished_before(out, identity)
    if finished is not None:
        return finished
    with atomic_directory(out, replace=replace and (out / MANIFEST).is_file()) as folder:
        tell(recipe.method, 1, 3)
        model = load_quantized(checkpoint, recipe, targets, device)
        records = tuple(record(name, model, checkpoint) for name in targets.schemes)
        tell("saving", 2, 3)
        with silent_transformers():
            model.save_pretrained(folder)
        copy_companions(checkpoint.path, folder)
        manifest = Manifest(
            source_digest=source_digest,
            fingerprint=identity,
            recipe=recipe.to_mapping(),
            calibration=None,
            versions=used,
            modules=records,
            bytes_before=checkpoint.bytes(),
            bytes_after=Checkpoint.open(folder).bytes(),
            bits_per_weight=8 * sum(module.bytes for module in records) / sum(module.parameters for module in records),
            coverage={"expected": len(targets.schemes), "packed": len(records)},
            notes=(*targets.notes, "written by bitsandbytes"),
            seconds=round(time.perf_counter() - begin, 3),
            tokenizer_digest=checkpoint.tokenizer_digest(),
            chat_template_digest=checkpoint.chat_template_digest(),
        )
        manifest.write(folder)
    tell("done", 3, 3)
    return manifest


def load_quantized(checkpoint: Checkpoint, recipe: Recipe, targets: Targets, device: torch.device) -> PreTrainedModel:
    """The model, its targets quantized by the library; it must not run before it is saved."""
    dtype = weights_dtype(checkpoint)
    skipped = list(targets.ignored)
    settings = (
        BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped)
        if recipe.bits == 8
        else BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=skipped,
        )
    )
    try:
        with silent_transformers():
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                checkpoint.path,
                quantization_config=settings,
                dtype=dtype,
                device_map={"": device},
                use_safetensors=True,
                trust_remote_code=False,
            )
    except Exception as failure:
        # The library and the code around it raise what comes up; the user needs the message, not the stack.
        raise QuantizeError(f"method: {recipe.method}: {one_line(failure)[:300]}") from None
    return model


@dataclass(frozen=True)
class Stored:
    """A linear as the library holds it: the weight that it stands for, float32 [N, K], and the bytes of its tensors."""

    weight: torch.Tensor
    bytes: int
    group_size: int
    bits: int


def record(name: str, model: nn.Module, checkpoint: Checkpoint) -> ModuleRecord:
    """Raises QuantizeError for a linear that the library left alone."""
    begin = time.perf_counter()
    stored = stored_by_library(model.get_submodule(name))
    if stored is None:
        raise QuantizeError(f"{checkpoint.path}: bitsandbytes left {name} unquantized; put it into ignore")
    exact = checkpoint.tensor(f"{name}.weight").to(stored.weight.device, torch.float32)
    return ModuleRecord(
        name=name,
        bits=stored.bits,
        group_size=stored.group_size,
        symmetric=True,
        relative_error=relative_weight_error(exact, stored.weight),
        error_of="weights",
        fallback=None,
        dead_columns=0,
        clipped_scales=0,
        parameters=exact.numel(),
        bytes=stored.bytes,
        seconds=round(time.perf_counter() - begin, 4),
    )


def stored_by_library(module: nn.Module) -> Stored | None:
    import bitsandbytes as bnb

    weight: Any = module.weight
    if isinstance(module, bnb.nn.Linear8bitLt):
        floats = weight.CB.float() * weight.SCB.float()[:, None] / 127
        return Stored(floats, weight.CB.nbytes + weight.SCB.nbytes, PER_CHANNEL, 8)
    if isinstance(module, bnb.nn.Linear4bit):
        state = weight.quant_state
        floats = bnb.functional.dequantize_4bit(weight.data, state).float()
        tensors = [tensor for tensor in state.as_dict(packed=True).values() if isinstance(tensor, torch.Tensor)]
        return Stored(floats, weight.data.nbytes + sum(tensor.nbytes for tensor in tensors), NF4_BLOCK, 4)
    return None
