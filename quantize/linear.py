"""A linear layer whose weight stays quantized in memory."""

from __future__ import annotations

import torch
from torch import nn

from quantize.kernels.choose import choose_kernel
from quantize.scheme import QuantizedWeight, Scheme


class QuantizedLinear(nn.Module):
    """Stands where an `nn.Linear` stood. Its kernel owns the weight, in the layout that it multiplies with."""

    def __init__(
        self, weight: QuantizedWeight, bias: nn.Parameter | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.codes.shape
        self.scheme: Scheme = weight.scheme
        self.kernel = choose_kernel(weight, device, dtype)
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]."""
        product: torch.Tensor = self.kernel(x.reshape(-1, self.in_features))
        if self.bias is not None:
            product = product + self.bias
        return product.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.scheme}"
