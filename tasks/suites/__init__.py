"""Which tasks are measured together, and on how many samples.

A suite is a small YAML file: the ones beside this file by their name, anybody's by its path. A suite names tasks, it
does not describe them; what is wrong in the file is said with its line.
"""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tasks.errors import TaskError
from tasks.yaml_file import key_lines, read_yaml_mapping

FOLDER = Path(__file__).parent
DEFAULT_WINDOW = 1024


@dataclass(frozen=True)
class PerplexityRun:
    """Perplexity on one corpus: windows of `window` tokens that do not overlap, no BOS, first token of each not scored.

    `windows`: the first so many; None is the whole text.
    """

    corpus: str
    window: int = DEFAULT_WINDOW
    windows: int | None = None

    @property
    def name(self) -> str:
        """The task's name: a perplexity without its protocol is no number."""
        return f"perplexity.{self.corpus}.w{self.window}.s{self.window}.nobos"


@dataclass(frozen=True)
class Suite:
    """`limit`: the first so many samples of every task; None is all of them."""

    name: str
    tasks: tuple[str, ...]
    limit: int | None = None
    perplexity: tuple[PerplexityRun, ...] = ()


def suite_names() -> list[str]:
    """The suites that ship."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_suite(name_or_path: str | Path) -> Suite:
    """A suite by name (`core`, `smoke`, `standard`) or from a YAML file. Raises `TaskError`, one line."""
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        path = FOLDER / f"{name_or_path}.yaml"
        if str(name_or_path) not in suite_names():
            close = difflib.get_close_matches(str(name_or_path), suite_names(), n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(suite_names())}; or give a .yaml file"
            raise TaskError(f"unknown suite {str(name_or_path)!r}; {hint}")
    tree, content = read_yaml_mapping(path, TaskError)
    return _Reader(path, tree).suite(content)


class _Reader:
    """Checks one file's content; every complaint names the file and, where the key is found, its line."""

    def __init__(self, path: Path, tree: yaml.Node) -> None:
        self._path = path
        self._lines = dict(reversed(list(key_lines(tree))))

    def suite(self, content: dict[str, Any]) -> Suite:
        self._known(content, ("name", "tasks", "limit", "perplexity"))
        tasks = content.get("tasks") or []
        if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
            self._wrong("tasks", "must be a list of task names", tasks)
        runs = content.get("perplexity") or []
        if not isinstance(runs, list):
            self._wrong("perplexity", "must be a list of {corpus, window, windows}", runs)
        if not tasks and not runs:
            raise TaskError(f"{self._path}: names neither tasks nor perplexity; add `tasks: [...]`")
        return Suite(
            name=str(content.get("name") or self._path.stem),
            tasks=tuple(dict.fromkeys(tasks)),
            limit=self._count(content, "limit", 1),
            perplexity=tuple(self._run(run) for run in runs),
        )

    def _run(self, run: Any) -> PerplexityRun:
        if not isinstance(run, dict) or not isinstance(run.get("corpus"), str):
            self._wrong("perplexity", "each entry needs a corpus, for instance {corpus: wikitext2}", run)
        self._known(run, ("corpus", "window", "windows"))
        window = self._count(run, "window", 2)
        return PerplexityRun(run["corpus"], window or DEFAULT_WINDOW, self._count(run, "windows", 1))

    def _count(self, mapping: dict[str, Any], key: str, least: int) -> int | None:
        value = mapping.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            self._wrong(key, f"must be a whole number of at least {least}", value)
        return value

    def _known(self, mapping: dict[str, Any], keys: tuple[str, ...]) -> None:
        for key in mapping:
            if key not in keys:
                close = difflib.get_close_matches(str(key), keys, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(keys)}"
                raise TaskError(f"{self._at(str(key))}: unknown key {str(key)!r}; {hint}")

    def _wrong(self, key: str, what: str, value: Any) -> None:
        raise TaskError(f"{self._at(key)}: {key} {what}, got {value!r}")

    def _at(self, key: str) -> str:
        line = self._lines.get(key)
        return f"{self._path}:{line}" if line else str(self._path)
