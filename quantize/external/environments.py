"""The virtual environments of the external quantizers, one each below `$QUANTGATE_HOME/external`, from pinned versions.

An environment is whole when the file `installed.json` stands in it, which is written last and names the pins: what a
killed installation left, or one of other pins, is made anew. An environment is built where it stays, because pip writes
its absolute path into its scripts.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from quantize.atomic import one_line_os_errors, take_lock, write_atomically
from quantize.errors import QuantizeError
from quantize.home import home
from quantize.progress import Progress, silent

INSTALLED = "installed.json"
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Library:
    """`requirements` run together (torch comes before them, alone). builds: comes as source that wants to import torch
    while it is built; `build_settings` are environment variables for that."""

    name: str
    requirements: tuple[str, ...]
    builds: bool = False
    build_settings: tuple[tuple[str, str], ...] = ()

    @property
    def folder(self) -> Path:
        return folder() / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def pins(self) -> list[str]:
        return [TORCH, *self.requirements]


LIBRARIES = {
    library.name: library
    for library in (
        Library("autoawq", ("autoawq==0.2.9", "transformers==5.17.0"), builds=True),
        Library(
            "autogptq",
            ("auto-gptq==0.7.1", "transformers==4.53.3", "peft==0.14.0"),
            builds=True,
            build_settings=(("BUILD_CUDA_EXT", "0"),),
        ),
        Library("gptqmodel", ("gptqmodel==7.6.0", "optimum==2.3.0", "transformers==5.17.0")),
        Library("llmcompressor", ("llmcompressor==0.14.0.1", "compressed-tensors==0.19.0", "transformers==5.17.0")),
    )
}


def folder() -> Path:
    return home() / "external"


def library_named(name: str) -> Library:
    if name not in LIBRARIES:
        raise QuantizeError(f"external: {name!r} is unknown; one of {', '.join(LIBRARIES)}")
    return LIBRARIES[name]


def is_installed(library: Library) -> bool:
    try:
        record = json.loads((library.folder / INSTALLED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("pins") == library.pins and library.python.exists()


def install(name: str, progress: Progress | None = None) -> Path:
    """The library's environment, made unless it stands. Raises QuantizeError, one line, when pip fails (its output is
    kept in a log that the line names) or another process makes the same one now."""
    library, tell = library_named(name), progress or silent
    log = folder() / f"{name}-install.log"
    with one_line_os_errors(library.folder), only_installer(library):
        if not is_installed(library):
            install_anew(library, log, tell)
    return library.folder


def install_anew(library: Library, log: Path, tell: Progress) -> None:
    steps = 3
    with log.open("w", encoding="utf-8") as output:
        tell("making the environment", 0, steps)
        run([sys.executable, "-m", "venv", "--clear", str(library.folder)], log, output, tell, (0, steps))
        pip = [str(library.python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
        # The torch of the constraint comes first and alone, lest something else choose another build of it.
        run([*pip, TORCH], log, output, tell, (1, steps))
        constraint = library.folder / "constraint.txt"
        constraint.write_text(TORCH + "\n", encoding="utf-8")
        if library.builds:
            run([*pip, "setuptools", "wheel"], log, output, tell, (2, steps))
            pip.append("--no-build-isolation")
        settings = dict(library.build_settings)
        run([*pip, "-c", str(constraint), *library.requirements], log, output, tell, (2, steps), settings)
        write_atomically(library.folder / INSTALLED, json.dumps({"pins": library.pins}) + "\n")
        tell("installed", steps, steps)


@contextmanager
def only_installer(library: Library) -> Iterator[None]:
    """Holds the library's lock; the kernel lets go of it when the process ends, however it ends."""
    folder().mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder() / f"{library.name}.lock", os.O_RDWR | os.O_CREAT)
    try:
        if not take_lock(descriptor):
            raise QuantizeError(f"{library.folder}: another process installs it now; wait for it to end")
        yield
    finally:
        os.close(descriptor)


def run(
    command: list[str],
    log: Path,
    output: IO[str],
    tell: Progress,
    step: tuple[int, int],
    settings: dict[str, str] | None = None,
) -> None:
    """One command, its output into the log, what pip is at on the progress bar."""
    own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=own | (settings or {}),
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                output.write(line)
                doing = re.match(r"(Collecting|Downloading|Building wheels?|Installing) .{0,60}", line.strip())
                if doing:
                    tell(doing.group(0), *step)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise QuantizeError(f"{log}: the installation failed ({last_line(log, output)}); see there")


def last_line(log: Path, output: IO[str] | None = None) -> str:
    """What a log ends with, for a message of one line."""
    if output is not None:
        output.flush()
    lines = [line.strip() for line in re.split(r"[\r\n]", log.read_text(encoding="utf-8", errors="replace"))]
    spoken = [line for line in lines if line and not line.startswith("[notice]")]
    if not spoken:
        return "it said nothing"
    said = spoken[-1]
    if re.fullmatch(r"\w+(Error|Exception)", said):
        # An assertion without words: the line of code that failed says more.
        code = [line for line in spoken[:-1] if not re.match(r'File "|[~^]+$', line)]
        said = f"{said}: {code[-1]}" if code else said
    return said[:300]
