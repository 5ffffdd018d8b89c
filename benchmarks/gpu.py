"""Decode speed on a GPU: our kernels at four precisions beside transformers, on random weights of Llama-8B's shape.

The one idea: a decode step must read every weight once, so tokens/s are shown with the bytes per second that they mean,
beside what a copy on the same card reaches. Nothing is timed before each kernel has agreed with the reference on the
card itself. Every finished cell is on disk at once, and a second run goes on where the first one stopped. It needs
torch, triton, transformers and this checkout, and no network: PYTHONPATH=. python benchmarks/gpu.py
"""

import argparse
import gc
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eval.engine import Engine, EngineConfig, SamplingParams
from eval.engine.attention import StepContext, TorchAttention
from eval.engine.kv_cache import KVCache, KVGeometry
from quantize.kernels.reference import quantize_tokens, reference_linear
from quantize.linear import QuantizedLinear
from quantize.scheme import QuantizedWeight, Scheme, dequantize, quantize_rtn

RESULTS = Path(__file__).parent / "results"

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
PRECISIONS: dict[str, Scheme | None] = {
    "bf16": None,
    "W8A16": Scheme(8),
    "W8A8": Scheme(8, activations="int8"),
    "W4A16": Scheme(4, 128),
}
COPY_BYTES = {"cuda": 2 * 2**30, "cpu": 2**24}
WARM_STEPS = 4
# Compiling transformers' step takes about this long on a fresh machine, and cannot be stopped half-way.
COMPILE_SECONDS = 100.0


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def card_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def copy_bytes_per_second(device: torch.device) -> float:
    """Bytes read and written per second by the fastest of ten copies of a tensor far larger than the caches."""
    source = torch.randint(0, 255, (COPY_BYTES[device.type],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    fastest = float("inf")
    for _ in range(10):
        wait_for(device)
        started = time.perf_counter()
        target.copy_(source)
        wait_for(device)
        fastest = min(fastest, time.perf_counter() - started)
    return 2 * source.nbytes / fastest


# Is every kernel right on this card?

FLOAT32 = 2.0**-24
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def check_weight_only(device: torch.device, scheme: Scheme, tokens: int, outputs: int, inputs: int) -> float:
    """Largest error over its bound: float32 sums of exact products, then one rounding; with many tokens the weight is
    rounded to 16 bits first."""
    from quantize.kernels.triton.weight_only import LARGEST_BATCH, TritonWeightOnly

    weight = quantize_rtn((torch.randn(outputs, inputs, device=device) * 0.1 + 0.03).bfloat16(), scheme)
    kernel = TritonWeightOnly(weight)
    worst = 0.0
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(tokens, inputs, device=device).to(dtype)
        exact = reference_linear(x.double(), weight)
        magnitude = x.double().abs() @ dequantize(weight, torch.float64).abs().T
        bound = magnitude * 2 * (inputs + 8) * FLOAT32 + exact.abs() * ROUNDING[dtype] + 2.0**-24
        if tokens > LARGEST_BATCH:
            bound += magnitude * ROUNDING[dtype]
        worst = max(worst, ((kernel(x).double() - exact).abs() / bound).max().item())
    return worst


def check_dynamic_int8(device: torch.device, tokens: int, outputs: int, inputs: int) -> float:
    """Largest error over its bound: the integer sum is exact, and the tokens' codes are those of the reference."""
    from quantize.kernels.triton.dynamic_int8 import TritonDynamicInt8

    weight = quantize_rtn((torch.randn(outputs, inputs) * 0.1).bfloat16(), Scheme(8, activations="int8"))
    kernel = TritonDynamicInt8(weight).to(device)
    x = (torch.randn(tokens, inputs) * torch.logspace(-2, 2, tokens)[:, None]).bfloat16()
    codes, scale = quantize_tokens(x)
    exact = (codes.double() * scale.double()) @ dequantize(weight, torch.float64).T
    bound = exact.abs() * (4 * FLOAT32 + ROUNDING[torch.bfloat16]) + 1e-30
    return ((kernel(x.to(device)).cpu().double() - exact).abs() / bound).max().item()


def check_attention(device: torch.device, query_lens: list[int], dtype: torch.dtype, kv_dtype: torch.dtype) -> float:
    """Largest error over its bound: weights and output are each rounded once to the dtype, against values of some
    size; float32 differs by the order of sums and the hardware's exp."""
    from eval.engine.triton_attention import TritonAttention

    heads, kv_heads, head_dim, block_size = 8, 2, 128, 16
    blocks = 24 * len(query_lens)
    kv = KVCache.allocate(KVGeometry(1, kv_heads, head_dim), blocks, block_size, kv_dtype, device)
    slots = torch.arange(blocks * block_size, device=device)
    kv.write(0, slots, *torch.randn(2, len(slots), kv_heads, head_dim, device=device))
    context_lens = torch.tensor([length + 37 * (row + 1) % 250 for row, length in enumerate(query_lens)])
    tables = torch.randperm(blocks).int().view(len(query_lens), 24)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    written = [torch.arange(end - length, end) for length, end in zip(query_lens, context_lens.tolist(), strict=True)]
    slot_mapping = torch.cat(
        [
            table[positions // block_size].long() * block_size + positions % block_size
            for table, positions in zip(tables, written, strict=True)
        ]
    )
    step = StepContext(
        kv, starts.int().to(device), context_lens.int().to(device), tables.to(device), slot_mapping.to(device)
    )
    tokens = sum(query_lens)
    query = torch.randn(tokens, heads, head_dim, device=device).to(dtype)
    key, value = torch.randn(2, tokens, kv_heads, head_dim, device=device).to(dtype)
    worst = 0.0
    for window, softcap in ((None, None), (50, 20.0)):
        case = (0, query, key, value, head_dim**-0.5, window, softcap)
        other = KVCache(*(tensor.clone() for tensor in kv.tensors))
        expected = TorchAttention().attend(replace(step, kv=other), *case).float()
        largest = other.read(0, slots)[1].abs().max().item()
        bound = 2e-5 + (2 * ROUNDING[dtype] * largest if dtype != torch.float32 else 0.0)
        actual = TritonAttention().attend(step, *case).float()
        worst = max(worst, (actual - expected).abs().max().item() / bound)
    return worst


def checks(device: torch.device, small: bool) -> Iterator[tuple[str, Callable[[], float]]]:
    """(name, what gives the largest error over its bound: right when at most 1)"""
    batches = (1, 65) if small else (1, 16, 33, 64, 200)
    sizes = ((70, 384),) if small else ((70, 384), (1024, 4096))
    for scheme in (Scheme(4, 128), Scheme(4, 32, False), Scheme(4, -1), Scheme(8), Scheme(8, 64, False)):
        for outputs, inputs in sizes:
            for tokens in batches:
                name = f"{scheme.bits} bits, groups of {scheme.group_size}, {'' if scheme.symmetric else 'a'}symmetric"
                yield (
                    f"{name}: {tokens} x {inputs} x {outputs}",
                    lambda s=scheme, t=tokens, o=outputs, i=inputs: check_weight_only(device, s, t, o, i),
                )
    for outputs, inputs in ((37, 101), *sizes):
        for tokens in batches:
            yield (
                f"W8A8: {tokens} x {inputs} x {outputs}",
                lambda t=tokens, o=outputs, i=inputs: check_dynamic_int8(device, t, o, i),
            )
    for dtype, kv_dtype in (
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.int8),
    ):
        for query_lens in ([1] * 6, [1, 1, 90, 17]):
            yield (
                f"attention, {dtype} over {kv_dtype}, queries of {query_lens}",
                lambda q=query_lens, d=dtype, k=kv_dtype: check_attention(device, q, d, k),
            )


# A model made of nothing, on the device


def random_linear(linear: nn.Linear, scheme: Scheme | None, device: torch.device) -> nn.Module:
    """The linear with random weights of a trained model's size, made on the device at its precision."""
    outputs, inputs = linear.out_features, linear.in_features
    if scheme is None:
        weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device=device).normal_(std=0.02)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        return linear
    codes = torch.randint(scheme.lowest, scheme.highest + 1, (outputs, inputs), dtype=torch.int8, device=device)
    groups = inputs // scheme.group_width(inputs)
    step = 0.02 * 12**0.5 / 2**scheme.bits
    scale = torch.full((outputs, groups), step, dtype=torch.bfloat16, device=device)
    return QuantizedLinear(QuantizedWeight(codes, scale, None, scheme), None, device, torch.bfloat16)


def random_model(shape: str, precision: str, device: torch.device, longest: int) -> PreTrainedModel:
    """Built on no device first, then filled one linear at a time; the head and the embedding stay bfloat16."""
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=longest, eos_token_id=None, bos_token_id=None)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            scheme = None if name == "lm_head" else PRECISIONS[precision]
            model.set_submodule(name, random_linear(module, scheme, device))
        elif isinstance(module, nn.Embedding):
            weight = torch.empty(module.weight.shape, dtype=torch.bfloat16, device=device).normal_(std=0.02)
            module.weight = nn.Parameter(weight, requires_grad=False)
        elif "norm" in name:
            module.weight = nn.Parameter(torch.ones_like(module.weight, device=device), requires_grad=False)
    with device:
        model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval()


