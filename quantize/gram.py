"""Second moments of a linear's inputs, H = XᵀX / tokens in float32: all that gptq and awq need to know about the data.

With H in hand the output error of any candidate weight, ‖WX − ŴX‖² / tokens = tr(Δ H Δᵀ), costs no forward pass, and
every calibration token counts in it. Linears that read the same tensor (q, k and v) share one H.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from quantize.kernels.native import has_avx512
from quantize.native_build import load_native

SOURCE = Path(__file__).with_suffix(".cpp")
BLOCK = 192
"""Columns summed at once; small blocks waste less below the diagonal, large ones run faster."""


class Gram:
    """Running H of one input tensor. Only blocks on and above the diagonal are summed; `matrix()` mirrors them."""

    def __init__(self, inputs: int, device: torch.device) -> None:
        self._sum = torch.zeros(inputs, inputs, dtype=torch.float32, device=device)
        self.tokens = 0
        self._weight = 0.0

    def add(self, activations: torch.Tensor, importance: torch.Tensor | None = None) -> None:
        """`activations` [..., K]; `importance` float32 [tokens] weighs each token's square."""
        rows = activations.reshape(-1, activations.shape[-1])
        library = load_native(SOURCE) if rows.is_cpu and rows.dtype == torch.bfloat16 and has_avx512() else None
        self._weight += rows.shape[0] if importance is None else float(importance.sum())
        if importance is not None:
            add_in_blocks(self._sum, rows.float() * importance.sqrt()[:, None])
        elif library is None:
            add_in_blocks(self._sum, rows.float())
        else:
            rows = rows.contiguous()
            sizes = [ctypes.c_int64(size) for size in rows.shape]
            library.gram_add(ctypes.c_void_p(rows.data_ptr()), *sizes, ctypes.c_void_p(self._sum.data_ptr()))
        self.tokens += rows.shape[0]

    def matrix(self) -> torch.Tensor:
        """H, float32 [K, K], symmetric to the bit: the mean over tokens, weighted by their importance."""
        upper = self._sum.triu() / (self._weight or 1.0)
        return upper + upper.triu(1).T


def add_in_blocks(total: torch.Tensor, rows: torch.Tensor) -> None:
    """Adds rowsᵀ rows to `total` [K, K], in blocks on and above the diagonal; `rows` float32 [T, K]."""
    columns = rows.T
    for start in range(0, rows.shape[1], BLOCK):
        stop = start + BLOCK
        total[start:stop, start:].addmm_(columns[start:stop], rows[:, start:])


class InputsKnown(Exception):
    """Every linear has shown its input; what the pass would still compute is not needed."""


class InputRecorder:
    """Watches linears during forward passes and keeps one Gram per distinct input tensor.

    Which linears share an input is seen when they first run, by the identity of the tensors, and kept for later passes.
    Which linear comes last, where a pass that is run only for its inputs can stop, is known after a pass in which all
    of them ran (experts that no token chose do not).
    """

    def __init__(self, linears: Mapping[str, nn.Linear], sampled_every: int | None = None) -> None:
        """sampled_every: also keep one in so many tokens."""
        self._linears = dict(linears)
        self._sampled_every = sampled_every
        self._samples: dict[str, list[torch.Tensor]] = {}
        self.leader: dict[str, str] = {}
        self._grams: dict[str, Gram] = {}
        self._seen: list[tuple[str, torch.Tensor]] = []
        self._last: str | None = None
        self.importance: torch.Tensor | None = None
        """How much each token of the coming pass counts, float32 [tokens]; None: all alike."""

    @contextmanager
    def watching(self, only_inputs: bool = False) -> Iterator[None]:
        """Records the passes made inside. only_inputs: a pass ends with InputsKnown at the last linear's input."""
        handles = [
            linear.register_forward_pre_hook(self._hook(name, only_inputs)) for name, linear in self._linears.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def next_batch(self) -> None:
        """Forgets the tensors of the last pass (their identity means nothing any more)."""
        if len({name for name, _ in self._seen}) == len(self._linears):
            self._last = self._seen[-1][0]
        self._seen.clear()

    def grams(self) -> dict[str, torch.Tensor]:
        """H per linear; linears with the same input get the very same tensor. A linear that never ran is left out."""
        matrices = {name: gram.matrix() for name, gram in self._grams.items()}
        return {name: matrices[leader] for name, leader in self.leader.items()}

    def tokens(self) -> dict[str, int]:
        """How many tokens reached each linear; one that never ran is left out."""
        return {name: self._grams[leader].tokens for name, leader in self.leader.items()}

    def samples(self) -> dict[str, torch.Tensor]:
        """The kept tokens per linear, float32 [T, K], shared as the grams are; empty when none were to be kept."""
        tokens = {name: torch.cat(rows) for name, rows in self._samples.items()}
        return {name: tokens[leader] for name, leader in self.leader.items() if leader in tokens}

    def _importance_of(self, activations: torch.Tensor) -> torch.Tensor | None:
        """An expert gets a choice of the tokens, of which nothing says which they are: there all count alike."""
        whole = self.importance is not None and activations.shape[:-1].numel() == len(self.importance)
        return self.importance if whole else None

    def _hook(self, name: str, only_inputs: bool) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def record(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            activations = args[0]
            if name not in self.leader:
                twin = next((other for other, tensor in self._seen if tensor is activations), name)
                self.leader[name] = self.leader.get(twin, twin)
            self._seen.append((name, activations))
            if self.leader[name] == name:
                if name not in self._grams:
                    self._grams[name] = Gram(activations.shape[-1], activations.device)
                if self._sampled_every is not None:
                    rows = activations.reshape(-1, activations.shape[-1])
                    skipped = -self._grams[name].tokens % self._sampled_every
                    self._samples.setdefault(name, []).append(rows[skipped :: self._sampled_every].float())
                self._grams[name].add(activations, self._importance_of(activations))
            if only_inputs and name == self._last:
                raise InputsKnown

        return record


def output_error(delta: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """tr(Δ H Δᵀ) per output channel, [N], for a weight difference Δ [N, K]: mean squared output error per token."""
    return ((delta @ gram) * delta).sum(dim=1).clamp(min=0.0)


def relative_output_error(weight: torch.Tensor, approximation: torch.Tensor, gram: torch.Tensor) -> float:
    """‖WX − ŴX‖² / ‖WX‖², 0 when there is no output at all."""
    return share(output_error(weight - approximation, gram), output_error(weight, gram))


def share(error: torch.Tensor, signal: torch.Tensor) -> float:
    """The sum of one over the sum of the other, 0 where there is no signal."""
    whole = signal.sum().item()
    return error.sum().item() / whole if whole > 0 else 0.0


def relative_weight_error(weight: torch.Tensor, approximation: torch.Tensor) -> float:
    """‖W − Ŵ‖² / ‖W‖², 0 for a weight of zeros."""
    return share((weight - approximation).square(), weight.square())
