"""Loads a checkpoint as a transformers model that is ready to serve.

The model is built on the meta device (shapes only), then its tensors are read from the memory-mapped shards one after
another, so that the peak is the model itself and never a second copy of it. Linears that are stored in a format of ours
become `QuantizedLinear`; what is stored in any other way goes through transformers' own loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers import logging as transformers_logging

from quantize.as_stored import older_names, shape_as_stored
from quantize.checkpoint import Checkpoint, one_line, whole_numbers
from quantize.errors import QuantizeError
from quantize.formats.choose import StoredLinear, quantization_of, stored_linears
from quantize.kernels.native import DIGITS
from quantize.linear import QuantizedLinear


def load_model(
    checkpoint: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    compute: str | None = None,
) -> PreTrainedModel:
    """The checkpoint as a model in eval mode, without gradients, on `device`.

    `dtype` is the dtype of activations and of every tensor that is not quantized; None takes the checkpoint's own.
    `compute` is how quantized weights meet their inputs: "a16" as they come, "a8" rounded to 8 bits per token and group
    of inputs; None is what the checkpoint says, which is a16 unless it was quantized for 8-bit activations.
    Raises QuantizeError, in one line, for a path that is no checkpoint, a damaged or missing shard, a quantization that
    nothing here can load, tensors that the model needs and the checkpoint lacks, and a `compute` that it cannot have.
    """
    opened = Checkpoint.open(checkpoint)
    model, stored = _on_meta(opened, dtype)
    _refuse_compute(opened, stored, compute)
    if stored is None:
        return _load_through_transformers(opened, torch.device(device), dtype)
    older = older_names(model, opened.files)
    missing = expected_names(model, stored) - set(opened.files) - set(older)
    if missing and not stored:
        # Some mixtures of experts are stored under other names than they run under; transformers knows the mapping.
        return _load_through_transformers(opened, torch.device(device), dtype)
    if missing:
        raise missing_tensors(opened.path, missing)
    tensors = _Tensors(opened, older)
    _swap_linears(model, stored, tensors, torch.device(device), compute or "a16")
    _assign_others(model, tensors, torch.device(device))
    return _finish(model, opened.path, torch.device(device))


def numerics(model: PreTrainedModel) -> dict[str, Any]:
    """How the model computes: `compute` ("a16"; "a8" when its quantized linears round their inputs to 8 bits, "a16+a8"
    when some of them do), `dtype`, `kernels` (module name to kernel name, the unquantized linears as "torch-linear"),
    and `weights_bytes` as held in memory, shared tensors once."""
    kernels, computes = {}, set()
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            kernels[name] = str(module.kernel.name)
            computes.add(module.compute)
        elif isinstance(module, nn.Linear):
            kernels[name] = "torch-linear"
    storages = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return {
        "compute": "+".join(sorted(computes)) or "a16",
        "dtype": str(model.dtype).removeprefix("torch."),
        "kernels": kernels,
        "weights_bytes": sum(storages.values()),
    }


class _Tensors:
    """The checkpoint's tensors under the names that the model knows."""

    def __init__(self, opened: Checkpoint, older: Mapping[str, str]) -> None:
        """`older`: names that the files do not know, and those under which they have them."""
        self.files = {**opened.files, **{name: opened.files[stored] for name, stored in older.items()}}
        self.opened, self.older = opened, older

    def read(self, name: str) -> torch.Tensor:
        return self.opened.tensor(self.older.get(name, name))


def build_on_meta(opened: Checkpoint, dtype: torch.dtype | None) -> PreTrainedModel:
    """The model that config.json describes, on the meta device."""
    try:
        config = AutoConfig.from_pretrained(opened.path, trust_remote_code=False)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        if any(name.startswith("lm_head.weight_") for name in opened.files):
            # A quantized head cannot share the embedding's tensor, whatever the config still says.
            config.tie_word_embeddings = False
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype or config.dtype or torch.float32, trust_remote_code=False
            )
    except Exception as failure:
        # transformers raises what comes up in the architecture's own code: KeyError, TypeError, ImportError, ...
        raise QuantizeError(
            f"{opened.path / 'config.json'}: no model can be built from it ({one_line(failure)[:300]})"
        ) from None
    return model


def plain_names(opened: Checkpoint) -> set[str]:
    """The tensors that the checkpoint held before it was quantized."""
    return {
        f"{name.rpartition('.')[0]}.weight" if name.endswith((".weight_packed", ".weight_scale", ".qweight")) else name
        for name in opened.files
    }


def expected_names(model: PreTrainedModel, stored: Mapping[str, StoredLinear]) -> set[str]:
    """The tensors that the checkpoint must hold. Tied ones are left out: the other end of the tie is there."""
    volatile = {name for name, _ in model.named_non_persistent_buffers()}
    names = {name for name, _ in model.named_parameters()}
    names |= {name for name, _ in model.named_buffers() if name not in volatile}
    names -= set(model.all_tied_weights_keys)
    for module, linear in stored.items():
        names.discard(f"{module}.weight")
        names |= {f"{module}.{leaf}" for leaf in linear.leaves}
    return names


def check_compute(checkpoint: str | Path, compute: str) -> None:
    """Raises QuantizeError where `load_model` would for this `compute`, without reading a weight."""
    opened = Checkpoint.open(checkpoint)
    _refuse_compute(opened, _on_meta(opened, None)[1], compute)


def _on_meta(
    opened: Checkpoint, dtype: torch.dtype | None
) -> tuple[PreTrainedModel, Mapping[str, StoredLinear] | None]:
    """The model without weights, and its quantized linears by name; None: transformers must load them."""
    model = build_on_meta(opened, dtype)
    if not quantization_of(opened):
        return model, {}
    shape_as_stored(model, plain_names(opened))
    return model, stored_linears(opened, [name for name, part in model.named_modules() if isinstance(part, nn.Linear)])


