"""Which format linears are written in, and how those of a given checkpoint are read.

What every format shares is `QuantizedWeight`; the rest of the package knows a format only through the two classes here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from quantize.checkpoint import CONFIG, Checkpoint, one_line
from quantize.errors import QuantizeError
from quantize.formats import awq_gemm, compressed_tensors, gptq
from quantize.formats.half import raise_small_scales
from quantize.scheme import QuantizedWeight, Scheme

QUANTIZE_CONFIG = "quantize_config.json"
"""Where AutoGPTQ's older checkpoints say what others say in config.json."""

UNREADABLE = (QuantizeError, RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError,
              re.error)  # fmt: skip
"""What comes up where a file that others wrote is of another shape than it should be."""

Unpacked = tuple[QuantizedWeight, torch.Tensor | None]
"""A weight, and the order [K] of its columns where that is not the order of the inputs."""


@dataclass(frozen=True)
class Format:
    """How linears are written. misfit says why a scheme with N outputs and K inputs cannot be; leaf is the tensor that
    every linear has; is_half: scales are stored as fp16; takes_head: loaders find a quantized head."""

    pack: Callable[[str, QuantizedWeight], dict[str, torch.Tensor]]
    unpack: Callable[[Mapping[str, torch.Tensor], Scheme], QuantizedWeight]
    config: Callable[[Mapping[str, Scheme], Iterable[str]], dict[str, Any]]
    misfit: Callable[[Scheme, int, int], str | None]
    leaf: str
    is_half: bool
    takes_head: bool

    def scale_dtype(self, weights: torch.dtype) -> torch.dtype:
        """The dtype in which scales are searched, for weights of that dtype: bf16 has fewer digits than fp16, and a
        scale that both hold serves a model in either."""
        return torch.float16 if self.is_half and weights == torch.float32 else weights

    def storable(self, weight: QuantizedWeight) -> QuantizedWeight:
        """The weight with scales that the format can store."""
        return raise_small_scales(weight) if self.is_half else weight


FORMATS = {
    "compressed-tensors": Format(
        compressed_tensors.pack_weight,
        compressed_tensors.unpack_weight,
        compressed_tensors.quantization_config,
        compressed_tensors.misfit,
        "weight_scale",
        is_half=False,
        takes_head=True,
    ),
    "gptq": Format(
        gptq.pack_weight,
        lambda tensors, scheme: gptq.unpack_weight(tensors, scheme)[0],
        gptq.quantization_config,
        gptq.misfit,
        "scales",
        is_half=True,
        takes_head=False,
    ),
    "awq": Format(
        awq_gemm.pack_weight,
        awq_gemm.unpack_weight,
        awq_gemm.quantization_config,
        awq_gemm.misfit,
        "scales",
        is_half=True,
        takes_head=False,
    ),
}


def refuse_misfits(
    schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, int]], heads: Iterable[str], name: str
) -> None:
    """Raises QuantizeError for modules (`shapes` are [outputs, inputs]) that the format `name` cannot hold."""
    form = FORMATS[name]
    for module, scheme in schemes.items():
        reason = form.misfit(scheme, *shapes[module])
        if reason:
            raise QuantizeError(f"format: {module}: {reason}")
    head = next((module for module in heads if module in schemes), None)
    if head is not None and not form.takes_head:
        raise QuantizeError(
            f"format: {head}: transformers looks for no quantized head in {name}; put it into ignore, "
            "or use compressed-tensors"
        )
    form.config(schemes, [])  # raises where there is room for one scheme only


