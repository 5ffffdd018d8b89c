"""A campaign folder as the stages leave it, with numbers of a realistic size, made from a seed in a second."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eval.quality.samples import Sample, write_samples

TASKS = {"grammar": 0.82, "retrieval": 0.61, "arithmetic": 0.44, "facts": 0.37}
CORPUS = "perplexity.heldout.w1024.s1024.nobos"


@dataclass(frozen=True)
class Numbers:
    """What a variant is like: how many of its answers break, how much worse its text, how big, how fast."""

    broken: float
    nll: float
    weights_bytes: int
    decode: float
    ttft: float
    bits: int = 16


BASELINE = Numbers(0.0, 0.0, 269_060_096, 1.0, 1.0)
VARIANTS = {
    "int8": Numbers(0.004, 0.004, 137_400_000, 1.31, 1.04, 8),
    "int4": Numbers(0.15, 0.32, 92_100_000, 1.52, 1.21, 4),
    "awq": Numbers(0.05, 0.13, 93_000_000, 1.49, 1.19, 4),
    "gptq": Numbers(0.02, 0.085, 93_000_000, 1.50, 1.02, 4),
}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_campaign(root: Path, per_task: int = 400, variants: dict[str, Numbers] | None = None) -> Path:
    """runs/demo below `root`, without the comparisons; returns the campaign's folder."""
    folder = root / "runs" / "demo"
    for name, numbers in {"baseline": BASELINE, **(VARIANTS if variants is None else variants)}.items():
        write_variant(folder, name, numbers, per_task)
    return folder


def checkpoints(folder: Path) -> dict[str, Path]:
    names = ["baseline", *sorted(path.name for path in (folder / "checkpoints").iterdir() if path.name != "baseline")]
    return {name: folder / "checkpoints" / name for name in names}


def write_variant(folder: Path, name: str, numbers: Numbers, per_task: int = 400) -> Path:
    directory = folder / "variants" / name
    identity = {
        "weights_digest": digest(f"weights {name}"),
        "tokenizer_digest": digest("tokenizer"),
        "chat_template_digest": digest("template"),
        "compute": "a16",
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "kernels": {"cpu-int4" if numbers.bits == 4 else "dense": 210},
    }
    _write_checkpoint(folder / "checkpoints" / name, name, numbers)
    samples = _samples(name, numbers, per_task)
    (directory / "quality").mkdir(parents=True)
    write_samples(directory / "quality" / "samples.parquet", samples)
    _write_rows(directory / "quality" / "batches.parquet", [{"batch_id": 0, "batch_size": 8, "padding_side": "none"}])
    _write(directory / "quality" / "quality.json", _quality(name, identity, samples))
    baseline = {**identity, "weights_digest": digest("weights baseline"), "kernels": {"dense": 210}}
    (directory / "speed").mkdir(parents=True)
    _write(directory / "speed" / "speed.json", _speed(name, identity, baseline, numbers))
    for evidence in ("requests", "steps", "resources"):
        _write_rows(directory / "speed" / f"{evidence}.parquet", [{"variant": "candidate", "time": 0.1}])
    return directory


def _write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, allow_nan=False))


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


def _samples(name: str, numbers: Numbers, per_task: int) -> list[Sample]:
    samples = []
    for task, accuracy in TASKS.items():
        for doc_id in range(per_task):
            right = random.Random(f"{task} {doc_id}").random() < accuracy
            change = random.Random(f"{task} {doc_id} {name}").random()
            if right and change < numbers.broken:
                right = False
            elif not right and change < numbers.broken / 3:
                right = True
            samples.append(_sample(task, "acc", doc_id, float(right), right))
    for window in range(60):
        base = 3.1 + random.Random(f"window {window}").gauss(0, 0.3)
        added = numbers.nll * random.Random(f"window {window} {name}").uniform(0.7, 1.3)
        samples.append(_sample(CORPUS, "nll", window, base + added, True, tokens=1023))
    return samples


def _sample(task: str, metric: str, doc_id: int, score: float, right: bool, tokens: int = 5) -> Sample:
    prompt, target = f"Question {doc_id} of {task}: which of the two is right?", f"answer {doc_id}"
    return Sample(
        task=task,
        metric=metric,
        doc_id=doc_id,
        document_hash=digest(f"{task}{doc_id}"),
        prompt_hash=digest(prompt),
        target_hash=digest(target),
        prompt=prompt,
        target=target,
        answer=target if right else f"not answer {doc_id}",
        score=score,
        logprobs=(-0.3, -1.2),
        source=f"{task}-{doc_id}",
        tokens=tokens,
    )


