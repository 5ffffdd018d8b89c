"""Our own CPU kernels for quantized linears (`cpu/linear.cpp`), built once on the machine that runs them.

They need AVX-512 with BF16 and VNNI, or AVX2, and a C++ compiler at the first use; else torch's kernels serve. Their
threads are torch's, because the OpenMP runtime that the library asks for is loaded already.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import nn

from quantize.kernels.custom_op import traceable
from quantize.kernels.reference import digit_group
from quantize.native_build import avx2_is_enough, load_native
from quantize.scheme import PER_CHANNEL, QuantizedWeight, Scheme

SOURCE = Path(__file__).with_name("cpu") / "linear.cpp"
LANES = 16
DIGITS = {"a16": 2, "a8": 1}
"""How many int8 digits an input of weight-only kernels becomes, by compute mode."""
LARGEST_GROUP_OF_TWO = 128
"""Above it a group's sum of products of two digits may leave int32 (see linear.h)."""


def has_avx512() -> bool:
    """AVX-512 with BF16 and VNNI."""
    supported = torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_vnni_supported()
    return bool(supported) and not avx2_is_enough()


def cpu_is_supported() -> bool:
    return has_avx512() or bool(torch.cpu._is_avx2_supported())


def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where this machine cannot have them."""
    return load_native(SOURCE) if cpu_is_supported() else None


def interleave(codes: torch.Tensor, step: int) -> torch.Tensor:
    """[N, K] as [ceil(N / 16), K / step, 16, step]: 16 outputs side by side, padded with zeros."""
    outputs, inputs = codes.shape
    padded = nn.functional.pad(codes, (0, 0, 0, -outputs % LANES))
    return padded.view(-1, LANES, inputs // step, step).transpose(1, 2).contiguous()


def by_lanes(values: torch.Tensor) -> torch.Tensor:
    """Per-group values [N, G] as [ceil(N / 16), G, 16]."""
    return interleave(values, 1).squeeze(-1)


def _pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _run(function: str, x: torch.Tensor, outputs: int, *arguments: torch.Tensor | int | None) -> torch.Tensor:
    """Calls one function of the library with x [M, K] and a kernel's tensors: [M, outputs]."""
    x = x.contiguous()
    tokens, inputs = x.shape
    out = torch.empty(tokens, outputs, dtype=x.dtype)
    loaded = library()
    assert loaded is not None
    passed = [ctypes.c_int64(value) if isinstance(value, int) else _pointer(value) for value in arguments]
    sizes = [ctypes.c_int64(size) for size in (tokens, outputs, inputs)]
    getattr(loaded, function)(_pointer(x), *passed, _pointer(out), *sizes)
    return out


def _empty(x: torch.Tensor, outputs: int, *_: torch.Tensor | int | None) -> torch.Tensor:
    return x.new_empty(x.shape[0], outputs)


@traceable("native_int8", _empty)
def _int8(
    x: torch.Tensor, outputs: int, codes: torch.Tensor, scale: torch.Tensor, digits: int, digit_group: int
) -> torch.Tensor:
    return _run("quantgate_int8", x, outputs, codes, scale, digits, digit_group)


@traceable("native_int4", _empty)
def _int4(
    x: torch.Tensor,
    outputs: int,
    nibbles: torch.Tensor,
    scale: torch.Tensor,
    scale_is_bf16: int,
    zero_point: torch.Tensor | None,
    digits: int,
    digit_group: int,
    spread: int,
) -> torch.Tensor:
    return _run("quantgate_int4", x, outputs, nibbles, scale, scale_is_bf16, zero_point, digits, digit_group, spread)


@traceable("native_dynamic_int8", _empty)
def _dynamic_int8(
    x: torch.Tensor, outputs: int, codes: torch.Tensor, scale: torch.Tensor, sums: torch.Tensor
) -> torch.Tensor:
    function = {torch.bfloat16: "quantgate_dynamic_int8_bf16", torch.float32: "quantgate_dynamic_int8_fp32"}
    return _run(function[x.dtype], x, outputs, codes, scale, sums)


