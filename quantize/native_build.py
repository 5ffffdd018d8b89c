"""Compiles a C++ file of this package for the machine at hand, once, and loads it.

The one idea: plain C symbols through ctypes need neither torch's headers (a minute of compilation) nor its ABI; the
library is kept per source (with what it includes by quotes), compiler and instruction set, so that a shared home folder
serves different machines. `QUANTGATE_NATIVE=avx2` builds for a machine that has AVX2 and no more, `QUANTGATE_NATIVE=0`
nothing at all.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

from quantize.home import home

FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


@cache
def load_native(source: Path) -> ctypes.CDLL | None:
    """The library of `source`, or None, with one warning, where it cannot be built."""
    if os.environ.get("QUANTGATE_NATIVE") == "0":
        return None
    compiler = native_compiler()
    if compiler is None:
        warnings.warn("no C++ compiler: the slower torch path is used; install g++ for the native one", stacklevel=2)
        return None
    try:
        return ctypes.CDLL(str(_build(source, compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"{source.name} could not be built ({reason.strip().splitlines()[-1]}): the slower torch path is used",
            stacklevel=2,
        )
        return None


def native_build() -> str | None:
    """What native code is built with, and whether for AVX2 alone. None: there is none, and other kernels run, with
    other times and roundings; so it belongs to what a result depends on."""
    compiler = native_compiler()
    return f"{compiler} for avx2" if compiler and avx2_is_enough() else compiler


def native_compiler() -> str | None:
    """The compiler of native code. None: there is none, or `QUANTGATE_NATIVE=0` turns native code off."""
    if os.environ.get("QUANTGATE_NATIVE") == "0":
        return None
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


def avx2_is_enough() -> bool:
    """Whether AVX-512 is left unused although the machine may have it."""
    return os.environ.get("QUANTGATE_NATIVE") == "avx2"


def _build(source: Path, compiler: str) -> Path:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    flags = [*FLAGS, "-march=x86-64-v3" if avx2_is_enough() else "-march=native"]
    key = "\0".join([*_texts(source), version, *flags, platform.machine(), _instruction_sets()])
    folder = home() / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    with (folder / f"{library.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                built = Path(temporary) / library.name
                command = [compiler, *flags, "-o", str(built), str(source)]
                subprocess.run(command, capture_output=True, text=True, check=True)
                built.replace(library)
    return library


def _texts(source: Path) -> list[str]:
    """The text of `source` and of every file that it includes by quotes, each once, in the order of inclusion."""
    paths, index = [source.resolve()], 0
    while index < len(paths):
        includes = INCLUDE.findall(paths[index].read_text())
        paths += [path for name in includes if (path := (paths[index].parent / name).resolve()) not in paths]
        index += 1
    return [path.read_text() for path in paths]


def _instruction_sets() -> str:
    """What -march=native depends on; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
