"""The parent's end of a worker: starts it, talks to it, and sees to it that it is gone afterwards."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from types import TracebackType
from typing import Any

from eval.errors import EvalError

STDERR_TAIL = 300


class WorkerProcess:
    """A running `eval.speed.worker`; a context manager that ends it, by force, however it is left.

    It leads a session of its own, so that Ctrl-C reaches the parent alone and the parent decides the order of things.
    """

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-m", "eval.speed.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in [os.getcwd(), *sys.path] if entry)},
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._process.wait()
        self._stderr.close()

    def send(self, do: str, **message: Any) -> None:
        """Tells the worker what to do; `receive` waits for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a dead worker is reported by `receive`, with its last words
            self._process.stdin.write(json.dumps({"do": do, **message}) + "\n")
            self._process.stdin.flush()

    def receive(self, on_finished: Callable[[int], None] | None = None) -> dict[str, Any]:
        """The answer; raises EvalError with one line when the worker failed or died."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer: dict[str, Any] = json.loads(line)
            if "error" in answer:
                raise EvalError(f"{self.variant}: {answer['error']}")
            if set(answer) == {"finished"}:
                if on_finished is not None:
                    on_finished(answer["finished"])
                continue
            return answer
        raise EvalError(f"{self.variant}: the measuring process ended ({self._last_words()}); see its memory limit")

    def _last_words(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", errors="replace").strip().splitlines()
        said = f": {lines[-1][:STDERR_TAIL]}" if lines else ""
        return (f"signal {-code}" if code < 0 else f"exit code {code}") + said
