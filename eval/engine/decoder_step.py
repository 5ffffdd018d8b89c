"""A whole decoder step in C++ on the CPU: `decoder_step.cpp` with a model's own weights.

The one idea: a plan (`decoder_plan.py`) says what the decoder is made of, this file puts its tensors' addresses into C
structs once, and a step then passes the flat batch and nothing else. The weights move into one region of huge pages, in
the order in which a step reads them, and the model's modules use them from there.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from eval.engine import huge_pages
from eval.engine.attention import AttentionBackend, StepContext
from eval.engine.decoder_plan import ACTIVATIONS, DecoderPlan, LayerPlan, Norm, NotDescribed, describe
from eval.engine.kv_cache import KVCache
from eval.engine.native_attention import DTYPES, KV_DTYPES, Cache, NativeAttention, Shape, caches_of, tables_of
from eval.engine.native_linear import NativeLinear
from eval.engine.probe import Probe
from quantize.kernels.native import DIGITS, NativeDynamicInt8, NativeInt4, NativeInt8, cpu_is_supported
from quantize.linear import QuantizedLinear
from quantize.native_build import load_native

SOURCE = Path(__file__).parent / "decoder_step.cpp"
MAX_TOKENS = 2048
"""Above it the activations of a step, which are float32, take more memory than they are worth. An engine's default
budget lies within, so that one way computes everything."""

PROVEN_IN_FLOAT32, PROVEN = 1e-3, 0.1
"""How far, in norm, the median token's logits may lie from the module tree's: rounding gives a hundredth of it."""

FP32, BF16, INT8, INT4_BF16_SCALE, INT4_FP32_SCALE, INT8_DYNAMIC = range(6)
DENSE = {torch.float32: FP32, torch.bfloat16: BF16}


class _Linear(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("digits", ctypes.c_int32),
        ("spread", ctypes.c_int32),
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("padded", ctypes.c_int64),
        ("group", ctypes.c_int64),
    )


class _Norm(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_float))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Norm) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")),
        ("query_norm", _Norm),
        ("key_norm", _Norm),
        ("qkv", _Linear * 3),
        ("gate_up", _Linear * 2),
        ("output", _Linear),
        ("down", _Linear),
        ("num_qkv", ctypes.c_int32),
        ("num_gate_up", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("rotary", ctypes.c_int32),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("attention", Shape),
        ("cache", Cache),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("final_norm", _Norm),
        ("head", _Linear),
        ("num_layers", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("intermediate", ctypes.c_int64),
        ("softcap", ctypes.c_float),
        ("num_threads", ctypes.c_int32),
    )


class DecoderStep:
    """Runs a described decoder over the cache that it was made for. Raises NotDescribed where a linear, a shape or the
    machine has no native case. Invariant: it keeps whatever its structs point to."""

    def __init__(self, plan: DecoderPlan, embed: nn.Module, kv: KVCache):
        library = load_native(SOURCE) if cpu_is_supported() else None
        if library is None:
            raise NotDescribed("neither AVX-512 with BF16 and VNNI nor AVX2, or no compiler")
        self._run = library.decoder_step
        pointer = ctypes.c_void_p
        self._run.argtypes = (pointer, pointer, pointer, pointer, pointer, ctypes.c_int64, pointer)
        self._run.restype = None
        self._release = library.decoder_step_release
        self._release.argtypes, self._release.restype = (), None
        self._kept: list[torch.Tensor] = []
        self._embed = embed
        self._kv = kv
        for linear in plan.linears:
            kind_of(linear)  # refuses before anything is moved
        into_huge_pages(plan.linears)
        layers = [self._layer(layer, kv, cache) for layer, cache in zip(plan.layers, caches_of(kv), strict=True)]
        self._layers = (_Layer * len(layers))(*layers)
        head = self._linears([plan.head])[0]
        self._vocabulary = head.outputs
        self._model = _Model(
            layers=ctypes.addressof(self._layers),
            final_norm=self._norm(plan.final_norm),
            head=head,
            num_layers=len(layers),
            hidden=plan.final_norm.weight.shape[0],
            intermediate=layers[0].down.inputs,
            softcap=plan.softcap,
        )
        if any(layer.down.inputs != self._model.intermediate for layer in layers):
            raise NotDescribed("layers of different widths")

    def run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepContext, wanted: torch.Tensor
    ) -> torch.Tensor:
        """token_ids and positions int64 [T] and wanted int64 [W] (rows of the batch), to float32 logits
        [W, vocabulary]. Writes the step's keys and values."""
        assert step.kv is self._kv, "the structs point into another cache"
        logits = torch.empty(len(wanted), self._vocabulary)
        rows = self._embed(token_ids).float().contiguous()
        self._model.num_threads = torch.get_num_threads()
        tables = tables_of(step)
        self._run(
            ctypes.byref(self._model),
            ctypes.byref(tables),
            positions.data_ptr(),
            rows.data_ptr(),
            wanted.data_ptr(),
            len(wanted),
            logits.data_ptr(),
        )
        return logits

    def release_scratch(self) -> None:
        """Give back the memory for activations that this thread's steps, of any model, keep for those after them."""
        self._release()

    def _layer(self, plan: LayerPlan, kv: KVCache, cache: Cache) -> _Layer:
        call = plan.call
        qkv, gate_up = self._linears(plan.qkv), self._linears(plan.gate_up)
        layer = _Layer(
            before_attention=self._norm(plan.before_attention),
            after_attention=self._norm(plan.after_attention),
            before_mlp=self._norm(plan.before_mlp),
            after_mlp=self._norm(plan.after_mlp),
            query_norm=self._norm(plan.query_norm),
            key_norm=self._norm(plan.key_norm),
            qkv=(_Linear * 3)(*qkv),
            gate_up=(_Linear * 2)(*gate_up),
            output=self._linears([plan.output])[0],
            down=self._linears([plan.down])[0],
            num_qkv=len(qkv),
            num_gate_up=len(gate_up),
            activation=list(ACTIVATIONS).index(plan.activation),
            rotary=2 * plan.cos.shape[1],
            cos=self._keep(plan.cos),
            sin=self._keep(plan.sin),
            attention=Shape(
                plan.heads,
                call.num_kv_heads,
                call.head_dim,
                call.window or 0,
                call.scaling,
                call.softcap or 0.0,
                DTYPES[torch.float32],
                KV_DTYPES[kv.dtype],
            ),
            cache=cache,
        )
        widths = (plan.heads + 2 * call.num_kv_heads) * call.head_dim, 2 * layer.down.inputs
        if (sum(one.outputs for one in qkv), sum(one.outputs for one in gate_up)) != widths:
            raise NotDescribed("projections whose widths are not those of heads and gates")
        return layer

    def _norm(self, norm: Norm | None) -> _Norm:
        return _Norm(None, 0.0) if norm is None else _Norm(self._keep(norm.weight), norm.eps)

    def _linears(self, modules: Sequence[nn.Module]) -> list[_Linear]:
        """Linears with one input; those that take it in as many digits take the same ones."""
        linears = [self._linear(module) for module in modules]
        for digits in DIGITS.values():
            _share_digits([one for one in linears if one.digits == digits])
        return linears

    def _linear(self, module: nn.Module) -> _Linear:
        kind, bias = kind_of(module), getattr(module, "bias", None)
        linear = _Linear(kind, spread=1, bias=None if bias is None else self._keep(bias.detach().float().contiguous()))
        if isinstance(module, nn.Linear):
            linear.weight = self._keep(module.weight)
            linear.outputs, linear.inputs = module.weight.shape
            linear.padded = linear.inputs
            return linear
        assert isinstance(module, QuantizedLinear)
        kernel: Any = module.kernel
        linear.weight = self._keep(kernel.nibbles if isinstance(kernel, NativeInt4) else kernel.codes)
        linear.scale = self._keep(kernel.scale)
        linear.outputs, linear.inputs = module.out_features, module.in_features
        linear.padded = -(-linear.inputs // 8) * 8
        if isinstance(kernel, NativeDynamicInt8):
            linear.extra = self._keep(kernel.sums)
            linear.padded = -(-linear.inputs // 4) * 4
            return linear
        linear.digits, linear.group = kernel.digits, kernel.digit_group
        if isinstance(kernel, NativeInt4):
            linear.spread = kernel.spread
            linear.extra = None if kernel.zero_point is None else self._keep(kernel.zero_point)
        return linear

    def _keep(self, tensor: torch.Tensor) -> int:
        """The tensor's address, which stays good as long as this object lives, wherever a module may move to."""
        tensor = tensor.detach()
        self._kept.append(tensor)
        return tensor.data_ptr()


def _share_digits(linears: Sequence[_Linear]) -> None:
    """Gives linears that take one input in digits the group of the finest 4-bit one. int8 weights go with any; one
    digit's groups only get finer by it, because they divide the inputs as evenly as any (see `digit_group`)."""
    groups = [one.group for one in linears if one.kind != INT8]
    for one in linears if groups else ():
        if one.kind != INT8:
            if one.group % min(groups):
                raise NotDescribed("4-bit groups that do not divide each other")
            one.spread *= one.group // min(groups)
        one.group = min(groups)


def native_step(
    model: PreTrainedModel, probe: Probe, kv: KVCache, backend: AttentionBackend, positions: int
) -> DecoderStep | NotDescribed:
    """The native step of a model on the CPU, proven by the logits of the probe; else why there is none, as with any
    backend but the native one. Uses the first blocks of `kv`, which nobody may have written yet."""
    try:
        if not isinstance(backend, NativeAttention):
            raise NotDescribed(f"attention_backend {backend.name}")
        plan = describe(model, probe.calls, positions)
        if model.dtype not in DENSE or kv.device.type != "cpu":
            raise NotDescribed(f"{model.dtype} on {kv.device}")
        step = DecoderStep(plan, model.get_input_embeddings(), kv)
    except NotDescribed as reason:
        return reason
    count = min(len(probe.token_ids), positions, kv.blocks.shape[2] * kv.block_size)
    blocks = torch.arange(-(-count // kv.block_size), dtype=torch.int32)[None]
    lens = torch.tensor([count], dtype=torch.int32)
    context = StepContext(kv, torch.tensor([0, count], dtype=torch.int32), lens, blocks, torch.arange(count))
    with torch.inference_mode():
        logits = step.run(probe.token_ids[:count], torch.arange(count), context, torch.arange(count))
    errors = (logits - probe.logits[:count]).norm(dim=1) / probe.logits[:count].norm(dim=1)
    bound = PROVEN_IN_FLOAT32 if {model.dtype, kv.dtype} == {torch.float32} else PROVEN
    return step if errors.median() <= bound else NotDescribed("its logits are not those of the module tree")


def kind_of(linear: nn.Module) -> int:
    """How the step multiplies with a linear. Raises NotDescribed where it has no such case."""
    # What is derived from nn.Linear, or from its weight's tensor, may compute anything.
    if type(linear) in (nn.Linear, NativeLinear) and type(weight := linear.weight) in (nn.Parameter, torch.Tensor):
        assert isinstance(weight, torch.Tensor)
        if weight.dtype not in DENSE:
            raise NotDescribed(f"linears in {weight.dtype}")
        return DENSE[weight.dtype]
    if not isinstance(linear, QuantizedLinear) or linear.order is not None:
        raise NotDescribed(f"linears of type {type(linear).__name__}")
    kernel = linear.kernel
    if isinstance(kernel, NativeInt8):
        return INT8
    if isinstance(kernel, NativeInt4):
        return INT4_BF16_SCALE if kernel.scale_is_bf16 else INT4_FP32_SCALE
    if isinstance(kernel, NativeDynamicInt8):
        return INT8_DYNAMIC
    raise NotDescribed(f"the kernel {kernel.name}")


def into_huge_pages(linears: Sequence[nn.Module]) -> None:
    """Moves the weights into one region of huge pages, in reading order: worth a quarter of the bandwidth. The
    modules keep using them, so nothing is held twice."""
    owners = [module.kernel if isinstance(module, QuantizedLinear) else module for module in linears]
    tensors = [
        tensor
        for owner in owners
        for tensor in (*owner.parameters(recurse=False), *owner.buffers(recurse=False))
        if tensor.numel()
    ]
    offsets = [0]
    for tensor in tensors:
        offsets.append(offsets[-1] + -(-tensor.nbytes // 64) * 64)
    memory = huge_pages.region(offsets[-1])
    for tensor, offset in zip(tensors, offsets, strict=False):
        moved = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(tensor.shape)
        moved.copy_(tensor.detach())
        tensor.data = moved
