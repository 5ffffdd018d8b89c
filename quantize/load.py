"""Loads a checkpoint as a transformers model that is ready to serve.

The model is built on the meta device (shapes only), then its tensors are read from the shards one after another,
so that the peak is the model itself and never a second copy of it. Checkpoints whose tensor names are not the module
names (some mixtures of experts are stored differently from how they run) go through transformers' own loader.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers import logging as transformers_logging

from quantize.errors import QuantizeError

# A shard is mapped anew after this many bytes: pages of a mapping that were read count as this process's memory
# until it is closed, and one mapping for the whole file would double the measured peak.
REMAP_BYTES = 64 * 2**20


def load_model(
    checkpoint: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The checkpoint as a model in eval mode, without gradients, on `device`.

    `dtype` is the dtype of activations and of every tensor that is not quantized; None takes the checkpoint's own.
    Raises QuantizeError, in one line, for a path that is no checkpoint, a damaged or missing shard, and tensors that
    the model needs and the checkpoint lacks.
    """
    path = Path(checkpoint)
    settings = read_config(path)
    shards = shard_files(path)
    if settings.get("quantization_config") is not None:
        return _load_through_transformers(path, device, dtype)
    model = _build_on_meta(path, dtype)
    stored = {name for shard in shards for name in _tensor_names(shard)}
    expected = {name for name, _ in model.named_parameters()} | _persistent_buffers(model)
    tied = set(model.all_tied_weights_keys)
    if not expected - tied <= stored:
        return _load_through_transformers(path, device, dtype)
    _assign(model, shards, torch.device(device))
    return _finish(model, path, torch.device(device))


def read_config(path: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint folder."""
    if not path.exists():
        raise QuantizeError(f"{path}: no such path; give a Hugging Face checkpoint folder")
    if not (path / "config.json").is_file():
        raise QuantizeError(f"{path}: not a checkpoint (no config.json); give a Hugging Face checkpoint folder")
    try:
        settings = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise QuantizeError(f"{path / 'config.json'}: not readable as JSON ({error}); download it again") from error
    if not isinstance(settings, dict):
        raise QuantizeError(f"{path / 'config.json'}: holds no JSON object; download it again")
    return settings


def shard_files(path: Path) -> list[Path]:
    """The safetensors files that the index names, or the one file of a checkpoint without an index."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise QuantizeError(f"{index}: not a readable shard index; download it again") from error
        shards = [path / name for name in names]
    else:
        shards = sorted(path.glob("*.safetensors"))
    if not shards:
        raise QuantizeError(f"{path}: no .safetensors file; pickled weights are not read, convert them first")
    for shard in shards:
        if not shard.is_file():
            raise QuantizeError(f"{shard}: this shard is named in the index but is missing; download it again")
    return shards


def _damaged(shard: Path, error: Exception) -> QuantizeError:
    return QuantizeError(f"{shard}: truncated or damaged safetensors file ({error}); download it again")


def _tensor_names(shard: Path) -> list[str]:
    try:
        with safe_open(shard, framework="pt") as tensors:
            return list(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise _damaged(shard, error) from error


def _read_tensors(shard: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a shard, each in memory of its own."""
    names = _tensor_names(shard)
    position = 0
    while position < len(names):
        read_bytes = 0
        try:
            with safe_open(shard, framework="pt") as tensors:
                while position < len(names) and read_bytes < REMAP_BYTES:
                    tensor = tensors.get_tensor(names[position]).clone()
                    read_bytes += tensor.nbytes
                    yield names[position], tensor
                    position += 1
        except (SafetensorError, OSError) as error:
            raise _damaged(shard, error) from error


def _build_on_meta(path: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(path)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype or torch.float32)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise QuantizeError(f"{path / 'config.json'}: no model can be built from it ({_one_line(error)})") from error


def _persistent_buffers(model: PreTrainedModel) -> set[str]:
    volatile = {name for name, _ in model.named_non_persistent_buffers()}
    return {name for name, _ in model.named_buffers() if name not in volatile}


def _assign(model: PreTrainedModel, shards: list[Path], device: torch.device) -> None:
    """Puts each stored tensor in the place of the meta tensor of its name; others are ignored."""
    for shard in shards:
        for name, tensor in _read_tensors(shard):
            owner_name, _, leaf = name.rpartition(".")
            try:
                owner = model.get_submodule(owner_name)
            except AttributeError:
                continue
            place = getattr(owner, leaf, None)
            if not isinstance(place, torch.Tensor):
                continue
            if place.shape != tensor.shape:
                raise QuantizeError(
                    f"{shard}: {name} has shape {list(tensor.shape)}, config.json asks for {list(place.shape)}"
                )
            value = tensor.to(device=device, dtype=place.dtype)
            if leaf in owner._parameters:
                setattr(owner, leaf, nn.Parameter(value, requires_grad=False))
            else:
                setattr(owner, leaf, value)


def _finish(model: PreTrainedModel, path: Path, device: torch.device) -> PreTrainedModel:
    """Ties what is tied, computes the buffers that no checkpoint stores, and checks that nothing is left on meta."""
    model.tie_weights()
    _compute_volatile_buffers(model, device)
    missing = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    missing += [name for name, tensor in model.named_buffers() if tensor.is_meta]
    if missing:
        raise _missing(path, missing)
    model.requires_grad_(False)
    model.config._name_or_path = str(path)
    return model.eval()


def _missing(path: Path, names: list[str]) -> QuantizeError:
    shown = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return QuantizeError(f"{path}: tensors missing from the checkpoint: {shown}; download or quantize it again")


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


def _load_through_transformers(path: Path, device: str | torch.device, dtype: torch.dtype | None) -> PreTrainedModel:
    """What we have no loader for; transformers' warnings about absent weights become an error."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype or "auto", output_loading_info=True, use_safetensors=True
        )
    except Exception as error:
        # Any of a dozen quantizers may raise anything here; the user needs its message, not its stack.
        raise QuantizeError(f"{path}: transformers cannot load it ({_one_line(error)})") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    model, report = loaded
    if report["missing_keys"]:
        raise _missing(path, list(report["missing_keys"]))
    if report["mismatched_keys"]:
        raise QuantizeError(
            f"{path}: config.json asks for other shapes than stored: {sorted(report['mismatched_keys'])[:4]}"
        )
    model.requires_grad_(False)
    return model.to(device).eval()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
