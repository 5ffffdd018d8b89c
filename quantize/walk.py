"""Calibration states on their way through the decoder, one layer in memory at a time.

The real model's own forward runs once up to its first layer, and once with every layer replaced by a stub, so that each
layer is later called with exactly the masks and position embeddings that the model would give it for that text,
whatever its architecture.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from quantize.causal_attention import FasterCausalAttention
from quantize.checkpoint import Checkpoint, all_finite, one_line
from quantize.decoder import Decoder, load_own_tensors
from quantize.errors import QuantizeError
from quantize.gram import InputRecorder, InputsKnown

BATCH_TOKENS = 4096
PROBE_TOKENS = 32
PROBE = -1
"""The place of the probe among the batches: the last one."""
SAMPLED_TOKENS = 512
"""How many tokens are kept, evenly spread over the calibration text, where a method needs tokens and not only their
second moments."""


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a layer is called with beside the hidden states, by place and by name."""


class WrongReturnType(Exception):
    """The model takes a layer's output apart in the other way (a tensor where a tuple was given, or the reverse)."""


class StopForward(Exception):
    """The first layer's inputs are known; the rest of the pass is not needed."""


class Walk:
    """`states`: one tensor [batch, tokens, hidden] per calibration batch, the inputs of the layer that comes next."""

    def __init__(
        self,
        decoder: Decoder,
        checkpoint: Checkpoint,
        token_ids: torch.Tensor,
        device: torch.device,
        importance: torch.Tensor | None = None,
    ) -> None:
        """token_ids int64 [windows, tokens]; `importance` float32 of the same shape says how much each token counts in
        what `observe` records."""
        self.decoder = decoder
        self.device = device
        self.returns_tuple = False
        self._arguments: list[list[Arguments]] = []
        self.sampled_every = max(1, token_ids.numel() // SAMPLED_TOKENS)
        batch = max(1, BATCH_TOKENS // token_ids.shape[1])
        batches = [ids.to(device) for ids in token_ids.split(batch)]
        self._importance = None if importance is None else [part.to(device) for part in importance.split(batch)]
        probe_ids = batches[0][:1, :PROBE_TOKENS]
        with outside_of_layers(decoder, checkpoint, device), torch.inference_mode():
            self.states = [self._first_layer_inputs(ids) for ids in batches]
            self.probe = self._first_layer_inputs(probe_ids)
            first: dict[torch.Size, list[Arguments]] = {}
            for ids, state in [*zip(batches, self.states, strict=True), (probe_ids, self.probe)]:
                arguments = self._layer_arguments(ids, state)
                self._arguments.append(shared(arguments, first.setdefault(state.shape, arguments)))

    def run_layer(self, index: int, layer: nn.Module, state: torch.Tensor, batch: int = PROBE) -> torch.Tensor:
        """The layer's output [windows, tokens, hidden] for the states of one batch."""
        args, kwargs = self._arguments[batch][index]
        if state.dtype != self.probe.dtype:
            args, kwargs = cast_floats((args, kwargs), state.dtype)
        with torch.inference_mode(), FasterCausalAttention():
            output = layer(state, *args, **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        if output.shape != state.shape:
            raise QuantizeError(
                f"{type(layer).__name__} turns states {tuple(state.shape)} into {tuple(output.shape)}; "
                "not a decoder layer"
            )
        return output

    def observe(self, index: int, layer: nn.Module, recorder: InputRecorder) -> None:
        """Runs the layer for its linears' inputs only; the states stay."""
        with recorder.watching(only_inputs=True):
            for position, state in enumerate(self.states):
                if self._importance is not None:
                    recorder.importance = self._importance[position].reshape(-1)
                with suppress(InputsKnown):
                    self.run_layer(index, layer, state, position)
                recorder.next_batch()

    def advance(self, index: int, layer: nn.Module, recorder: InputRecorder | None = None) -> None:
        """Replaces the states by the layer's outputs, batch by batch; a recorder sees the inputs on the way."""
        with recorder.watching() if recorder else nullcontext():
            for position, state in enumerate(self.states):
                self.states[position] = self.run_layer(index, layer, state, position)
                if recorder:
                    recorder.next_batch()
                if not all_finite(self.states[position]):
                    name = self.decoder.layer_prefix(index)[:-1]
                    raise QuantizeError(
                        f"{name}: its outputs on the calibration text are not finite; try float32 weights"
                    )
        self.probe = self.run_layer(index, layer, self.probe)

    def _first_layer_inputs(self, ids: torch.Tensor) -> torch.Tensor:
        caught: list[torch.Tensor] = []

        def catch(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught.append(args[0] if args else kwargs["hidden_states"])
            raise StopForward

        handle = self.decoder.layers[0].register_forward_pre_hook(catch, with_kwargs=True)
        try:
            self._forward(ids)
        except StopForward:
            return caught[0]
        finally:
            handle.remove()
        raise QuantizeError(f"{type(self.decoder.model).__name__}: its forward never reaches its layers")

    def _layer_arguments(self, ids: torch.Tensor, state: torch.Tensor) -> list[Arguments]:
        """What each layer is called with beside the hidden states, for this batch: masks and positions, and in some
        models what depends on the very tokens (Gemma 4's per-layer inputs)."""
        failures: list[Exception] = []
        for returns_tuple in (self.returns_tuple, not self.returns_tuple):
            try:
                arguments = self._stubbed_pass(ids, state, returns_tuple)
            except (WrongReturnType, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as failure:
                failures.append(failure)
                continue
            self.returns_tuple = returns_tuple
            return arguments
        # The first try is in the way that worked for the batches before.
        cause = next((failure for failure in failures if not isinstance(failure, WrongReturnType)), failures[0])
        said = "" if isinstance(cause, WrongReturnType) else f" ({type(cause).__name__}: {one_line(cause)[:200]})"
        raise QuantizeError(
            f"{type(self.decoder.model).__name__}: does not hand hidden states from layer to layer{said}"
        ) from cause

    def _stubbed_pass(self, ids: torch.Tensor, state: torch.Tensor, returns_tuple: bool) -> list[Arguments]:
        arguments: list[Arguments] = []

        def stub(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs.pop("hidden_states")
            if not isinstance(hidden, torch.Tensor) or hidden.shape != state.shape:
                raise WrongReturnType
            arguments.append((args[1:], kwargs))
            return (hidden,) if returns_tuple else hidden

        try:
            for layer in self.decoder.layers:
                layer.forward = stub
            self._forward(ids)
        finally:
            for layer in self.decoder.layers:
                del layer.forward
        if len(arguments) != len(self.decoder.layers):
            raise WrongReturnType
        return arguments

    def _forward(self, ids: torch.Tensor) -> None:
        self.decoder.model.base_model(input_ids=ids, use_cache=False)


@contextmanager
def outside_of_layers(decoder: Decoder, checkpoint: Checkpoint, device: torch.device) -> Iterator[None]:
    """Embeddings, final norm and rotary tables in memory; the layers and the head stay on the meta device."""
    head = decoder.model.get_output_embeddings()
    outside = [
        (name, module)
        for name, module in decoder.model.named_modules()
        if module is not head and not f"{name}.".startswith(f"{decoder.prefix}.")
    ]
    for name, module in outside:
        load_own_tensors(decoder, module, f"{name}." if name else "", checkpoint, device)
    try:
        yield
    finally:
        whole: nn.Module = decoder.model
        whole.to("meta")


def shared(value: Any, known: Any) -> Any:
    """The same nest of tuples, lists and dicts, with the tensors of `known` where they are equal: most of what layers
    are called with is the same for every batch, and would be held once for each."""
    if isinstance(value, torch.Tensor):
        alike = isinstance(known, torch.Tensor) and value.dtype == known.dtype and torch.equal(value, known)
        return known if alike else value
    if isinstance(value, tuple | list) and isinstance(known, tuple | list) and len(value) == len(known):
        return type(value)(shared(one, other) for one, other in zip(value, known, strict=True))
    if isinstance(value, dict) and isinstance(known, dict):
        return {key: shared(item, known.get(key)) for key, item in value.items()}
    return value


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """The same nest of tuples, lists and dicts, its floating tensors in `dtype`."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(cast_floats(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: cast_floats(item, dtype) for key, item in value.items()}
    return value


def float32_copy(layer: nn.Module) -> nn.Module:
    """A copy for exact arithmetic; the original keeps its dtype."""
    return copy.deepcopy(layer).float()
