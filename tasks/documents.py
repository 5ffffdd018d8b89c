"""Tasks and corpora with their documents: what ships with the project, and what a folder of the user's holds.

Each comes with a digest over everything that decides its samples, so that a result is never reused for other data.
Reading is strict: a file that is missing, empty or malformed is one line that names the file and the line in it.
"""

import difflib
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tasks.errors import TaskError

ROOM = Path(__file__).parent
DATA = ROOM / "data"
ALIASES = {"lambada": "lambada_openai", "wikitext": "wikitext2"}
SHIPPED_CORPORA = {"held_out_docs": "held_out_docs.txt"}
FOLDER_CORPORA = {"wikitext2": "wikitext2/test.txt"}


@dataclass(frozen=True)
class TaskDocuments:
    """An lm-eval task with its documents in hand. `config`: lm-eval's task configuration, without its data source."""

    name: str
    config: dict[str, Any]
    documents: list[dict[str, Any]]
    digest: str

    @property
    def chance(self) -> float | None:
        """The score of blind guessing."""
        chance = (self.config.get("metadata") or {}).get("chance")
        return None if chance is None else float(chance)


@dataclass(frozen=True)
class Corpus:
    """A text for perplexity."""

    name: str
    text: str
    digest: str


def own_task_names() -> list[str]:
    """The tasks that ship with the project."""
    return [str(read_config(path)["task"]) for path in sorted((ROOM / "own").glob("*.yaml"))]


def folder_task_names() -> list[str]:
    """The standard tasks that a folder can serve."""
    return sorted(path.stem for path in (ROOM / "standard").glob("*.yaml"))


def corpus_names() -> list[str]:
    return [*SHIPPED_CORPORA, *FOLDER_CORPORA]


def resolve_name(name: str) -> str:
    """The name under which a task or corpus is reported."""
    return ALIASES.get(name, name)


def load_task(name: str, data_dir: Path | None) -> TaskDocuments | None:
    """An own task, or a standard one from `data_dir`; None where only lm-eval may know it. Raises `TaskError`."""
    name = resolve_name(name)
    for path in sorted((ROOM / "own").glob("*.yaml")):
        config = read_config(path)
        if config["task"] == name:
            file = DATA / config.pop("dataset_kwargs")["data_files"]["test"]
            config.pop("dataset_path")
            return _with_digest(name, config, _read_lines(file, ()))
    if data_dir is not None and name in folder_task_names():
        _require_folder(data_dir)
        return _with_digest(name, read_config(ROOM / "standard" / f"{name}.yaml"), _READERS[name](data_dir))
    return None


def load_corpus(name: str, data_dir: Path | None) -> Corpus:
    """A text by name. Raises `TaskError` where it is unknown, not there or empty."""
    name = resolve_name(name)
    if name in SHIPPED_CORPORA:
        path = DATA / SHIPPED_CORPORA[name]
    elif name in FOLDER_CORPORA:
        if data_dir is None:
            raise TaskError(f"{name}: its text comes from a folder; give --data-dir with {FOLDER_CORPORA[name]} in it")
        _require_folder(data_dir)
        path = data_dir / FOLDER_CORPORA[name]
    else:
        close = difflib.get_close_matches(name, corpus_names(), n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(corpus_names())}"
        raise TaskError(f"unknown corpus {name!r}; {hint}")
    text = _read_text(path)
    return Corpus(name, text, hashlib.sha256(text.encode()).hexdigest())


def _with_digest(name: str, config: dict[str, Any], documents: list[dict[str, Any]]) -> TaskDocuments:
    content = json.dumps([config, documents], sort_keys=True, ensure_ascii=False)
    return TaskDocuments(name, config, documents, hashlib.sha256(content.encode()).hexdigest())


def read_config(path: Path) -> dict[str, Any]:
    """A task's YAML file."""
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict) or "task" not in config:
        raise TaskError(f"{path}: not a task; it needs a `task:` line")
    return config


def _require_folder(data_dir: Path) -> None:
    if not data_dir.is_dir():
        raise TaskError(f"{data_dir}: no such folder; --data-dir must hold the benchmark files")


def _read_text(path: Path) -> str:
    if not path.is_file():
        raise TaskError(f"{path}: no such file; put it there, or point --data-dir at the folder that holds it")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise TaskError(f"{path}: not UTF-8 text; fetch it again") from None
    if not text.strip():
        raise TaskError(f"{path}: is empty; fetch it again")
    return text


def _read_lines(path: Path, fields: tuple[str, ...]) -> list[dict[str, Any]]:
    """The JSON objects of a JSONL file; each must hold `fields` as non-empty text."""
    documents = []
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except json.JSONDecodeError as error:
            raise TaskError(f"{path}:{number}: not valid JSON ({error.msg}); fetch the file again") from None
        if not isinstance(document, dict):
            raise TaskError(f"{path}:{number}: expected a JSON object, found {type(document).__name__}")
        for field in fields:
            if not isinstance(document.get(field), str) or not document[field].strip():
                raise TaskError(f"{path}:{number}: the field {field!r} is missing or empty")
        documents.append(document)
    return documents


def _read_piqa(data_dir: Path) -> list[dict[str, Any]]:
    questions, labels = data_dir / "piqa" / "valid.jsonl", data_dir / "piqa" / "valid-labels.lst"
    documents = _read_lines(questions, ("goal", "sol1", "sol2"))
    answers = [line for line in _read_text(labels).split("\n") if line.strip()]
    for number, answer in enumerate(answers, 1):
        if answer.strip() not in ("0", "1"):
            raise TaskError(f"{labels}:{number}: a label is 0 or 1, not {answer.strip()!r}")
    if len(answers) != len(documents):
        raise TaskError(f"{labels}: {len(answers)} labels for the {len(documents)} questions of {questions.name}")
    return [{**document, "label": int(answer)} for document, answer in zip(documents, answers, strict=True)]


def _read_lambada(data_dir: Path) -> list[dict[str, Any]]:
    path = data_dir / "lambada" / "test.jsonl"
    documents = _read_lines(path, ("text",))
    for number, document in enumerate(documents, 1):
        if " " not in document["text"].strip():
            raise TaskError(f"{path}: text {number} is one word; the last word is scored after the others")
    return documents


def _read_gsm8k(data_dir: Path) -> list[dict[str, Any]]:
    path = data_dir / "gsm8k" / "test.jsonl"
    documents = _read_lines(path, ("question", "answer"))
    for number, document in enumerate(documents, 1):
        if "####" not in document["answer"]:
            raise TaskError(f"{path}: answer {number} has no `#### result` line")
    return documents


_READERS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    "piqa": _read_piqa,
    "lambada_openai": _read_lambada,
    "gsm8k": _read_gsm8k,
}