def bytes_per_step(model: PreTrainedModel, batch: int, context: int) -> int:
    """What one decode step must read: every weight but the embedding's table, and the keys and values of `context`
    tokens per request, in bfloat16."""
    config = model.config
    embedding = model.get_input_embeddings().weight
    weights = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]) - embedding.nbytes
    head_dim = config.hidden_size // config.num_attention_heads
    return weights + batch * context * 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 2


# Timing


def summary(steps_ms: list[float], batch: int, step_bytes: int, copy_rate: float) -> dict[str, float]:
    low, median, high = statistics.quantiles(steps_ms, n=4)
    rate = step_bytes / (median / 1e3)
    return {
        "step_ms_min": min(steps_ms),
        "step_ms_q1": low,
        "step_ms_median": median,
        "step_ms_q3": high,
        "decode_tokens_per_second": 1e3 * batch / median,
        "bytes_per_step": step_bytes,
        "bytes_per_second": rate,
        "share_of_copy": rate / copy_rate,
    }


def random_prompts(batch: int, options: argparse.Namespace) -> list[list[int]]:
    generator = torch.Generator().manual_seed(batch)
    shape = (batch, options.prompt_tokens)
    return torch.randint(1, SHAPES[options.shape]["vocab_size"], shape, generator=generator).tolist()


