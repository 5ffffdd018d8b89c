"""What an integer weight is: a grid (bits, group, symmetry), codes on that grid, and the way back to floats.

The one rule: codes are always computed against the scale *as it is stored*, that is, rounded to the checkpoint's dtype,
so that a loader which multiplies codes by stored scales gets exactly the weight that was measured here.
"""

from dataclasses import dataclass

import torch

from quantize.errors import QuantizeError

PER_CHANNEL = -1
"""The `group_size` that means one scale per output channel."""


@dataclass(frozen=True)
class Scheme:
    """How one linear is stored. `group_size` counts input channels per scale; `activations` is None or "int8"
    (dynamic, per token, symmetric)."""

    bits: int
    group_size: int = PER_CHANNEL
    symmetric: bool = True
    activations: str | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise QuantizeError(f"bits: {self.bits} is not between 2 and 8")
        if self.group_size != PER_CHANNEL and self.group_size < 1:
            raise QuantizeError(f"group_size: {self.group_size} is neither positive nor -1 (per output channel)")
        if self.activations not in (None, "int8"):
            raise QuantizeError(f"activations: {self.activations!r} is neither null nor int8")

    @property
    def lowest(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def highest(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def group_width(self, inputs: int) -> int:
        """Input channels that share a scale, in a weight with `inputs` of them."""
        return inputs if self.group_size == PER_CHANNEL else self.group_size

    def divides(self, inputs: int) -> bool:
        return inputs % self.group_width(inputs) == 0


@dataclass(frozen=True)
class QuantizedWeight:
    """`codes` int8 [N, K] in [lowest, highest]; `scale` [N, G] in the checkpoint's dtype; `zero_point` int8 [N, G] in
    the same signed range as the codes, or None when symmetric. G = K / group width."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    scheme: Scheme


@dataclass(frozen=True)
class Grid:
    """The representable points of a weight: `scale` [N, G] in the stored dtype, `zero_point` int8 [N, G] or None."""

    scale: torch.Tensor
    zero_point: torch.Tensor | None
    scheme: Scheme

    def spread(self, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero point per weight, float32 [N, K] each."""
        width = self.scheme.group_width(inputs)
        scale = self.scale.float().repeat_interleave(width, dim=1)
        if self.zero_point is None:
            return scale, torch.zeros((), device=scale.device)
        return scale, self.zero_point.float().repeat_interleave(width, dim=1)


def grid_from_range(low: torch.Tensor, high: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> Grid:
    """The grid that covers [low, high] (float32 [N, G]), by compressed-tensors' formula (`calculate_qparams`):
    symmetric max(|low|, |high|) / ((2^b - 1) / 2), so that the outermost values are rounded half a step inwards;
    asymmetric (high - low) / (2^b - 1), with zero always representable. A group of zeros takes scale 1, so that no
    scale is ever 0."""
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    steps = float(scheme.highest - scheme.lowest)
    if scheme.symmetric:
        ideal = torch.maximum(-low, high) / (steps / 2)
    else:
        ideal = (high - low) / steps
    smallest = torch.finfo(dtype).tiny
    scale = torch.where(ideal > 0, ideal.clamp(min=smallest), 1.0).to(dtype)
    if scheme.symmetric:
        return Grid(scale, None, scheme)
    zero_point = (scheme.lowest - low / scale.float()).round().clamp(scheme.lowest, scheme.highest)
    return Grid(scale, zero_point.to(torch.int8), scheme)


def grid_of(weight: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> Grid:
    """The plain grid of `weight` [N, K]: every group's smallest and largest weight."""
    groups = grouped(weight.float(), scheme)
    return grid_from_range(groups.amin(dim=2), groups.amax(dim=2), scheme, dtype)


def grouped(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """`weight` [N, K] seen as [N, G, group width]."""
    outputs, inputs = weight.shape
    width = scheme.group_width(inputs)
    if inputs % width:
        raise QuantizeError(f"group_size {width} does not divide {inputs} inputs")
    return weight.reshape(outputs, inputs // width, width)


def round_to_grid(weight: torch.Tensor, grid: Grid) -> QuantizedWeight:
    """Every weight [N, K] to its nearest point of the grid."""
    scale, zero_point = grid.spread(weight.shape[1])
    codes = (weight.float() / scale).round_().add_(zero_point).clamp_(grid.scheme.lowest, grid.scheme.highest)
    return QuantizedWeight(codes.to(torch.int8), grid.scale, grid.zero_point, grid.scheme)


def quantize_rtn(weight: torch.Tensor, scheme: Scheme, dtype: torch.dtype | None = None) -> QuantizedWeight:
    """Round to nearest on the plain grid. `dtype` is that of the stored scales (default: the weight's own)."""
    return round_to_grid(weight, grid_of(weight, scheme, dtype or weight.dtype))


def dequantize(quantized: QuantizedWeight, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The weight [N, K] that the codes stand for: (codes - zero_point) * scale, rounded once to `dtype` (default: the
    scale's)."""
    grid = Grid(quantized.scale, quantized.zero_point, quantized.scheme)
    scale, zero_point = grid.spread(quantized.codes.shape[1])
    return ((quantized.codes.float() - zero_point) * scale).to(dtype or quantized.scale.dtype)
