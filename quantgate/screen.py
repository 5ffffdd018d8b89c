"""What a command shows: progress on stderr, its result on stdout, as a table for people or as one JSON document.

With `--json` stdout holds the document and nothing else. Where stderr is no terminal, progress becomes one plain line
per piece of work, so that a log stays readable.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

ProgressCallback = Callable[[str, int, int], None]

PLAIN_LINE_SECONDS = 15.0

TABLE_COLUMNS = 124
"""What a campaign's table needs; a narrower terminal breaks its lines rather than losing figures."""


class Screen:
    """One command's output. `json_output` decides what stdout holds."""

    def __init__(self, json_output: bool = False) -> None:
        self.json_output = json_output
        # What is shown names files, modules and reasons, and any of these may hold square brackets.
        self.out = Console(highlight=False, soft_wrap=True, markup=False)
        self.out.width = max(self.out.width, TABLE_COLUMNS)
        self.err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

    def note(self, text: str) -> None:
        """A line for people, beside the result."""
        self.err.print(text)

    def result(self, document: dict[str, Any], *human: Table | str) -> None:
        """The command's result: `document` with `--json`, else the tables and lines of `human`."""
        if self.json_output:
            sys.stdout.write(json.dumps(document, ensure_ascii=False, allow_nan=False, default=str) + "\n")
            return
        for part in human:
            self.out.print(part)

    @contextmanager
    def progress(self) -> Iterator[ProgressCallback]:
        """A progress bar with an estimate for as long as the block runs; yields the callback that moves it."""
        with self.staged_progress(1) as begin:
            yield begin("")

    @contextmanager
    def staged_progress(self, stages: int) -> Iterator[Callable[[str], ProgressCallback]]:
        """Progress over several stages, each with a bar of its own below the one for the whole.

        Yields a function that begins a stage (by its title) and returns that stage's callback.
        """
        if not self.err.is_terminal:
            yield self._plain_stages(stages)
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        with Progress(*columns, console=self.err, transient=True, expand=True) as bars:
            whole = bars.add_task("all stages", total=stages, visible=stages > 1)
            current = bars.add_task("", total=None)
            begun = 0

            def begin(title: str) -> ProgressCallback:
                nonlocal begun
                bars.update(whole, completed=begun, description=f"stage {begun + 1} of {stages}")
                begun += 1
                bars.reset(current, description=title, total=None)

                def move(what: str, done: int, total: int) -> None:
                    bars.update(current, description=f"{title}: {what}" if title else what, completed=done, total=total)

                return move

            yield begin

    def _plain_stages(self, stages: int) -> Callable[[str], ProgressCallback]:
        begun = 0

        def begin(title: str) -> ProgressCallback:
            nonlocal begun
            begun += 1
            prefix = f"[{begun}/{stages}] " if stages > 1 else ""
            if title:
                self.note(f"{prefix}{title}")
            last_line = time.monotonic()

            def move(what: str, done: int, total: int) -> None:
                nonlocal last_line
                now = time.monotonic()
                if now - last_line >= PLAIN_LINE_SECONDS:
                    last_line = now
                    self.note(f"{prefix}{title + ': ' if title else ''}{what} ({done} of {total})")

            return move

        return begin
