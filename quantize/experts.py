"""A layer's experts as linears of their own.

transformers runs all experts of a layer from two three-dimensional tensors, while checkpoints hold one linear per
expert and projection. `SplitExperts` computes what the fused module does from such linears, so that everything that
knows linears (calibration, the methods, the kernels) knows experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from quantize.methods.fusion import Fusion


class SplitExperts(nn.Module):
    """Stands where a fused experts module stood. Its children are the experts "0" to "E - 1"; each holds its linears
    under the names `into` (gate and up) and `out` (down).

    The contract is that of transformers' experts implementations: the module's `_apply_gate` turns the outputs of
    `into`, side by side, into the inputs of `out`.
    """

    def __init__(self, fused: nn.Module, into: Sequence[str], out: str) -> None:
        """Takes shapes, dtype and device from `fused`, whose tensors it then drops."""
        super().__init__()
        first, last = fused.get_parameter("gate_up_proj"), fused.get_parameter("down_proj")
        self.into, self.out = tuple(into), out
        self.apply_gate: Callable[[torch.Tensor], torch.Tensor] = fused._apply_gate  # type: ignore[assignment]
        for index in range(first.shape[0]):
            expert = nn.Module()
            for name in into:
                expert.add_module(name, empty_linear(first, first.shape[1] // len(into)))
            expert.add_module(out, empty_linear(last, last.shape[1]))
            self.add_module(str(index), expert)
        # `apply_gate` is bound to the fused module, which lives on for its activation alone.
        fused._parameters.clear()

    def __len__(self) -> int:
        return len(self._modules)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, k] -> [tokens, hidden]. An expert that
        no token chose does not run."""
        output = torch.zeros_like(hidden_states)
        choices = top_k_index.reshape(-1)
        order = choices.argsort(stable=True)
        start = 0
        for expert, count in enumerate(choices.bincount(minlength=len(self)).tolist()):
            if count:
                chosen = order[start : start + count]
                tokens = chosen // top_k_index.shape[1]
                result = self.run_expert(expert, hidden_states[tokens])
                weighted = result * top_k_weights.reshape(-1)[chosen][:, None]
                output.index_add_(0, tokens, weighted.to(output.dtype))
            start += count
        return output

    def run_expert(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """rows [chosen tokens, hidden], which all of `into` see as one tensor -> [chosen tokens, hidden]"""
        expert = self._modules[str(index)]
        assert expert is not None
        gate_up = torch.cat([expert._modules[name](rows) for name in self.into], dim=-1)  # type: ignore[misc]
        result: torch.Tensor = expert._modules[self.out](self.apply_gate(gate_up))  # type: ignore[misc]
        return result


def empty_linear(fused: torch.Tensor, outputs: int) -> nn.Linear:
    """A linear of the inputs, dtype and device of `fused` [E, N, K], its values still to be loaded."""
    return nn.Linear(fused.shape[2], outputs, bias=False, dtype=fused.dtype, device=fused.device)


def is_splittable(module: nn.Module) -> bool:
    """Whether a module is fused experts as transformers' experts implementations define them, in the plain form: gate
    beside up, no bias. (GPT-OSS interleaves, transposes and has biases; Nemotron has no gate.)"""
    return (
        callable(getattr(module, "_apply_gate", None))
        and {name: parameter.dim() for name, parameter in module.named_parameters()}
        == {"gate_up_proj": 3, "down_proj": 3}
        and not getattr(module, "is_transposed", True)
        and not getattr(module, "has_bias", True)
        and getattr(module, "has_gate", False) is True
        and getattr(module, "is_concatenated", False) is True
    )


def with_one_expert(leaders: Mapping[str, str], mixtures: Mapping[str, SplitExperts]) -> dict[str, str]:
    """`leaders` (any mapping by linear) with only the first expert of each mixture that is in it."""
    left = dict(leaders)
    for path in mixtures:
        numbers = {
            name: name.removeprefix(f"{path}.").partition(".")[0] for name in left if name.startswith(f"{path}.")
        }
        first = min(map(int, numbers.values()), default=0)
        left = {name: leader for name, leader in left.items() if numbers.get(name, str(first)) == str(first)}
    return left


def for_every_expert(fusions: Sequence[Fusion], mixtures: Mapping[str, SplitExperts]) -> tuple[Fusion, ...]:
    """A fusion within one expert is one within each: they differ in their weights alone."""
    spread: list[Fusion] = []
    for fusion in fusions:
        names = (fusion.source, *fusion.consumers)
        path = next((path for path in mixtures if all(name.startswith(f"{path}.") for name in names)), None)
        if path is None:
            spread.append(fusion)
            continue
        source, *consumers = (name.removeprefix(f"{path}.").partition(".")[2] for name in names)
        for index in range(len(mixtures[path])):
            own = f"{path}.{index}."
            spread.append(replace(fusion, source=own + source, consumers=tuple(own + name for name in consumers)))
    return tuple(spread)