def time_engine(engine: Engine, batch: int, options: argparse.Namespace) -> list[float]:
    """ms of each decode step of `batch` requests, the first steps of a shape left out."""
    params = SamplingParams(max_tokens=options.new_tokens, ignore_eos=True)
    steps_ms: list[float] = []
    engine.pool.forget_all()
    for prompt in random_prompts(batch, options):
        engine.add_request(prompt, params)
    while engine.has_unfinished():
        started = time.perf_counter()
        outputs = engine.step()
        finished = time.perf_counter()
        if any(output.finish_reason == "error" for output in outputs):
            raise RuntimeError(engine.telemetry.requests[-1].error)
        if engine.telemetry.steps[-1].decode_tokens == batch:
            steps_ms.append(1e3 * (finished - started))
    return steps_ms[WARM_STEPS:]


class StepTimes(StoppingCriteria):
    """When each of transformers' steps ended."""

    def __init__(self, device: torch.device):
        self.device = device
        self.ends: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        wait_for(self.device)
        self.ends.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=self.device)


def time_transformers(
    model: PreTrainedModel, batch: int, compiled: bool, device: torch.device, options: argparse.Namespace
) -> list[float]:
    """ms of each decode step of `generate` with a static cache, in the second of two equal runs."""
    ids = torch.tensor(random_prompts(batch, options), device=device)
    times = StepTimes(device)
    for _ in range(2):
        times.ends.clear()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=options.new_tokens,
            min_new_tokens=options.new_tokens,
            do_sample=False,
            cache_implementation="static",
            disable_compile=not compiled,
            stopping_criteria=StoppingCriteriaList([times]),
        )
    return [1e3 * (end - start) for start, end in zip(times.ends, times.ends[1:], strict=False)][WARM_STEPS:]


class Record:
    """The results so far: on disk after every cell, and taken up again if they are this card's and these options'."""

    def __init__(self, path: Path, about: dict[str, Any]):
        self.path = path
        self.content: dict[str, Any] = {**about, "checks": {}, "cells": {}}
        if path.exists():
            kept = json.loads(path.read_text())
            if {key: kept.get(key) for key in about} == about:
                self.content = kept

    def put(self, part: str, name: str, value: Any) -> None:
        self.content[part][name] = value
        self.save()

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.content, indent=1) + "\n")
        partial.replace(self.path)


