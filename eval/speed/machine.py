"""What this machine is and how quiet it is: the facts without which a time means nothing.

Read bandwidth is measured, not looked up: it bounds decoding, and a container rarely gets what the data sheet says. It
is kept per boot in `$QUANTGATE_HOME` (default `~/.cache/quantgate`) and measured again when the kept value is from a
busier time.
"""

import contextlib
import json
import os
import platform
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from quantize.atomic import write_atomically
from quantize.home import home
from quantize.native_build import native_build

INSTRUCTION_SETS = {
    "AVX2": ("avx2",),
    "AVX-512": ("avx512f", "avx512bw", "avx512vl"),
    "VNNI": ("avx512_vnni", "avx_vnni"),
    "AVX512-BF16": ("avx512_bf16",),
    "AMX": ("amx_tile",),
    "AMX-INT8": ("amx_int8",),
    "AMX-BF16": ("amx_bf16",),
    "NEON": ("asimd",),
    "SVE": ("sve",),
}
"""Name to /proc/cpuinfo flags: all of AVX-512's, any of the others'."""

PROBE_BYTES = 256 * 1024**2
QUIET_CORES = 0.15
"""Foreign work, in cores, below which a measurement counts as undisturbed."""


@dataclass(frozen=True)
class ReadBandwidth:
    """Bytes per second that a sum over a tensor far larger than the caches reads; best of several passes."""

    one_thread: float
    all_threads: float
    foreign_cores: float
    """What others computed meanwhile."""

    @property
    def best(self) -> float:
        """Second threads do not always help; the machine can do the better of the two."""
        return max(self.one_thread, self.all_threads)


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    capability: str


@dataclass(frozen=True)
class Machine:
    """The machine as this process may use it. `compiler` is that of native code, or None."""

    platform: str
    cpu: str
    logical_cores: int
    physical_cores: int | None
    usable_cores: int
    torch_threads: int
    instruction_sets: tuple[str, ...]
    memory_bytes: int
    available_bytes: int
    read_bandwidth: ReadBandwidth
    gpus: tuple[Gpu, ...]
    compiler: str | None
    torch: str
    foreign_cores: float
    """Cores that other processes were using when this was written."""

    def to_mapping(self) -> dict[str, Any]:
        """Plain lists and dictionaries, equal to what JSON gives back."""
        mapping: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return mapping

    def identity(self) -> dict[str, Any]:
        """What must be equal for an old measurement to stand for a new one."""
        named = ("platform", "cpu", "usable_cores", "torch_threads", "instruction_sets", "gpus", "compiler", "torch")
        return {name: value for name, value in asdict(self).items() if name in named}


class CpuMeter:
    """How many cores were busy with work that is not ours, between two looks.

    Busy time of the whole machine (time stolen by a hypervisor included) minus the time of the given processes.
    """

    def __init__(self, own_pids: Iterable[int]) -> None:
        self._own = [process for process in map(_process, {os.getpid(), *own_pids}) if process is not None]
        self._last = self._look()

    def foreign_cores(self) -> float:
        """Cores of foreign work since the last call (or since the start)."""
        now = self._look()
        (before, busy_before, own_before), self._last = self._last, now
        elapsed = max(now[0] - before, 1e-3)
        return max(0.0, ((now[1] - busy_before) - (now[2] - own_before)) / elapsed)

    def _look(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        busy = sum(getattr(times, part, 0.0) for part in ("user", "nice", "system", "irq", "softirq", "steal"))
        own = 0.0
        for process in self._own:
            with contextlib.suppress(psutil.Error):
                spent = process.cpu_times()
                own += spent.user + spent.system
        return time.monotonic(), busy, own


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def foreign_cores_now(seconds: float = 0.5) -> float:
    """Cores busy with other processes' work, watched for `seconds`."""
    meter = CpuMeter([])
    time.sleep(seconds)
    return meter.foreign_cores()


def describe_machine() -> Machine:
    """Everything at once; about a second, the first time of a boot two."""
    return Machine(
        platform=f"{platform.system()} {platform.machine()}",
        cpu=_cpu_name(),
        logical_cores=psutil.cpu_count() or 1,
        physical_cores=psutil.cpu_count(logical=False),
        usable_cores=usable_cores(),
        torch_threads=torch.get_num_threads(),
        instruction_sets=instruction_sets(_cpu_flags()),
        memory_bytes=_memory_limit(),
        available_bytes=psutil.virtual_memory().available,
        read_bandwidth=read_bandwidth(),
        gpus=_gpus(),
        compiler=native_build(),
        torch=torch.__version__,
        foreign_cores=round(foreign_cores_now(), 3),
    )


def usable_cores() -> int:
    """Cores that the scheduler lets this process run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def instruction_sets(flags: set[str]) -> tuple[str, ...]:
    """The names of INSTRUCTION_SETS that the flags hold."""
    need_all = {"AVX-512"}
    return tuple(
        name
        for name, needed in INSTRUCTION_SETS.items()
        if (all if name in need_all else any)(f in flags for f in needed)
    )


def read_bandwidth() -> ReadBandwidth:
    """This boot's value, measured on the first call and when a kept one is from a busier time than now."""
    path = home() / "bandwidth.json"
    where = {"boot": _boot_id(), "usable_cores": usable_cores(), "torch_threads": torch.get_num_threads()}
    kept = _kept_bandwidth(path, where)
    if kept is not None and (kept.foreign_cores <= QUIET_CORES or foreign_cores_now(0.2) >= kept.foreign_cores):
        return kept
    measured = measure_read_bandwidth()
    # A home that cannot be written costs a second per run, not the run.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({**where, "bandwidth": asdict(measured)}))
    return measured


def measure_read_bandwidth(probe_bytes: int = PROBE_BYTES, passes: int = 6) -> ReadBandwidth:
    """Times `torch.sum` over a float32 tensor of `probe_bytes`, with one thread and with all of torch's."""
    threads = torch.get_num_threads()
    probe = torch.ones(probe_bytes // 4, dtype=torch.float32)
    meter = CpuMeter([])
    try:
        torch.set_num_threads(1)
        one = _bytes_per_second(probe, passes)
    finally:
        torch.set_num_threads(threads)
    return ReadBandwidth(
        one, one if threads == 1 else _bytes_per_second(probe, passes), round(meter.foreign_cores(), 3)
    )


def _bytes_per_second(probe: torch.Tensor, passes: int) -> float:
    fastest = float("inf")
    for _ in range(passes):
        start = time.perf_counter()
        probe.sum()
        fastest = min(fastest, time.perf_counter() - start)
    return probe.numel() * probe.element_size() / fastest


def _kept_bandwidth(path: Path, where: dict[str, Any]) -> ReadBandwidth | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if all(kept.get(key) == value for key, value in where.items()):
            return ReadBandwidth(**kept["bandwidth"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    return None


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return str(int(psutil.boot_time()))


def _cpu_lines() -> dict[str, str]:
    """The first value of each key in /proc/cpuinfo."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            found.setdefault(key.strip(), value.strip())
    return found


def _cpu_name() -> str:
    return _cpu_lines().get("model name") or platform.processor() or platform.machine()


def _cpu_flags() -> set[str]:
    lines = _cpu_lines()
    return set((lines.get("flags") or lines.get("Features") or "").split())


def _memory_limit() -> int:
    """Bytes of memory, or of the control group's limit where that is lower."""
    total = psutil.virtual_memory().total
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    return total


def _gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(Gpu(found.name, found.total_memory, f"{found.major}.{found.minor}") for found in properties)
