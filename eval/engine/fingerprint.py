"""Which engine this is: a digest of the source that computes.

The one idea: a version is raised by somebody who remembers to, but a result may stand for another only where the same
kernels would give its numbers and its times. So what keys and identities hold is read off the files.
"""

import hashlib
from functools import cache
from pathlib import Path

import quantize
import quantize.kernels

SUFFIXES = (".py", ".cpp", ".h")
COMPUTING_MODULES = ("linear.py", "load.py", "native_build.py", "scheme.py")
"""What of `quantize` itself runs a model; the rest of it makes checkpoints, which have digests of their own."""


@cache
def engine_fingerprint() -> str:
    """That of the source that this process was started from, wherever it is installed."""
    of_quantize = Path(quantize.__file__).parent
    return source_digest(
        {
            "eval/engine": sources_in(Path(__file__).parent),
            "quantize/kernels": sources_in(Path(quantize.kernels.__file__).parent),
            "quantize": {name: of_quantize / name for name in COMPUTING_MODULES},
        }
    )


def sources_in(folder: Path) -> dict[str, Path]:
    """The source files under a package's folder, by their path in it."""
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.suffix in SUFFIXES}


def source_digest(packages: dict[str, dict[str, Path]]) -> str:
    """16 hexadecimal digits of a sha256 over the names and contents of each package's files."""
    named = {f"{package}/{name}": path for package, files in packages.items() for name, path in files.items()}
    contents = (f"{name} {hashlib.sha256(named[name].read_bytes()).hexdigest()}" for name in sorted(named))
    return hashlib.sha256("\n".join(contents).encode()).hexdigest()[:16]