def _refuse_compute(opened: Checkpoint, stored: Mapping[str, StoredLinear] | None, compute: str | None) -> None:
    if compute not in (None, "auto", *DIGITS):
        raise QuantizeError(f"compute {compute!r} is unknown: use {', '.join(DIGITS)}")
    if compute == "a8" and stored is None:
        raise QuantizeError(f"{opened.path}: transformers runs it, which rounds as it will; leave out compute a8")
    if compute == "a8" and not stored:
        raise QuantizeError(
            f"{opened.path}: compute a8 rounds what quantized weights are multiplied with, and it has none; quantize "
            "it first, or leave out compute a8"
        )
    if compute == "a16" and any(linear.scheme.activations is not None for linear in (stored or {}).values()):
        raise QuantizeError(
            f"{opened.path}: it was quantized for int8 activations, so it computes in a8; leave out compute a16, or "
            "quantize it without them"
        )


def _swap_linears(
    model: PreTrainedModel,
    stored: Mapping[str, StoredLinear],
    tensors: _Tensors,
    device: torch.device,
    compute: str,
) -> None:
    """Puts a `QuantizedLinear` in the place of every quantized linear, one at a time."""
    for name, kept in stored.items():
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        where = tensors.files[f"{name}.{kept.leaf}"]
        leaves = {leaf: tensors.read(f"{name}.{leaf}").clone() for leaf in kept.leaves}
        try:
            weight, order = kept.read(leaves, linear.out_features, linear.in_features)
        except QuantizeError as failure:
            raise QuantizeError(f"{where}: {name}: {failure}; fetch or quantize it again") from None
        model.set_submodule(name, QuantizedLinear(weight, linear.bias, device, model.dtype, order, compute))


def _assign_others(model: PreTrainedModel, tensors: _Tensors, device: torch.device) -> None:
    """Puts each stored tensor in the place of the meta tensor of its name; what has no place is left on disk."""
    for name in sorted(tensors.files, key=lambda name: (tensors.files[name], name)):
        owner_name, _, leaf = name.rpartition(".")
        try:
            owner = model.get_submodule(owner_name)
        except AttributeError:
            continue
        place = getattr(owner, leaf, None)
        if not isinstance(place, torch.Tensor) or not place.is_meta:
            continue
        stored = tensors.read(name)
        if place.shape != stored.shape:
            raise misshapen(tensors.files[name], name, stored.shape, place.shape)
        if place.is_floating_point() and not stored.is_floating_point():
            raise whole_numbers(tensors.files[name], name, stored.dtype)
        value = torch.empty(stored.shape, dtype=place.dtype, device=device).copy_(stored)
        setattr(owner, leaf, nn.Parameter(value, requires_grad=False) if leaf in owner._parameters else value)


def _finish(model: PreTrainedModel, path: Path, device: torch.device) -> PreTrainedModel:
    """Ties what is tied, computes the buffers that no checkpoint stores, and checks that nothing is left on meta."""
    model.tie_weights()
    _compute_volatile_buffers(model, device)
    left = {name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta}
    if left:
        raise missing_tensors(path, left)
    model.requires_grad_(False)
    model.config._name_or_path = str(path)
    return model.eval()


def _compute_volatile_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Non-persistent buffers (rotary frequencies and the like) get their values as in transformers' own loader:
    from the model's weight initialization, with every loaded tensor marked as not to be touched."""
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner_name, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner_name), leaf, torch.empty_like(buffer, device=device))
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    for module in model.modules():
        if not module._non_persistent_buffers_set:
            vars(module)["_is_hf_initialized"] = True
    model.initialize_weights()


def _load_through_transformers(opened: Checkpoint, device: torch.device, dtype: torch.dtype | None) -> PreTrainedModel:
    """What is not stored as ours is; transformers' warnings about absent weights become an error."""
    path, config = opened.path, opened.config
    try:
        with silent_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype or "auto", output_loading_info=True, use_safetensors=True, trust_remote_code=False
            )
    except Exception as failure:
        # Any of a dozen quantizers may raise anything here; the user needs its message, not its stack.
        raise QuantizeError(f"{path}: transformers cannot load it ({one_line(failure)[:300]})") from None
    model, report = loaded
    method = (config.get("quantization_config") or {}).get("quant_method")
    if "quantization_config" in config and getattr(model, "hf_quantizer", None) is None:
        raise QuantizeError(f"{path / 'config.json'}: quantization method {method!r} is unknown to transformers")
    if report["missing_keys"]:
        raise missing_tensors(path, set(report["missing_keys"]))
    if report["mismatched_keys"]:
        raise QuantizeError(f"{path}: config.json asks for other shapes: {sorted(report['mismatched_keys'])[:3]}")
    model.requires_grad_(False)
    placed: PreTrainedModel = model.to(device).eval()
    return placed


class silent_transformers(AbstractContextManager[None]):
    """No progress bars and warnings of transformers': what they say comes as an error of ours."""

    def __enter__(self) -> None:
        self.verbosity = transformers_logging.get_verbosity()
        self.bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        transformers_logging.set_verbosity(self.verbosity)
        if self.bars:
            transformers_logging.enable_progress_bar()


def missing_tensors(path: Path, names: set[str]) -> QuantizeError:
    shown = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return QuantizeError(f"{path}: tensors missing from the checkpoint: {shown}; fetch or quantize it again")


def misshapen(file: Path, name: str, stored: Any, expected: Any) -> QuantizeError:
    return QuantizeError(f"{file}: {name} is {list(stored)}, but config.json makes it {list(expected)}")
