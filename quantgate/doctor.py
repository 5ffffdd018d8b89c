"""`quantgate doctor`: what this machine has, what will run on it, and what is missing, each with its remedy."""

import importlib.util
import shutil
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from quantgate import home

GIB = 1024**3
FREE_DISK_BYTES = 5 * GIB
QUIET_CORES = 0.15


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `remedy` is empty where nothing is missing."""

    what: str
    found: str
    good: bool = True
    remedy: str = ""

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)


def examine() -> list[Finding]:
    """Everything that decides how quantgate will run here; takes some seconds, since bandwidth is measured."""
    from eval.speed.machine import Machine, describe_machine

    machine: Machine = describe_machine()
    bandwidth = machine.read_bandwidth
    sets = set(machine.instruction_sets)
    findings = [
        Finding("processor", f"{machine.cpu}, {machine.usable_cores} of {machine.logical_cores} cores usable"),
        _instruction_sets(sets),
        Finding("memory", f"{machine.available_bytes / GIB:.1f} of {machine.memory_bytes / GIB:.1f} GiB free"),
        Finding(
            "read bandwidth",
            f"{bandwidth.all_threads / 1e9:.1f} GB/s with all threads, {bandwidth.one_thread / 1e9:.1f} with one (measured)",
            bandwidth.foreign_cores < QUIET_CORES,
            "" if bandwidth.foreign_cores < QUIET_CORES else "measured while other programs ran: close them, run again",
        ),
        _quietness(machine.foreign_cores),
        _gpu([f"{gpu.name} ({gpu.memory_bytes / GIB:.0f} GiB)" for gpu in machine.gpus]),
        _compiler(machine.compiler),
        *_kernels(),
        _disk(),
        *_packages(),
    ]
    return findings


def _instruction_sets(sets: set[str]) -> Finding:
    found = ", ".join(sorted(sets)) or "none that speed up inference"
    if "AVX512-BF16" in sets or "AMX-BF16" in sets or "NEON" in sets:
        return Finding("instruction sets", found)
    return Finding("instruction sets", found, False, "bf16 is emulated here, so speed ratios say little about a server's")


def _quietness(foreign_cores: float) -> Finding:
    found = f"{foreign_cores:.2f} cores busy with other programs"
    if foreign_cores < QUIET_CORES:
        return Finding("quietness", found)
    return Finding("quietness", found, False, "close other programs before you measure speed")


def _gpu(names: list[str]) -> Finding:
    if names:
        return Finding("GPU", ", ".join(names))
    return Finding("GPU", "none", True, "not needed; for one, install a CUDA build of torch into this environment")


def _compiler(path: str | None) -> Finding:
    if path:
        return Finding("C++ compiler", path)
    return Finding("C++ compiler", "none", False, "install g++: native kernels are built on first use, else torch's run")


def _kernels() -> list[Finding]:
    """Which kernel each precision runs with at batch 1 and in prefill, asked of the code that chooses."""
    from eval.engine.attention import attention_backend_for
    from quantize.kernels import kernel_plan

    findings = [Finding("attention kernel", attention_backend_for("cpu"))]
    findings += [Finding(f"kernel for {scheme}", plan) for scheme, plan in kernel_plan("cpu").items()]
    return findings


def _disk() -> Finding:
    place = home.home()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    enough = free >= FREE_DISK_BYTES
    return Finding(
        "disk", f"{free / GIB:.1f} GiB free in {home.home()}", enough, "" if enough else "free some space, or set QUANTGATE_HOME"
    )


def _packages() -> list[Finding]:
    findings = []
    for package in ("torch", "transformers", "compressed-tensors", "lm-eval", "mlflow"):
        try:
            findings.append(Finding(package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            findings.append(Finding(package, "missing", False, f"pip install -c constraints.txt {package}"))
    has_pip = importlib.util.find_spec("pip") is not None
    findings.append(
        Finding("pip", "present" if has_pip else "missing", has_pip, "" if has_pip else "python -m ensurepip (fetch needs it)")
    )
    fetched = sorted(path.name for path in home.models().glob("*") if path.is_dir()) if home.models().is_dir() else []
    findings.append(
        Finding("models in the cache", ", ".join(fetched) or "none", True, "" if fetched else "quantgate fetch smollm2-135m")
    )
    return findings