def run_checks(record: Record, device: torch.device, small: bool, seconds_left: Callable[[], float]) -> bool:
    done = record.content["checks"]
    for name, check in checks(device, small):
        if name not in done and seconds_left() > 0:
            torch.manual_seed(len(done))
            try:
                record.put("checks", name, check())
            except Exception as error:
                record.put("checks", name, f"{type(error).__name__}: {str(error)[:300]}")
    wrong = {name: worst for name, worst in done.items() if not isinstance(worst, float) or not worst <= 1}
    for name, worst in wrong.items():
        print(f"WRONG  {name}: {worst}")
    print(f"{len(done) - len(wrong)} of {len(done)} checks hold", flush=True)
    return not wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--precision", choices=PRECISIONS, nargs="+", default=list(PRECISIONS))
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=540.0, help="no cell is begun after this long")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu-CARD.json")
    options = parser.parse_args()
    started = time.perf_counter()
    device = torch.device(options.device)
    card = card_name(device)
    out = options.out or RESULTS / f"gpu-{re.sub(r'[^a-z0-9]+', '-', card.lower()).strip('-')}.json"
    about = {
        "card": card,
        "shape": options.shape,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "interpreted": os.environ.get("TRITON_INTERPRET") == "1",
    }
    record = Record(out, about)

    def seconds_left() -> float:
        return options.seconds - (time.perf_counter() - started)

    copy_rate = record.content.setdefault("copy_bytes_per_second", copy_bytes_per_second(device))
    record.save()
    print(f"{card}: a copy moves {copy_rate / 1e9:.0f} GB/s", flush=True)
    if not run_checks(record, device, options.shape == "tiny", seconds_left):
        raise SystemExit("nothing is timed while a kernel is wrong")

    longest = options.prompt_tokens + options.new_tokens
    cells = record.content["cells"]

    def show(name: str, batch: int, steps_ms: list[float], step_bytes: int, **more: Any) -> None:
        cell = {**summary(steps_ms, batch, step_bytes, copy_rate), **more}
        record.put("cells", name, cell)
        print(
            f"{name}: {cell['decode_tokens_per_second']:.0f} tok/s, step {cell['step_ms_median']:.2f} ms, "
            f"{cell['bytes_per_second'] / 1e9:.0f} GB/s = {cell['share_of_copy']:.0%} of a copy",
            flush=True,
        )

    for precision in options.precision:
        names = {f"engine, {precision}, batch {batch}": batch for batch in options.batch}
        missing = {name: batch for name, batch in names.items() if "step_ms_median" not in cells.get(name, {})}
        if not missing or seconds_left() <= 0:
            continue
        model = random_model(options.shape, precision, device, longest)
        config = EngineConfig(
            max_num_seqs=max(options.batch),
            max_batched_tokens=max(2048, max(options.batch) * options.prompt_tokens),
            # Twice what they need: the scheduler keeps some blocks free when it admits a request.
            num_blocks=2 * max(options.batch) * -(-longest // 16),
            attention_backend="triton",
            max_model_len=longest,
        )
        engine = Engine(model, config=config, digests={"weights_digest": f"random {options.shape} {precision}"})
        for name, batch in missing.items():
            if seconds_left() <= 0:
                break
            try:
                steps_ms = time_engine(engine, batch, options)
                context = options.prompt_tokens + options.new_tokens // 2
                show(name, batch, steps_ms, bytes_per_step(model, batch, context), engine=engine.identity())
            except Exception as error:
                record.put("cells", name, {"error": f"{type(error).__name__}: {str(error)[:500]}"})
                print(f"{name}: {error}", flush=True)
        del engine, model
        free_memory(device)

    model = None
    for compiled in (False, True):
        for batch in options.batch:
            name = f"transformers, bf16, {'compiled' if compiled else 'eager'}, batch {batch}"
            if "step_ms_median" in cells.get(name, {}) or seconds_left() <= COMPILE_SECONDS * compiled:
                continue
            model = model or random_model(options.shape, "bf16", device, longest)
            try:
                steps_ms = time_transformers(model, batch, compiled, device, options)
                show(name, batch, steps_ms, bytes_per_step(model, batch, longest))
            except Exception as error:
                record.put("cells", name, {"error": f"{type(error).__name__}: {str(error)[:500]}"})
                print(f"{name}: {error}", flush=True)
    print(f"written to {out} after {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