class _Native(nn.Module):
    outputs: int
    codes: torch.Tensor
    nibbles: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    sums: torch.Tensor


def group_of_two(width: int) -> int:
    """How many inputs share the scale of their two digits: as many as the sums allow, in whole parts of `width`."""
    return max((size for size in range(8, LARGEST_GROUP_OF_TWO + 1, 8) if width % size == 0), default=0)


def _named(name: str, digits: int) -> str:
    return name if digits == 2 else f"{name}-a8"


class NativeInt8(_Native):
    """bf16 activations in digits, symmetric int8 per output channel: exact sums per group of inputs, float32 above
    them. What rounding there is, is that of a token: with two digits to a 65278th of its group's largest input, with
    one digit (a8) to a 254th, as `quantize_groups` does."""

    @staticmethod
    def supports(scheme: Scheme, inputs: int) -> bool:
        return scheme == Scheme(8, PER_CHANNEL, symmetric=True, activations=None)

    def __init__(self, weight: QuantizedWeight, digits: int = 2) -> None:
        super().__init__()
        self.name, self.digits = _named("native-int8", digits), digits
        self.outputs, inputs = weight.codes.shape
        self.digit_group = 64 if digits == 2 else digit_group(weight.scheme, inputs)
        codes = nn.functional.pad(weight.codes, (0, -inputs % 8))
        self.register_buffer("codes", interleave((codes.view(torch.uint8) ^ 128), 4))
        self.register_buffer("scale", by_lanes(weight.scale.float()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _int8(x, self.outputs, self.codes, self.scale, self.digits, self.digit_group)
        return out


class NativeInt4(_Native):
    """bf16 activations in digits (see NativeInt8), codes of up to 4 bits with or without zero points: exact sums per
    group."""

    @staticmethod
    def supports(scheme: Scheme, inputs: int) -> bool:
        return scheme.bits <= 4 and scheme.activations is None and group_of_two(scheme.group_width(inputs)) > 0

    def __init__(self, weight: QuantizedWeight, digits: int = 2) -> None:
        super().__init__()
        self.name, self.digits = _named("native-int4", digits), digits
        self.outputs, inputs = weight.codes.shape
        width = weight.scheme.group_width(inputs)
        self.digit_group = group_of_two(width) if digits == 2 else digit_group(weight.scheme, inputs)
        self.spread = width // self.digit_group
        lanes = interleave((weight.codes + 8).view(torch.uint8), 8)
        self.register_buffer("nibbles", lanes[..., :4] | (lanes[..., 4:] << 4))
        self.scale_is_bf16 = int(weight.scale.dtype == torch.bfloat16)
        self.register_buffer("scale", by_lanes(weight.scale if self.scale_is_bf16 else weight.scale.float()))
        self.register_buffer("zero_point", None if weight.zero_point is None else by_lanes(weight.zero_point))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        digits = (self.digits, self.digit_group, self.spread)
        out: torch.Tensor = _int4(
            x, self.outputs, self.nibbles, self.scale, self.scale_is_bf16, self.zero_point, *digits
        )
        return out


class NativeDynamicInt8(_Native):
    """W8A8 in one call: tokens are quantized as `quantize_tokens` does, the integer product is exact."""

    name = "native-int8-dynamic"

    @staticmethod
    def supports(scheme: Scheme, inputs: int) -> bool:
        return scheme == Scheme(8, PER_CHANNEL, symmetric=True, activations="int8")

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__()
        self.outputs, inputs = weight.codes.shape
        codes = nn.functional.pad(weight.codes, (0, -inputs % 4))
        self.register_buffer("codes", interleave(codes, 4))
        self.register_buffer("scale", by_lanes(weight.scale.float()))
        sums = weight.codes.sum(dim=1, dtype=torch.int32)
        self.register_buffer("sums", nn.functional.pad(sums, (0, -self.outputs % LANES)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _dynamic_int8(x, self.outputs, self.codes, self.scale, self.sums)
        return out