@dataclass(frozen=True)
class StoredLinear:
    """A quantized linear on the disk: what it says it is, the tensors it must have (without the module's name), the one
    by which its file is named, and how they become a weight."""

    scheme: Scheme
    leaves: frozenset[str]
    leaf: str
    unpack: Callable[[Mapping[str, torch.Tensor]], Unpacked]

    def read(self, tensors: Mapping[str, torch.Tensor], outputs: int, inputs: int) -> Unpacked:
        """`unpack` for a linear of that many outputs and inputs. Raises QuantizeError, which says what is wrong and not
        where, for tensors that are none of this kind."""
        try:
            weight, order = self.unpack(tensors)
        except UNREADABLE as failure:
            raise QuantizeError(f"not stored as config.json says ({one_line(failure)})") from None
        scale = weight.scale
        if tuple(weight.codes.shape) != (outputs, inputs):
            raise QuantizeError(f"is {list(weight.codes.shape)}, but config.json makes it {[outputs, inputs]}")
        if not scale.is_floating_point() or not bool(torch.isfinite(scale.float()).all()):
            what = "NaN or inf" if scale.is_floating_point() else f"whole numbers ({scale.dtype})"
            raise QuantizeError(f"has {what} among its scales")
        if weight.zero_point is not None and weight.zero_point.shape != scale.shape:
            raise QuantizeError(f"has scales {list(scale.shape)}, but zero points {list(weight.zero_point.shape)}")
        return weight, order


def quantization_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the checkpoint says of its quantization; empty when it is not quantized."""
    settings = checkpoint.config.get("quantization_config")
    if settings is None and any(name.endswith(".qweight") for name in checkpoint.files):
        settings = checkpoint.settings(QUANTIZE_CONFIG) | {"quant_method": gptq.METHOD}
    return settings or {}


def stored_linears(checkpoint: Checkpoint, linears: Iterable[str]) -> dict[str, StoredLinear] | None:
    """The quantized ones of `linears`; None when they are stored in a way that is not read here. Raises QuantizeError
    for settings that nobody can read."""
    settings = quantization_of(checkpoint)
    try:
        return linears_by_settings(settings, set(checkpoint.files), list(linears))
    except UNREADABLE as failure:
        said = f"{type(failure).__name__}: {one_line(failure)}" if not isinstance(failure, QuantizeError) else failure
        raise QuantizeError(
            f"{checkpoint.path / CONFIG}: quantization_config makes no sense ({said}); fetch the checkpoint again"
        ) from None


def linears_by_settings(
    settings: Mapping[str, Any], names: set[str], linears: Iterable[str]
) -> dict[str, StoredLinear] | None:
    method = settings.get("quant_method")
    if method == compressed_tensors.METHOD:
        schemes = compressed_tensors.schemes_of(settings, linears)
        return (
            None if schemes is None else {name: of_compressed_tensors(name, schemes[name], names) for name in schemes}
        )
    packed = [name for name in linears if f"{name}.qweight" in names]
    if method == gptq.METHOD and packed:
        said = gptq.read_settings(settings)
        return None if said is None else {name: of_gptq(said, said.scheme_of(name), name, names) for name in packed}
    if method == awq_gemm.METHOD and packed:
        scheme = awq_gemm.read_scheme(settings)
        return None if scheme is None else dict.fromkeys(packed, of_awq(scheme))
    return None


def of_compressed_tensors(name: str, scheme: Scheme, names: set[str]) -> StoredLinear:
    layout = compressed_tensors.PACKED if f"{name}.weight_packed" in names else compressed_tensors.PLAIN
    leaves = frozenset(compressed_tensors.stored_names(scheme, layout))
    return StoredLinear(
        scheme, leaves, "weight_scale", lambda tensors: (compressed_tensors.unpack_weight(tensors, scheme), None)
    )


def of_gptq(said: gptq.Settings, scheme: Scheme, name: str, names: set[str]) -> StoredLinear:
    # GPTQModel's newer files leave a plain g_idx out.
    leaves = gptq.LEAVES if f"{name}.g_idx" in names else gptq.LEAVES - {"g_idx"}
    unpack = partial(gptq.unpack_weight, scheme=scheme, version=said.version, borrows=said.borrows)
    return StoredLinear(scheme, leaves, "scales", unpack)


def of_awq(scheme: Scheme) -> StoredLinear:
    return StoredLinear(
        scheme, awq_gemm.LEAVES, "scales", lambda tensors: (awq_gemm.unpack_weight(tensors, scheme), None)
    )
