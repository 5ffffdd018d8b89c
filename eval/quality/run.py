"""One checkpoint's quality: tasks through lm-eval, perplexity, integrity checks, and the evidence of all of it.

A result is reused when everything that its numbers depend on is unchanged; that is decided by digests of contents,
before the model is loaded.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from eval.engine.engine import Engine
from eval.engine.fingerprint import engine_fingerprint
from eval.errors import EvalError
from eval.quality import integrity
from eval.quality.batches import write_batches
from eval.quality.harness import HarnessTask, load_tasks, run_tasks
from eval.quality.lm_eval_adapter import EngineLM
from eval.quality.perplexity import score_windows
from eval.quality.records import TaskResult, result_of, samples_of
from eval.quality.result import BATCHES, QUALITY, SAMPLES, QualityResult, flat_metrics
from eval.quality.samples import Sample, write_samples
from quantize.atomic import atomic_directory
from quantize.checkpoint import Checkpoint
from quantize.native_build import native_build
from quantize.progress import Progress, silent
from tasks.documents import Corpus, corpus_names, load_corpus, resolve_name
from tasks.errors import TaskError
from tasks.suites import PerplexityRun, Suite

PROTOCOL_VERSION = 2
"""Raised when the same inputs would give other samples or other scores than before."""

# Task items are a dozen tokens long: more of them at once fill the engine's token budget.
ENGINE_DEFAULTS: Mapping[str, Any] = {"max_num_seqs": 192}

__all__ = ["QualityResult", "evaluate"]


def evaluate(
    checkpoint: Path,
    *,
    suite: Suite | None = None,
    tasks: Sequence[str] = (),
    data_dir: Path | None = None,
    limit: int | None = None,
    out: Path,
    engine_options: Mapping[str, Any] | None = None,
    chat_template: bool = False,
    progress: Progress | None = None,
) -> QualityResult:
    """Evaluate a checkpoint on a suite, on tasks and corpora by name, or on both; the evidence goes into folder `out`.

    limit: the first so many samples of every task, and windows of every text (the suite's own limit holds as well).
    engine_options: `Engine.from_checkpoint`'s. chat_template: put prompts into the checkpoint's chat template.
    When `out` holds a result of the same key it is returned at once; any other result there is replaced at the end, and
    what is no result is an error.
    Raises `EvalError` or `QuantizeError`, each one line.
    """
    if limit is not None and limit < 1:
        raise EvalError(f"limit must be at least 1, not {limit}")
    started = time.perf_counter()
    report = progress or silent
    limit = min((each for each in (limit, suite.limit if suite else None) if each is not None), default=None)
    names, runs = _selection(suite, tasks)
    corpora = [(run, _corpus(run.corpus, data_dir)) for run in runs]
    loaded = load_tasks(names, data_dir, limit)
    options = {**ENGINE_DEFAULTS, **(engine_options or {})}
    identity_of_tasks = _tasks_identity(loaded, corpora, limit)
    key = _key(checkpoint, identity_of_tasks, options, chat_template)
    kept = _kept(out, key)
    if kept is not None:
        report("evaluation unchanged", 1, 1)
        return kept

    # Only a result gives way to a result: whatever else lies in a folder that somebody named is theirs.
    with atomic_directory(out, replace=(out / QUALITY).is_file(), error=EvalError) as partial:
        report("load the model", 0, 1)
        engine = Engine.from_checkpoint(checkpoint, **options)
        model = EngineLM(engine, report)
        report("integrity checks", 0, 1)
        checks = {**integrity.check_engine(model), **integrity.check_text(model, chat_template)}
        samples, chances = _score_tasks(model, loaded, limit, chat_template)
        for run, corpus in corpora:
            samples += score_windows(model, corpus, run, limit)
        checks |= integrity.check_truncation(model)
        results = _results(samples, chances)
        result = QualityResult(
            directory=out,
            key=key,
            identity=engine.identity(),
            protocol={**identity_of_tasks, **integrity.text_protocol(model, chat_template)},
            tasks=tuple(results),
            metrics=flat_metrics(results),
            integrity=checks,
            seconds=time.perf_counter() - started,
        )
        write_samples(partial / SAMPLES, samples)
        write_batches(partial / BATCHES, model.batches, integrity.leakage_result(checks))
        result.write(partial)
    return result


def _selection(suite: Suite | None, tasks: Sequence[str]) -> tuple[list[str], list[PerplexityRun]]:
    """Task names and perplexity runs: the suite's, then those named one by one."""
    names = list(suite.tasks) if suite else []
    runs = list(suite.perplexity) if suite else []
    for name in map(resolve_name, tasks):
        if name in corpus_names():
            runs.append(PerplexityRun(name))
        else:
            names.append(name)
    if not names and not runs:
        raise EvalError("nothing to evaluate; name a suite or at least one task")
    return list(dict.fromkeys(names)), list(dict.fromkeys(runs))


def _corpus(name: str, data_dir: Path | None) -> Corpus:
    try:
        return load_corpus(name, data_dir)
    except TaskError as error:
        raise EvalError(str(error)) from None


def _tasks_identity(
    tasks: Sequence[HarnessTask], corpora: Sequence[tuple[PerplexityRun, Corpus]], limit: int | None
) -> dict[str, Any]:
    return {
        "protocol_version": PROTOCOL_VERSION,
        "tasks": {task.name: task.digest for task in tasks},
        "perplexity": {run.name: {"text": corpus.digest, "windows": run.windows} for run, corpus in corpora},
        "limit": limit,
        "lm_eval": version("lm_eval"),
    }


def _key(checkpoint: Path, tasks: Mapping[str, Any], options: Mapping[str, Any], chat_template: bool) -> str:
    content = {
        "checkpoint": Checkpoint.open(checkpoint).content_digest(),
        "tasks": tasks,
        "engine": {**options, "fingerprint": engine_fingerprint(), "native": native_build()},
        "libraries": {name: version(name) for name in ("torch", "transformers")},
        "chat_template_applied": chat_template,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _kept(out: Path, key: str) -> QualityResult | None:
    try:
        result = QualityResult.read(out)
    except EvalError:
        return None
    complete = (out / SAMPLES).is_file() and (out / BATCHES).is_file()
    return result if result.key == key and complete else None


def _score_tasks(
    model: EngineLM, tasks: Sequence[HarnessTask], limit: int | None, chat_template: bool
) -> tuple[list[Sample], dict[str, float | None]]:
    if not tasks:
        return [], {}
    results = run_tasks(model, tasks, limit, chat_template)
    samples: list[Sample] = []
    for each in tasks:
        delimiter = str(results["configs"][each.name].get("target_delimiter", " "))
        lower = [metric for metric, higher in each.task.higher_is_better().items() if higher is False]
        samples += samples_of(each.name, results["samples"][each.name], delimiter, model.scored_tokens, lower)
    return samples, {each.name: each.chance for each in tasks}


def _results(samples: Sequence[Sample], chances: Mapping[str, float | None]) -> list[TaskResult]:
    grouped: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        if not math.isfinite(sample.score):
            raise EvalError(
                f"{sample.task} sample {sample.doc_id}: its {sample.metric} is not finite; check the weights"
            )
        grouped.setdefault((sample.task, sample.metric), []).append(sample)
    results = [
        result_of(group, chances.get(task) if metric not in ("nll", "perplexity") else None)
        for (task, metric), group in grouped.items()
    ]
    if not results:
        raise EvalError("no task gave a number per sample, so there is nothing to compare; choose other tasks")
    return results
