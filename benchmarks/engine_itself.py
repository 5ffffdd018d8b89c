"""Our engine against itself and against the machine: what it may not waste.

- bandwidth: bytes that a batch-1 decode step must read / its time / the machine's measured read bandwidth, on a random
  model of 1B shape;
- prefix cache: throughput with it over without it, where no prompt ever hits;
- KV waste: blocks that a request was given and that never held a token, in a workload of mixed lengths with aborts;
- server: tokens/s of 8 clients that stream over HTTP from `quantgate serve`, over 8 requests at a time in this process.

Where two sides are compared they take turns, and the ratio is the median over the turns. Each measurement says how many
cores foreign processes used meanwhile. Run: python benchmarks/engine_itself.py
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from eval.engine import Engine, EngineConfig, SamplingParams
from eval.speed.machine import CpuMeter, foreign_cores_now, measure_read_bandwidth, usable_cores
from eval.speed.prompts import PromptSource, shipped_text
from quantgate.source import resolve_checkpoint
from quantize import Recipe, load_model, quantize_checkpoint
from quantize.atomic import atomic_directory
from quantize.home import home

RESULTS = Path(__file__).parent / "results"
CLIENTS = 8
TURNS = 5
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
INT8 = {"method": "int8", "overrides": {"lm_head": {"bits": 8}}}


class Workload:
    """Prompts of the model's own text, none of which begins as another did."""

    def __init__(self, checkpoint: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._source = PromptSource(tokenizer(shipped_text(), add_special_tokens=False)["input_ids"])
        self.rng = np.random.default_rng(0)

    def prompts(self, count: int, shortest: int, longest: int) -> list[list[int]]:
        lengths = self.rng.integers(shortest, longest + 1, count)
        return [self._source.draw(self.rng, int(length)) for length in lengths]


def bandwidth(folder: Path, quantized: bool) -> dict[str, Any]:
    """A step reads every weight but the embedding, of which it reads one row, and the keys and values so far. A virtual
    machine's bandwidth may change by the second, so that both sides are measured in turns, and the machine's best is
    held against the engine's best tenth."""
    model = load_model(random_model(folder, quantized), device="cpu", dtype=torch.bfloat16)
    engine = Engine(model.eval(), None, EngineConfig(max_num_seqs=1))
    meter = CpuMeter([])
    prompt = list(range(100, 228))
    rates, steps_ms = [], []
    for turn in range(TURNS + 1):
        rates.append(measure_read_bandwidth().best)
        engine.telemetry.clear()
        engine.generate([prompt], SamplingParams(max_tokens=32 if turn else 4, ignore_eos=True))
        if turn:
            steps = engine.telemetry.steps
            steps_ms += [step.step_ms for step in steps if step.decode_tokens and not step.prefill_tokens]
    measured = max(rates)
    memory = engine.memory()
    embedding = engine.model.get_input_embeddings().weight.nbytes
    read = memory["weights_bytes"] - embedding + memory["kv_bytes_per_token"] * (len(prompt) + 16)
    step_s = float(np.percentile(steps_ms, 10)) / 1e3
    return {
        "read_bytes_per_step": read,
        "step_ms": round(1e3 * step_s, 2),
        "step_ms_quartiles": [round(value, 2) for value in np.percentile(steps_ms, [25, 50, 75])],
        "bytes_per_second": round(read / step_s),
        "machine_bytes_per_second": round(measured),
        "machine_bytes_per_second_by_turn": [round(rate) for rate in rates],
        "foreign_cores": round(meter.foreign_cores(), 2),
        "engine": engine.identity(),
        "share": round(read / step_s / measured, 3),
    }


def random_model(folder: Path, quantized: bool) -> Path:
    """A checkpoint of SHAPE, made once and kept; 2.2 GB, quantized 1.2."""
    plain, int8 = folder / "random-1b", folder / "random-1b-int8"
    if not plain.exists():
        torch.manual_seed(0)
        with atomic_directory(plain) as unfinished:
            LlamaForCausalLM._from_config(LlamaConfig(**SHAPE), dtype=torch.bfloat16).save_pretrained(unfinished)
    if quantized and not int8.exists():
        quantize_checkpoint(plain, Recipe.from_mapping(INT8), int8)
    return int8 if quantized else plain


def prefix_cache(checkpoint: Path, workload: Workload, turns: int) -> dict[str, Any]:
    """The pool is small, so that cached blocks are evicted all the time, as they are on a busy server."""
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    engines = {
        cached: Engine.from_checkpoint(
            checkpoint, dtype="bfloat16", prefix_caching=cached, max_num_seqs=8, max_model_len=512, num_blocks=200
        )
        for cached in (True, False)
    }

    def run(cached: bool, prompts: list[list[int]]) -> float:
        engines[cached].telemetry.clear()
        start = time.perf_counter()
        engines[cached].generate(prompts, params)
        return time.perf_counter() - start

    for cached in engines:
        run(cached, workload.prompts(8, 64, 256))
    meter, ratios, hits = CpuMeter([]), [], 0
    for turn in range(turns):
        prompts = workload.prompts(16, 64, 256)
        order = (True, False) if turn % 2 == 0 else (False, True)
        seconds = {cached: run(cached, prompts) for cached in order}
        ratios.append(seconds[False] / seconds[True])
        hits += sum(record.prompt_cache_hit for record in engines[True].telemetry.requests)
    return {
        "turns": turns,
        "hit_tokens": hits,
        "evictions": engines[True].pool.evictions,
        "ratios": [round(ratio, 4) for ratio in ratios],
        "foreign_cores": round(meter.foreign_cores(), 2),
        "ratio": round(median(ratios), 4),
    }


def kv_waste(checkpoint: Path, workload: Workload) -> dict[str, Any]:
    """Counts what every request owned when it ended, and how far its tokens came; a twentieth is aborted on the way."""
    engine = Engine.from_checkpoint(
        checkpoint, dtype="bfloat16", prefix_caching=False, max_num_seqs=16, max_batched_tokens=256, max_model_len=768
    )
    size = engine.config.block_size
    requests = {}
    for index, prompt in enumerate(workload.prompts(80, 8, 512)):
        new_tokens = int(workload.rng.integers(1, 97))
        requests[engine.add_request(prompt, SamplingParams(max_tokens=new_tokens, ignore_eos=True))] = index
    owned: dict[str, tuple[int, int]] = {}
    doomed = {name for name, index in requests.items() if index % 20 == 10}
    while engine.has_unfinished():
        running = list(engine.scheduler.running)
        engine.step()
        # A request that is over has given its blocks back, but not forgotten how far it came.
        for request in {*running, *engine.scheduler.running}:
            blocks, tokens = owned.get(request.request_id, (0, 0))
            tokens = max(tokens, request.num_computed_tokens)
            owned[request.request_id] = max(blocks, len(request.block_ids), -(-tokens // size)), tokens
        for name in doomed & owned.keys():
            engine.abort(name)
            doomed.discard(name)
    engine.check_integrity()
    blocks = sum(count for count, _ in owned.values())
    used = sum(-(-tokens // size) for _, tokens in owned.values())
    slots, filled = blocks * size, sum(tokens for _, tokens in owned.values())
    return {
        "requests": len(owned),
        "blocks": blocks,
        "block_size": size,
        "slots_never_filled": round(1 - filled / slots, 4),
        "share": round(1 - used / blocks, 4),
    }


def server(checkpoint: Path, workload: Workload, turns: int) -> dict[str, Any]:
    """Both sides answer the same 32 requests, 8 at a time; the clients' work is part of the server's side."""
    new_tokens = 64
    engine = Engine.from_checkpoint(checkpoint, max_model_len=512)
    command = [sys.executable, "-c", "from quantgate.cli import main; main()", "serve", str(checkpoint)]
    process = subprocess.Popen(
        [*command, "--port", "0", "--max-model-len", "512", "--model-name", "bench"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stderr is not None
        address = next((line for line in process.stderr if "serving" in line), None)
        assert address is not None, "the server did not start"
        port = int(address.rsplit(":", 1)[1].split("/")[0])
        sides: dict[str, Callable[[list[list[int]]], int]] = {
            "http": lambda prompts: asyncio.run(over_http(port, prompts, new_tokens)),
            "engine": lambda prompts: in_process(engine, prompts, new_tokens),
        }
        for run in sides.values():
            run(workload.prompts(8, 128, 128))
        meter = CpuMeter([process.pid])
        ratios, rates = [], {name: [] for name in sides}
        for turn in range(turns):
            prompts = workload.prompts(4 * CLIENTS, 128, 128)
            for name in sides if turn % 2 == 0 else reversed(sides):
                engine.telemetry.clear()
                start = time.perf_counter()
                tokens = sides[name](prompts)
                rates[name].append(tokens / (time.perf_counter() - start))
            ratios.append(rates["http"][-1] / rates["engine"][-1])
        return {
            "turns": turns,
            "tokens_per_second": {name: round(median(values), 1) for name, values in rates.items()},
            "ratios": [round(ratio, 3) for ratio in ratios],
            "foreign_cores": round(meter.foreign_cores(), 2),
            "ratio": round(median(ratios), 3),
        }
    finally:
        process.terminate()
        process.wait(60)


def in_process(engine: Engine, prompts: list[list[int]], new_tokens: int) -> int:
    """A request is added when another ends, as clients do."""
    waiting, tokens, running = list(prompts), 0, 0
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    while waiting or running:
        while waiting and running < CLIENTS:
            engine.add_request(waiting.pop(0), params)
            running += 1
        for output in engine.step():
            tokens += len(output.new_token_ids)
            running -= output.finish_reason is not None
    return tokens


async def over_http(port: int, prompts: list[list[int]], new_tokens: int) -> int:
    """Tokens that 8 clients were told of in the streams' usage, after events for all of them."""
    waiting = list(prompts)

    async def client() -> int:
        tokens = 0
        while waiting:
            tokens += await stream(port, waiting.pop(0), new_tokens)
        return tokens

    return sum(await asyncio.gather(*(client() for _ in range(CLIENTS))))


async def stream(port: int, prompt: list[int], new_tokens: int) -> int:
    body = {"model": "bench", "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    content = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: {len(content)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
    usage = None
    async for line in reader:
        if line.startswith(b"data: {") and b'"usage":{' in line.replace(b": {", b":{"):
            usage = json.loads(line.removeprefix(b"data: "))["usage"]
    writer.close()
    assert usage is not None, "the stream ended without its usage"
    return int(usage["completion_tokens"])


BARS: dict[str, tuple[str, str, float]] = {
    "bandwidth bf16": ("share", "at least", 0.80),
    "bandwidth int8": ("share", "at least", 0.80),
    "prefix cache": ("ratio", "at least", 0.99),
    "kv waste": ("share", "below", 0.04),
    "server": ("ratio", "at least", 0.90),
}


def is_kept(name: str, value: float) -> bool:
    _, how, limit = BARS[name]
    return value >= limit if how == "at least" else value < limit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", default="smollm2-135m")
    parser.add_argument("--models", type=Path, default=home() / "peer-models", help="where the random model is kept")
    parser.add_argument("--only", nargs="+", choices=BARS, default=list(BARS))
    parser.add_argument("--turns", type=int, default=8, help="turns of the two sides of a ratio")
    parser.add_argument("--out", type=Path, default=RESULTS / "engine_itself.json")
    options = parser.parse_args()
    checkpoint = resolve_checkpoint(options.checkpoint)
    workload = Workload(checkpoint)
    measurements: dict[str, Callable[[], dict[str, Any]]] = {
        "bandwidth bf16": lambda: bandwidth(options.models, False),
        "bandwidth int8": lambda: bandwidth(options.models, True),
        "prefix cache": lambda: prefix_cache(checkpoint, workload, options.turns),
        "kv waste": lambda: kv_waste(checkpoint, workload),
        "server": lambda: server(checkpoint, workload, options.turns),
    }
    document: dict[str, Any] = {"rows": {}}
    if options.out.exists():
        document = json.loads(options.out.read_text(encoding="utf-8"))
    circumstances = {
        "checkpoint": options.checkpoint,
        "cores": usable_cores(),
        "torch_threads": torch.get_num_threads(),
    }
    for name in options.only:
        busy = round(foreign_cores_now(), 2)
        row = {"measured": time.strftime("%Y-%m-%d %H:%M"), **circumstances, "foreign_cores_before": busy}
        row |= measurements[name]()
        row |= {"limit": f"{BARS[name][1]} {BARS[name][2]}", "kept": is_kept(name, row[BARS[name][0]])}
        document["rows"][name] = row
        options.out.parent.mkdir(exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for name, row in document["rows"].items():
        print(f"{'kept  ' if row['kept'] else 'MISSED'} {name}: {row[BARS[name][0]]} ({row['limit']})")


if __name__ == "__main__":
    main()
