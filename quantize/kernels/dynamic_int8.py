"""INT8 weights times INT8 activations, both per channel: the integer product is exact, the two scales come last."""

from __future__ import annotations

import torch
from torch import nn

from quantize.kernels.reference import quantize_tokens
from quantize.scheme import PER_CHANNEL, QuantizedWeight, Scheme

# |code product| <= 2^14, and float32 holds integers up to 2^24 exactly: 1024 products may be added without rounding.
EXACT_INPUTS = 1024


class DynamicInt8(nn.Module):
    """W8A8: symmetric int8 per output channel, tokens quantized as they come."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def supports(scheme: Scheme) -> bool:
        return scheme == Scheme(8, PER_CHANNEL, symmetric=True, activations="int8")

    def __init__(self, weight: QuantizedWeight, integer_product: bool) -> None:
        """integer_product: the device multiplies int8 exactly (`_int_mm`); otherwise float32 does, in exact pieces."""
        super().__init__()
        self.integer_product = integer_product
        self.name = "torch-int8-dynamic" if integer_product else "exact-float-int8-dynamic"
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scale", weight.scale.float().reshape(1, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, token_scale = quantize_tokens(x)
        if self.integer_product:
            sums = torch._int_mm(tokens, self.codes.T).float()
        else:
            sums = exact_product(tokens, self.codes)
        return sums.mul_(token_scale).mul_(self.scale).to(x.dtype)


def exact_product(tokens: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """int8 [M, K] times int8 [N, K] transposed, as float32 [M, N], rounded once however the machine adds."""
    total = torch.zeros(tokens.shape[0], codes.shape[0], dtype=torch.float64, device=tokens.device)
    for start in range(0, tokens.shape[1], EXACT_INPUTS):
        piece = slice(start, start + EXACT_INPUTS)
        total += tokens[:, piece].float() @ codes[:, piece].float().T
    return total.float()


def cpu_multiplies_int8_exactly() -> bool:
    """Without VNNI, oneDNN halves one operand to keep 16-bit sums from saturating, and the product is not exact."""
    return bool(torch.cpu._is_vnni_supported())