def _quality(name: str, identity: dict[str, Any], samples: list[Sample]) -> dict[str, Any]:
    tasks, metrics = [], {}
    for task in (*TASKS, CORPUS):
        scores = [sample.score for sample in samples if sample.task == task]
        mean = sum(scores) / len(scores)
        metric, value = ("perplexity", 2.718281828**mean) if task == CORPUS else ("acc", mean)
        metrics[f"quality.{task}.{metric}"] = value
        row = {
            "name": task,
            "metric": metric,
            "metric_name": f"quality.{task}.{metric}",
            "value": value,
            "stderr": 0.02,
            "samples": len(scores),
        }
        tasks.append({**row, "higher_is_better": metric == "acc", "chance": 0.5 if metric == "acc" else None})
    protocol = {"suite": "core", "limit": None, "lm_eval": "0.4.13", "few_shot": 0}
    integrity = {"alone_against_batched": "pass", "position_ids": "pass", "future_leak": "pass", "truncation": "pass"}
    return {
        "key": digest(f"quality {name}"),
        "identity": identity,
        "protocol": protocol,
        "tasks": tasks,
        "metrics": metrics,
        "integrity": integrity,
        "seconds": 61.2,
    }


def _speed(name: str, identity: dict[str, Any], baseline: dict[str, Any], numbers: Numbers) -> dict[str, Any]:
    noise = random.Random(f"speed {name}")
    metrics: dict[str, float] = {}

    def paired(metric: str, value: float, ratio: float, width: float) -> None:
        ratio *= noise.uniform(0.995, 1.005)
        metrics[metric] = value * ratio
        metrics[f"{metric}.ratio"] = ratio
        metrics[f"{metric}.ratio.low"], metrics[f"{metric}.ratio.high"] = ratio * (1 - width), ratio * (1 + width)

    paired("speed.chat.decode_tokens_per_second", 212.0, numbers.decode, 0.02)
    paired("speed.chat.prefill_tokens_per_second", 2310.0, 1 / numbers.ttft, 0.03)
    paired("speed.chat.output_tokens_per_second", 180.0, numbers.decode**0.8, 0.02)
    for statistic, value in {"p50": 210.0, "p95": 480.0, "p99": 610.0, "mean": 240.0}.items():
        paired(f"speed.chat.ttft_ms.{statistic}", value, numbers.ttft, 0.05)
        paired(f"speed.chat.tpot_ms.{statistic}", value / 10, 1 / numbers.decode, 0.03)
    for metric, before, after in (
        ("weights_bytes", BASELINE.weights_bytes, numbers.weights_bytes),
        ("kv_cache_bytes", 94_371_840, 94_371_840),
        ("activation_peak_bytes", 61_000_000, 63_500_000),
        ("process_peak_bytes", 1_090_000_000, 1_090_000_000 - (BASELINE.weights_bytes - numbers.weights_bytes)),
    ):
        metrics[f"memory.{metric}"] = after
        metrics[f"memory.{metric}.ratio"] = after / before
    return {
        "key": digest(f"speed {name}"),
        "workload": {"name": "chat", "kind": "closed", "concurrency": 8, "requests": 64},
        "baseline": baseline,
        "candidate": identity,
        "metrics": metrics,
        "validity": {"failures": "pass", "cache_hits": "pass", "quiet": "warn: 12 % of a core was busy with others"},
        "machine": {"cores": 2, "cpu": "test", "read_bytes_per_second": 43e9},
    }


def _write_checkpoint(checkpoint: Path, name: str, numbers: Numbers) -> None:
    _write(checkpoint / "config.json", {"model_type": "llama"})
    if name == "baseline":
        return
    module = {"bits": numbers.bits, "group_size": 64, "symmetric": True, "relative_error": numbers.nll / 10}
    manifest = {
        "source_digest": digest("weights baseline"),
        "recipe": {"method": name, "bits": numbers.bits, "group_size": 64, "symmetric": True, "overrides": {}},
        "calibration": {"source": "shipped", "samples": 64, "sequence_length": 512, "digest": digest("calibration")},
        "versions": {"torch": "2.13.0", "transformers": "5.17.0"},
        "modules": [
            {
                "name": f"model.layers.{i}.mlp.up_proj",
                **module,
                "fallback": None,
                "dead_columns": 0,
                "clipped_scales": 0,
            }
            for i in range(30)
        ],
        "bytes_before": BASELINE.weights_bytes,
        "bytes_after": numbers.weights_bytes,
        "bits_per_weight": numbers.bits + 0.25,
        "coverage": {"expected": 30, "packed": 30},
        "seconds": 41.0,
    }
    _write(checkpoint / "quantgate.json", manifest)
