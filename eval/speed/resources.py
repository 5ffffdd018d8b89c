"""Watches both sides while blocks run: memory of each, and how much of the machine strangers used."""

import contextlib
import threading
import time
from dataclasses import dataclass

import psutil

from eval.speed.machine import CpuMeter

SAMPLE_EVERY_S = 0.25


@dataclass(frozen=True)
class ResourceRecord:
    """One look at one side. `billable_units`: seconds that this side has had the machine; utilisations: shares of 1."""

    time: float
    gpu_id: str | None
    pool: str
    gpu_util: float | None
    memory_util: float
    process_bytes: int
    billable_units: float
    cost_center: str | None
    variant: str


class ResourceSampler:
    """A thread of the parent, alive inside `with`. `active` says whose block runs, None between blocks."""

    def __init__(self, pids: dict[str, int]) -> None:
        self.records: list[ResourceRecord] = []
        self.foreign_cores: list[float] = []
        self.active: str | None = None
        self._pids = pids
        self._seconds = dict.fromkeys(pids, 0.0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "ResourceSampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        meter = CpuMeter(self._pids.values())
        processes = {variant: psutil.Process(pid) for variant, pid in self._pids.items()}
        last = time.monotonic()
        self._look(processes)
        while not self._stop.wait(SAMPLE_EVERY_S):
            now, active, foreign = time.monotonic(), self.active, meter.foreign_cores()
            if active is not None:
                self._seconds[active] += now - last
                self.foreign_cores.append(foreign)
            last = now
            self._look(processes)

    def _look(self, processes: dict[str, psutil.Process]) -> None:
        memory = psutil.virtual_memory()
        for variant, process in processes.items():
            with contextlib.suppress(psutil.Error):
                self.records.append(
                    ResourceRecord(
                        time=time.time(),
                        gpu_id=None,
                        pool="cpu",
                        gpu_util=None,
                        memory_util=1 - memory.available / memory.total,
                        process_bytes=process.memory_info().rss,
                        billable_units=self._seconds[variant],
                        cost_center=None,
                        variant=variant,
                    )
                )
