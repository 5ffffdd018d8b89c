"""Reads and writes quantized linears as AutoAWQ's GEMM layout has them, without importing that library.

For a weight of N outputs and K inputs, 4 bits, groups of g inputs (G = K / g; G = 1 per channel):

| tensor    | shape            | holds                                                            |
|-----------|------------------|------------------------------------------------------------------|
| `qweight` | int32 [K, N / 8] | code + 8, eight outputs to a word                                |
| `qzeros`  | int32 [G, N / 8] | zero point + 8, the same way; 8 everywhere when symmetric        |
| `scales`  | fp16 [G, N]      |                                                                  |

Dequantized weight = (code - zero_point) * scale, code and zero_point signed. Of eight neighbouring outputs the nibbles
of a word, lowest first, hold number 0, 2, 4, 6, 1, 3, 5, 7. Worked values: codes -8 -7 -6 -5 -4 -3 -2 -1 of outputs 0
to 7 at one input are nibbles 0 2 4 6 1 3 5 7, which is the word 0x75316420; no zero points are 0x88888888.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from quantize.errors import QuantizeError
from quantize.formats.compressed_tensors import pack_codes, unpack_codes
from quantize.formats.gptq import one_scheme
from quantize.formats.half import half_scale
from quantize.scheme import QuantizedWeight, Scheme

METHOD = "awq"
BITS = 4
PER_WORD = 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
LEAVES = frozenset({"qweight", "qzeros", "scales"})


def pack_weight(module_name: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """The tensors of the linear `module_name`. Raises QuantizeError for what `misfit` names and for scales that fp16
    does not hold exactly."""
    outputs, inputs = weight.codes.shape
    reason = misfit(weight.scheme, outputs, inputs)
    if reason:
        raise QuantizeError(f"{module_name}: {reason}")
    scale = half_scale(weight.scale, module_name)
    zero_point = weight.zero_point if weight.zero_point is not None else torch.zeros_like(scale, dtype=torch.int8)
    tensors = {
        "qweight": interleave(weight.codes.T),
        "qzeros": interleave(zero_point.T),
        "scales": scale.T.contiguous(),
    }
    return {f"{module_name}.{name}": tensor for name, tensor in tensors.items()}


def misfit(scheme: Scheme, outputs: int, inputs: int) -> str | None:
    """Why a weight of this scheme and shape cannot be written as AWQ GEMM; None when it can."""
    if scheme.bits != BITS:
        return f"AWQ holds 4 bits, not {scheme.bits}; use gptq or compressed-tensors"
    if scheme.activations:
        return "AWQ cannot say that activations are quantized; use compressed-tensors"
    if outputs % PER_WORD:
        return f"AWQ packs eight outputs to a word, which {outputs} outputs do not fill; use compressed-tensors"
    if not scheme.divides(inputs):
        return f"group size {scheme.group_size} does not divide {inputs} inputs"
    return None


def interleave(codes: torch.Tensor) -> torch.Tensor:
    """Signed codes int8 [rows, N] as words int32 [rows, N / 8]."""
    rows, outputs = codes.shape
    return pack_codes(codes.reshape(rows, outputs // PER_WORD, PER_WORD)[..., ORDER].reshape(rows, outputs), BITS)


def straighten(words: torch.Tensor) -> torch.Tensor:
    """Inverse of `interleave`."""
    rows, columns = words.shape
    stored = unpack_codes(words, BITS, columns * PER_WORD).reshape(rows, columns, PER_WORD)
    codes = torch.empty_like(stored)
    codes[..., ORDER] = stored
    return codes.reshape(rows, columns * PER_WORD)


def quantization_config(schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of config.json; `ignored` are the linears that keep their weights."""
    # With and without zero points are stored alike.
    scheme = one_scheme({name: replace(scheme, symmetric=False) for name, scheme in schemes.items()}, METHOD)
    return {
        "quant_method": METHOD,
        "version": "gemm",
        "bits": BITS,
        "group_size": scheme.group_size,
        "zero_point": True,
        "modules_to_not_convert": sorted(ignored) or None,
    }


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """The scheme that `quantization_config` says; None for another layout (GEMV, llm-awq, other bits)."""
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version != "gemm" or config.get("bits", config.get("w_bit", BITS)) != BITS or config.get("backend") == "llm-awq":
        return None
    group_size = config.get("group_size", config.get("q_group_size", 128))
    if not isinstance(group_size, int):
        raise QuantizeError(f"quantization_config: group_size: {group_size!r} is no whole number")
    return Scheme(BITS, group_size, symmetric=False)


def unpack_weight(tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedWeight:
    """The weight from its stored tensors, under their names without the module's. Its scheme is symmetric where all
    zero points are 0. Raises QuantizeError for shapes that do not fit together."""
    qweight, qzeros, scales = tensors["qweight"], tensors["qzeros"], tensors["scales"]
    inputs, (groups, outputs) = qweight.shape[0], scales.shape
    fits = scheme.divides(inputs) and groups == inputs // scheme.group_width(inputs)
    if not fits or qweight.shape[1] * PER_WORD != outputs or qzeros.shape != (groups, qweight.shape[1]):
        raise QuantizeError(
            f"qweight {list(qweight.shape)}, qzeros {list(qzeros.shape)} and scales {list(scales.shape)} do not fit "
            f"groups of {scheme.group_size}"
        )
    if qweight.dtype != torch.int32 or qzeros.dtype != torch.int32:
        raise QuantizeError(f"qweight is {qweight.dtype} and qzeros {qzeros.dtype}, not int32")
    zero_point = straighten(qzeros).T.contiguous()
    symmetric = not bool(zero_point.any())
    return QuantizedWeight(
        straighten(qweight).T.contiguous(),
        scales.T.contiguous(),
        None if symmetric else zero_point,
        Scheme(BITS, scheme.group_size, symmetric),
    )
