"""The same quantized weights in another format: losslessly, or not at all.

Every format is a way to write (code - zero_point) * scale. A conversion reads that, writes it otherwise, and refuses,
naming module and value, where the other format would have to round. It goes file by file, so that memory holds one
shard.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from quantize.as_stored import older_names, shape_as_stored
from quantize.atomic import atomic_directory, atomic_file, write_atomically
from quantize.checkpoint import CONFIG, INDEX, Checkpoint
from quantize.companions import copy_companions
from quantize.errors import QuantizeError
from quantize.formats.choose import FORMATS, StoredLinear, quantization_of, refuse_misfits, stored_linears
from quantize.formats.gguf_write import GGUF_FORMATS, write_gguf
from quantize.load import build_on_meta, expected_names, misshapen, missing_tensors, plain_names
from quantize.manifest import MANIFEST, Manifest
from quantize.progress import Progress, silent
from quantize.scheme import QuantizedWeight, Scheme

TARGETS = (*FORMATS, *GGUF_FORMATS)


@dataclass(frozen=True)
class Quantized:
    """A quantized checkpoint: what it says of itself, its quantized linears by module name with their outputs and
    inputs, the linears that are not quantized, and the names of heads among all."""

    checkpoint: Checkpoint
    settings: Mapping[str, Any]
    linears: Mapping[str, StoredLinear]
    shapes: Mapping[str, tuple[int, int]]
    ignored: tuple[str, ...]
    heads: tuple[str, ...]

    def weight(self, name: str) -> QuantizedWeight:
        """Raises QuantizeError for one that is stored otherwise than it says, or with groups in act-order."""
        stored = self.linears[name]
        tensors = {leaf: self.checkpoint.tensor(f"{name}.{leaf}") for leaf in stored.leaves}
        try:
            weight, order = stored.read(tensors, *self.shapes[name])
        except QuantizeError as failure:
            where = self.checkpoint.files[f"{name}.{stored.leaf}"]
            raise QuantizeError(f"{where}: {name}: {failure}; fetch or quantize it again") from None
        if order is not None:
            raise QuantizeError(
                f"{self.checkpoint.path}: {name} has groups in act-order (g_idx), which no other format holds; "
                "quantize again with static groups"
            )
        return weight


def convert_checkpoint(source: Path | str, form: str, out: Path | str, progress: Progress | None = None) -> None:
    """Writes the quantized checkpoint `source` in the format `form` (one of TARGETS) as OUT: a folder, or for GGUF a
    file. Raises QuantizeError, one line, for a source that is not quantized or not read here, for values that the
    format cannot hold, and for an OUT that exists; then nothing is written."""
    tell = progress or silent
    if form not in TARGETS:
        raise QuantizeError(f"format: {form!r} cannot be written; one of {', '.join(TARGETS)}")
    quantized = open_quantized(Checkpoint.open(source), form)
    out = Path(out)
    if form in GGUF_FORMATS:
        if out.suffix != ".gguf":
            raise QuantizeError(f"{out}: a GGUF is one file; give a name that ends in .gguf")
        with atomic_file(out) as draft:
            write_gguf(
                quantized.checkpoint,
                tuple(quantized.linears),
                quantized.weight,
                form,
                draft,
                partial(converted, quantized, form),
                tell,
            )
        return
    schemes = agreed_schemes(quantized, form)
    with atomic_directory(out) as folder:
        write_folder(quantized, schemes, form, folder, tell)


def open_quantized(checkpoint: Checkpoint, form: str) -> Quantized:
    settings = quantization_of(checkpoint)
    if not settings:
        raise QuantizeError(
            f"{checkpoint.path}: is not quantized, and converting does not round; quantize it first, "
            f"{'with --method int8 --group-size 32' if form == 'gguf-q8_0' else 'with a method of 4 or 8 bits'}"
        )
    model = build_on_meta(checkpoint, None)
    shape_as_stored(model, plain_names(checkpoint))
    shapes = {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    names = list(shapes)
    linears = stored_linears(checkpoint, names)
    if linears is None:
        method = settings.get("quant_method")
        raise QuantizeError(f"{checkpoint.path}: its quantization ({method}) is not one that can be converted")
    missing = expected_names(model, linears) - set(checkpoint.files) - set(older_names(model, checkpoint.files))
    if missing:
        raise missing_tensors(checkpoint.path, missing)
    for name, parameter in model.named_parameters():
        plain = name in checkpoint.files and name.removesuffix(".weight") not in linears
        if plain and checkpoint.shape(name) != parameter.shape:
            raise misshapen(checkpoint.files[name], name, checkpoint.shape(name), parameter.shape)
    head = model.get_output_embeddings()
    kept = {name for name in names if name not in linears} | set(settings.get("ignore") or ())
    return Quantized(
        checkpoint,
        settings,
        linears,
        shapes,
        tuple(sorted(kept)),
        tuple(name for name, module in model.named_modules() if module is head),
    )


def agreed_schemes(quantized: Quantized, form: str) -> dict[str, Scheme]:
    """The scheme in which each module is written, once all are known to fit."""
    schemes: dict[str, Scheme] = {}
    shapes: dict[str, tuple[int, int]] = {}
    for name, stored in quantized.linears.items():
        weight = quantized.weight(name)
        schemes[name] = replace(weight.scheme, activations=stored.scheme.activations)
        shapes[name] = (weight.codes.shape[0], weight.codes.shape[1])
    if len({replace(scheme, symmetric=True) for scheme in schemes.values()}) == 1:
        # A module whose zero points happen to be 0 is one with zero points among others that have them.
        alike = all(scheme.symmetric for scheme in schemes.values())
        schemes = {name: replace(scheme, symmetric=alike) for name, scheme in schemes.items()}
    refuse_misfits(schemes, shapes, quantized.heads, form)
    return schemes


def in_scheme(weight: QuantizedWeight, scheme: Scheme, dtype: torch.dtype | None) -> QuantizedWeight:
    """The weight under its agreed scheme, its scales in `dtype` where that holds them exactly."""
    scale, zero_point = weight.scale, weight.zero_point
    if dtype is not None and torch.equal(scale.to(dtype).double(), scale.double()):
        scale = scale.to(dtype)
    if not scheme.symmetric and zero_point is None:
        zero_point = torch.zeros_like(scale, dtype=torch.int8)
    return QuantizedWeight(weight.codes, scale, zero_point, scheme)


def write_folder(quantized: Quantized, schemes: Mapping[str, Scheme], form: str, folder: Path, tell: Progress) -> None:
    checkpoint, target = quantized.checkpoint, FORMATS[form]
    dtype = dtype_of(checkpoint)
    files = sorted(set(checkpoint.files.values()))
    weight_map: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for step, file in enumerate(files):
        tell(f"converting to {form}", step, len(files))
        tensors: dict[str, torch.Tensor] = {}
        for name in (name for name in checkpoint.tensor_names if checkpoint.files[name] == file):
            owner, _, leaf = name.rpartition(".")
            if owner not in quantized.linears or leaf == "bias":
                tensors[name] = checkpoint.tensor(name)
            elif leaf == quantized.linears[owner].leaf:
                packed = target.pack(owner, in_scheme(quantized.weight(owner), schemes[owner], dtype))
                tensors.update(packed)
                sizes[owner] = sum(tensor.nbytes for tensor in packed.values())
        if tensors:
            save_file(
                {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file.name, {"format": "pt"}
            )
            weight_map.update(dict.fromkeys(tensors, file.name))
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if (checkpoint.path / INDEX).is_file():
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_atomically(folder / INDEX, json.dumps(index, indent=2) + "\n")
    config = dict(checkpoint.config) | {"quantization_config": target.config(schemes, quantized.ignored)}
    write_atomically(folder / CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    copy_companions(checkpoint.path, folder)
    manifest = converted(quantized, form, sizes, total)
    if manifest is not None:
        manifest.write(folder)
    tell("done", len(files), len(files))


def dtype_of(checkpoint: Checkpoint) -> torch.dtype | None:
    """The dtype that config.json gives the model."""
    said = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    dtype = getattr(torch, said, None) if isinstance(said, str) else None
    return dtype if isinstance(dtype, torch.dtype) else None


def converted(quantized: Quantized, form: str, sizes: Mapping[str, int], total: int) -> Manifest | None:
    """The source's manifest for its weights in another format; None when the source has none. sizes: bytes by module,
    total: bytes of all weights as written."""
    if not (quantized.checkpoint.path / MANIFEST).is_file():
        return None
    before = Manifest.read(quantized.checkpoint.path)
    modules = tuple(replace(record, bytes=sizes.get(record.name, record.bytes)) for record in before.modules)
    origin = quantized.settings.get("quant_method")
    return replace(
        before,
        fingerprint=hashlib.sha256(f"{before.fingerprint} as {form}".encode()).hexdigest(),
        recipe={**before.recipe, "format": form},
        modules=modules,
        bytes_after=total,
        bits_per_weight=8 * sum(record.bytes for record in modules) / sum(record.parameters for record in modules),
        notes=(*before.notes, f"converted without loss from {origin}, fingerprint {before.fingerprint[:12]}"),
    )
