"""lm-eval itself: which tasks, with which documents, run without its progress bars and downloads.

Own tasks and tasks from a folder come with their documents in memory, so lm-eval's dataset cache never decides what is
measured; other names go to lm-eval's own task manager.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import lm_eval
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from eval.errors import EvalError
from eval.quality.lm_eval_adapter import EngineLM
from tasks.documents import TaskDocuments, corpus_names, folder_task_names, load_task, own_task_names, resolve_name
from tasks.errors import TaskError


@dataclass(frozen=True)
class HarnessTask:
    """A task ready for lm-eval, and what its samples depend on."""

    name: str
    task: Task
    digest: str
    chance: float | None


def load_tasks(names: Sequence[str], data_dir: Path | None, limit: int | None) -> list[HarnessTask]:
    """The tasks in the order given; groups and tags of lm-eval become their members. Raises `EvalError` for a name that
    nobody knows, with close matches, and for data that cannot be read."""
    loaded: list[HarnessTask] = []
    own = TaskManager(include_defaults=False)
    theirs: TaskManager | None = None
    with quiet():
        for name in dict.fromkeys(resolve_name(name) for name in names):
            try:
                documents = load_task(name, data_dir)
            except TaskError as error:
                raise EvalError(str(error)) from None
            if documents is not None:
                loaded.append(_in_memory(own, documents, limit))
                continue
            theirs = theirs or TaskManager()
            loaded += _from_lm_eval(theirs, name, data_dir)
    return loaded


def run_tasks(model: EngineLM, tasks: Sequence[HarnessTask], limit: int | None, chat_template: bool) -> dict[str, Any]:
    """lm-eval's result with every sample logged; standard errors are ours, so its bootstrap is off."""
    with quiet():
        results = lm_eval.simple_evaluate(
            model=model,
            tasks=[each.task for each in tasks],
            task_manager=TaskManager(include_defaults=False),
            limit=limit,
            log_samples=True,
            bootstrap_iters=0,
            apply_chat_template=chat_template,
            fewshot_as_multiturn=chat_template,
        )
    return dict(results or {})


@contextmanager
def quiet() -> Iterator[None]:
    """Silences lm-eval's and datasets' logs and bars, and leaves out its collecting of the machine's packages."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    bars = datasets.are_progress_bars_disabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with (
            mock.patch("lm_eval.api.task.tqdm", _no_bar),
            mock.patch("lm_eval.api.model.tqdm", _no_bar),
            mock.patch("lm_eval.evaluator.add_env_info", return_value=None),
            mock.patch("lm_eval.evaluator.get_git_commit_hash", return_value=None),
        ):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()


def _no_bar(iterable: Any, *_: Any, **__: Any) -> Any:
    return iterable


def _in_memory(manager: TaskManager, documents: TaskDocuments, limit: int | None) -> HarnessTask:
    # lm-eval hashes and keeps every document it is given: those past the limit would only cost time.
    kept = documents.documents[:limit]

    def dataset(**_: Any) -> dict[str, datasets.Dataset]:
        return {"test": datasets.Dataset.from_list(kept)}

    config = {**documents.config, "custom_dataset": dataset}
    task = manager.load([config])["tasks"][documents.name]
    return HarnessTask(documents.name, task, documents.digest, documents.chance)


def _from_lm_eval(manager: TaskManager, name: str, data_dir: Path | None) -> list[HarnessTask]:
    if name not in manager.all_tasks and not Path(name).is_file():
        own = {each.removeprefix("quantgate_"): each for each in own_task_names()}
        names = [*corpus_names(), *folder_task_names(), *manager.all_tasks, *own.values()]
        known = dict(zip(names, names, strict=True)) | own
        close = list(dict.fromkeys(known[each] for each in difflib.get_close_matches(name, known, n=3)))
        hint = f"did you mean {' or '.join(close)}?" if close else f"own tasks: {', '.join(own_task_names())}"
        raise EvalError(f"unknown task {name!r}; {hint}")
    try:
        found = manager.load([name])["tasks"]
    except Exception as error:
        # Whatever datasets or the hub raises here, the user can do one of the same two things.
        cause = " ".join(str(error).split())[:160]
        from_folder = "; or give --data-dir with its files" if name in folder_task_names() and not data_dir else ""
        raise EvalError(
            f"task {name}: its data cannot be loaded from the hub ({cause}); check the network{from_folder}"
        ) from None
    return [HarnessTask(each, task, _digest_of(task), None) for each, task in found.items()]


def _digest_of(task: Task) -> str:
    """sha256 over the configuration and the documents that lm-eval would evaluate."""
    digest = hashlib.sha256()
    digest.update(json.dumps(task.dump_config(), sort_keys=True, default=str).encode())
    for document in task.eval_docs:
        digest.update(json.dumps(document, sort_keys=True, default=str).encode())
    return digest.hexdigest()
