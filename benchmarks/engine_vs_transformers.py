"""Decode speed of the engine beside transformers `generate`: same weights, same prompts, one process.

The one idea: the two sides take turns step by step. transformers calls back after each of its steps, and there the
engine does one of its own, at the same context length; so whatever else the machine does, it does to both, and the
ratio holds even where the absolute times say little. Run: python benchmarks/engine_vs_transformers.py
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from eval.engine import Engine, SamplingParams
from eval.speed.machine import CpuMeter, usable_cores
from quantgate.source import resolve_checkpoint

RESULTS = Path(__file__).parent / "results"


class Turns(StoppingCriteria):
    """Times transformers' steps and, between them, the engine's."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.transformers_ms: list[float] = []
        self.engine_ms: list[float] = []
        self._resumed = time.perf_counter()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        called = time.perf_counter()
        self.transformers_ms.append(1e3 * (called - self._resumed))
        self.engine.step()
        self._resumed = time.perf_counter()
        self.engine_ms.append(1e3 * (self._resumed - called))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def take_turns(
    engine: Engine, model: PreTrainedModel, prompts: list[list[int]], new_tokens: int, cache: str
) -> tuple[list[float], list[float], float]:
    """(engine ms per step, transformers ms per step, share of equal tokens); the first step of each is the prefill."""
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    engine.pool.forget_all()
    streamed = {engine.add_request(prompt, params): [] for prompt in prompts}
    turns = Turns(engine)
    step = engine.step

    def recorded_step() -> list[Any]:
        outputs = step()
        for output in outputs:
            streamed[output.request_id] += output.new_token_ids
        return outputs

    engine.step = recorded_step  # type: ignore[method-assign]
    try:
        ids = torch.tensor(prompts)
        turns._resumed = time.perf_counter()
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            cache_implementation=cache,
            stopping_criteria=StoppingCriteriaList([turns]),
        )
    finally:
        engine.step = step  # type: ignore[method-assign]
    assert not engine.has_unfinished()
    mine = torch.tensor(list(streamed.values()))
    equal = (mine == generated[:, ids.shape[1] :]).float().mean().item()
    return turns.engine_ms, turns.transformers_ms, equal


def summary(steps_ms: list[float], batch: int) -> dict[str, float]:
    quartiles = statistics.quantiles(steps_ms, n=4)
    return {
        "step_ms_min": min(steps_ms),
        "step_ms_q1": quartiles[0],
        "step_ms_median": quartiles[1],
        "step_ms_q3": quartiles[2],
        "decode_tokens_per_second": 1e3 * batch / quartiles[1],
    }


def compare(
    engine: Engine, model: PreTrainedModel, batch: int, cache: str, options: argparse.Namespace
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(100, 40_000, (batch, options.prompt_tokens), generator=generator).tolist()
    take_turns(engine, model, prompts, 8, cache)
    engine_ms, transformers_ms, ratios, prefill = [], [], [], []
    meter = CpuMeter([])
    equal = 0.0
    for _ in range(options.repeats):
        mine, theirs, equal = take_turns(engine, model, prompts, options.new_tokens, cache)
        prefill.append((mine[0], theirs[0]))
        engine_ms += mine[1:]
        transformers_ms += theirs[1:]
        ratios.append(statistics.median(theirs[1:]) / statistics.median(mine[1:]))
    foreign = meter.foreign_cores()
    return {
        "batch": batch,
        "transformers_cache": cache,
        "engine": summary(engine_ms, batch),
        "transformers": summary(transformers_ms, batch),
        "decode_ratio": statistics.median(transformers_ms) / statistics.median(engine_ms),
        "decode_ratio_of_minima": min(transformers_ms) / min(engine_ms),
        "decode_ratio_per_repeat": ratios,
        "prefill_ms": {
            "engine": statistics.median(mine for mine, _ in prefill),
            "transformers": statistics.median(theirs for _, theirs in prefill),
        },
        "equal_tokens": equal,
        "foreign_cores": foreign,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", default="smollm2-135m")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--cache", nargs="+", default=["static", "dynamic"], help="transformers' cache_implementation")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "engine_vs_transformers.json")
    options = parser.parse_args()
    checkpoint = resolve_checkpoint(options.checkpoint)
    engine = Engine.from_checkpoint(checkpoint, dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    rows = []
    for batch in options.batch:
        for cache in options.cache:
            row = compare(engine, model, batch, cache, options)
            rows.append(row)
            print(
                f"batch {batch}, {cache} cache: engine {row['engine']['decode_tokens_per_second']:.0f} tok/s, "
                f"transformers {row['transformers']['decode_tokens_per_second']:.0f} tok/s, "
                f"ratio {row['decode_ratio']:.2f}, foreign cores {row['foreign_cores']:.2f}",
                flush=True,
            )
    result = {
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "repeats": options.repeats,
        "dtype": "bfloat16",
        "cores": usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "engine": engine.identity(),
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
