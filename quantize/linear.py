"""A linear layer whose weight stays quantized in memory."""

from __future__ import annotations

import torch
from torch import nn

from quantize.kernels.choose import choose_kernel
from quantize.scheme import QuantizedWeight, Scheme


class QuantizedLinear(nn.Module):
    """Stands where an `nn.Linear` stood. Its kernel owns the weight, in the layout that it multiplies with. `order` [K]
    says which input each column of the weight multiplies, when they are not in order (GPTQ's act-order). `compute` is
    "a8" where inputs are rounded to 8 bits, because the scheme says so or because it was asked for, else "a16"."""

    order: torch.Tensor | None

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: nn.Parameter | None,
        device: torch.device,
        dtype: torch.dtype,
        order: torch.Tensor | None = None,
        compute: str = "a16",
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.codes.shape
        self.scheme: Scheme = weight.scheme
        self.compute = "a16" if weight.scheme.activations is None and compute == "a16" else "a8"
        self.kernel = choose_kernel(weight, device, dtype, compute)
        self.bias = bias
        self.register_buffer("order", None if order is None else order.to(device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        product: torch.Tensor = self.kernel(rows if self.order is None else rows[:, self.order])
        if self.bias is not None:
            product = product + self.bias
        return product.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.scheme}"
