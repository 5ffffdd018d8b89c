"""Makes a kernel that torch cannot look into an operator that torch.compile can step over.

The one idea: an operator costs microseconds of dispatch per call, and only a compiler needs it. So eager calls go
straight to the function, and the operator takes its place while torch traces.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch


def traceable(name: str, fake: Callable[..., torch.Tensor]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function of tensors and numbers that changes none of its arguments; it becomes `quantgate::name`.
    `fake` takes the same arguments and gives an empty result of the right shape, dtype and device."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        operator = torch.library.custom_op(f"quantgate::{name}", function, mutates_args=())
        operator.register_fake(fake)

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            return operator(*arguments) if torch.compiler.is_compiling() else function(*arguments)

        return call

    return decorate
