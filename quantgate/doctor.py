"""`quantgate doctor`: what this machine has, what will run on it, and what is missing, each with its remedy."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from quantgate import home

if TYPE_CHECKING:
    from eval.speed.machine import ReadBandwidth

GIB = 1024**3
FREE_DISK_BYTES = 5 * GIB


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
    from eval.speed.machine import QUIET_CORES, describe_machine

    machine = describe_machine()
    sets = set(machine.instruction_sets)
    return [
        Finding("processor", f"{machine.cpu}, {machine.usable_cores} of {machine.logical_cores} cores usable"),
        _instruction_sets(sets),
        Finding("memory", f"{machine.available_bytes / GIB:.1f} of {machine.memory_bytes / GIB:.1f} GiB free"),
        _bandwidth(machine.read_bandwidth, machine.read_bandwidth.foreign_cores < QUIET_CORES),
        _quietness(machine.foreign_cores, machine.foreign_cores < QUIET_CORES),
        _gpu([f"{gpu.name} ({gpu.memory_bytes / GIB:.0f} GiB)" for gpu in machine.gpus]),
        _compiler(machine.compiler),
        *_kernels(),
        _disk(),
        *_packages(),
    ]


def _instruction_sets(sets: set[str]) -> Finding:
    found = ", ".join(sorted(sets)) or "none that speed up inference"
    if "AVX512-BF16" in sets or "AMX-BF16" in sets or "NEON" in sets:
        return Finding("instruction sets", found)
    return Finding(
        "instruction sets", found, False, "bf16 is emulated here, so speed ratios say little about a server's"
    )


def _bandwidth(measured: ReadBandwidth, quiet: bool) -> Finding:
    all_threads, one_thread = measured.all_threads / 1e9, measured.one_thread / 1e9
    found = f"{all_threads:.1f} GB/s with all threads, {one_thread:.1f} with one (measured)"
    if quiet:
        return Finding("read bandwidth", found)
    return Finding("read bandwidth", found, False, "measured while other programs ran: close them, run it again")


def _quietness(foreign_cores: float, quiet: bool) -> Finding:
    found = f"{foreign_cores:.2f} cores busy with other programs"
    if quiet:
        return Finding("quietness", found)
    return Finding("quietness", found, False, "close other programs before you measure speed")


def _gpu(names: list[str]) -> Finding:
    if names:
        proof = "our GPU kernels have run in Triton's interpreter only: benchmarks/gpu.py checks them on this card"
        return Finding("GPU", ", ".join(names), True, proof)
    return Finding("GPU", "none", True, "not needed; for one, install a CUDA build of torch into this environment")


def _compiler(path: str | None) -> Finding:
    if path:
        return Finding("C++ compiler", path)
    return Finding(
        "C++ compiler", "none", False, "install g++: native kernels are built on first use, else torch's run"
    )


def _kernels() -> list[Finding]:
    """The kernel of each precision, asked of the code that chooses it for a real model."""
    import torch

    from eval.engine.backends import choose_backend
    from quantize.kernels.choose import choose_kernel
    from quantize.scheme import Scheme, quantize_rtn

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attention = choose_backend("auto", 64, torch.bfloat16, torch.bfloat16, device)
    findings = [Finding("attention kernel", attention.name)]
    weight = torch.linspace(-1, 1, 128 * 256, dtype=torch.bfloat16).reshape(128, 256)
    schemes = {
        "int8 weights": Scheme(8),
        "int8 weights and activations": Scheme(8, activations="int8"),
        "int4 weights, symmetric": Scheme(4, 64),
        "int4 weights, asymmetric": Scheme(4, 64, symmetric=False),
    }
    for what, scheme in schemes.items():
        name = str(choose_kernel(quantize_rtn(weight, scheme), device, torch.bfloat16).name)
        fast = name.startswith(("native", "triton"))
        needs = "Triton and an NVIDIA GPU, Ampere or newer"
        if device.type == "cpu":
            needs = "a C++ compiler, and AVX-512 with BF16 and VNNI or AVX2"
        remedy = "" if fast else f"slower than it could be: needs {needs}"
        findings.append(Finding(f"kernel for {what}", name, fast, remedy))
    return findings


def _disk() -> Finding:
    place = home.home()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    enough = free >= FREE_DISK_BYTES
    return Finding(
        "disk",
        f"{free / GIB:.1f} GiB free in {home.home()}",
        enough,
        "" if enough else "free some space, or set QUANTGATE_HOME",
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
        Finding(
            "pip",
            "present" if has_pip else "missing",
            has_pip,
            "" if has_pip else "python -m ensurepip (fetch needs it)",
        )
    )
    fetched = sorted(path.name for path in home.models().glob("*") if path.is_dir()) if home.models().is_dir() else []
    findings.append(
        Finding(
            "models in the cache", ", ".join(fetched) or "none", True, "" if fetched else "quantgate fetch smollm2-135m"
        )
    )
    return findings
