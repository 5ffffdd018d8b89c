"""bfloat16 linears for a few tokens on the CPU: `dense_linear.cpp` under a model's own `nn.Linear` modules.

The one idea: the module stays what it is (same parameters, same name, no copy of a weight, quantized linears
untouched); only its forward goes another way while the batch is small. What is large stays torch's.
"""

import ctypes
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from quantize.kernels.native import cpu_is_supported
from quantize.native_build import load_native

SOURCE = Path(__file__).parent / "dense_linear.cpp"
# Above this torch's own matrix product, which tiles the tokens too, is as fast.
MAX_TOKENS = 16


class NativeLinear(nn.Linear):
    """An `nn.Linear` in bfloat16 whose small batches run in the native kernel."""

    library: ClassVar[ctypes.CDLL]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        tokens = input.numel() // weight.shape[1]
        if tokens > MAX_TOKENS or input.dtype != torch.bfloat16 or not input.is_contiguous() or tokens == 0:
            return nn.functional.linear(input, weight, self.bias)
        output = torch.empty((*input.shape[:-1], weight.shape[0]), dtype=torch.bfloat16)
        self.library.dense_linear(
            input.data_ptr(),
            weight.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            output.data_ptr(),
            tokens,
            weight.shape[0],
            weight.shape[1],
            torch.get_num_threads(),
        )
        return output


def use_native_linears(model: nn.Module) -> list[str]:
    """Let every plain bfloat16 linear on the CPU use the kernel; their names. Empty where the kernel cannot be had."""
    plain = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module.weight.dtype == torch.bfloat16
        and module.weight.device.type == "cpu"
        and module.weight.is_contiguous()
    }
    library = load_native(SOURCE) if plain and cpu_is_supported() else None
    if library is None:
        return []
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.dense_linear.argtypes = (pointer, pointer, pointer, pointer, size, size, size, ctypes.c_int32)
    library.dense_linear.restype = None
    NativeLinear.library = library
    for module in plain.values():
        module.__class__ = NativeLinear
    return list(plain)
