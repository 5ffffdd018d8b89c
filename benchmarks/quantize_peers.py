"""Ours against llm-compressor and GPTQModel at 4 bits in groups of 64: seconds, and WikiText-2 perplexity.

Every side gets the same checkpoint and the same calibration tokens (the first 64 x 512 of the validation text). Seconds
are those of one process from its start to the checkpoint on the disk, imports and loading included: for ours
`quantgate quantize`, for a peer the driver in the library's own environment. Every side runs once on two short windows
first, so that code compiled on first use is compiled. The sides then alternate, in one order and in the reverse,
`--repeats` times, but those named by `--once` only in the first round; every time is kept, and their median. Perplexity
follows wikitext2_perplexity.py and is measured anew only where the weights differ. What foreign processes computed
meanwhile stands beside each time. The file is written after every row, so a killed run keeps what it has. Run: python
benchmarks/quantize_peers.py --data-dir DIR, after `quantgate external install` of llmcompressor and gptqmodel;
DIR/wikitext2 holds test.txt and valid.txt.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from wikitext2_perplexity import RESULTS, SAMPLES, SEQUENCE_LENGTH, calibration_file, measure

from eval.speed.machine import QUIET_CORES, CpuMeter, usable_cores
from quantgate.source import resolve_checkpoint
from quantize import Checkpoint, QuantizeError, Recipe
from quantize.calibration import calibrate
from quantize.companions import copy_companions
from quantize.decoder import open_decoder
from quantize.external.environments import LIBRARIES, is_installed
from quantize.external.run import Order, run_driver
from quantize.progress import silent
from quantize.targets import choose_targets

GROUP_SIZE = 64
OURS = ("int4", "gptq", "awq", "awq+gptq")
PEERS = {
    "int4": ("external:llmcompressor:rtn",),
    "gptq": ("external:llmcompressor:gptq", "external:gptqmodel:gptq"),
    "awq": ("external:llmcompressor:awq",),
}
"""Who does the same as ours."""


@dataclass(frozen=True)
class Side:
    """One method, with or without zero points."""

    method: str
    symmetric: bool

    @property
    def name(self) -> str:
        return f"{self.method}, {'symmetric' if self.symmetric else 'asymmetric'}"

    def is_among(self, parts: list[str]) -> bool:
        return any(part in self.name for part in parts)


@dataclass(frozen=True)
class Bench:
    """What is the same for every side."""

    checkpoint: Path
    text: Path
    folder: Path
    samples: int
    sequence_length: int

    def recipe(self, side: Side) -> Recipe:
        return Recipe(
            side.method,
            bits=4,
            group_size=GROUP_SIZE,
            symmetric=side.symmetric,
            samples=self.samples,
            sequence_length=self.sequence_length,
        )


def all_sides() -> list[Side]:
    methods = [method for own in OURS for method in (own, *PEERS.get(own, ()))]
    return [Side(method, symmetric) for symmetric in (True, False) for method in methods]


def run_side(bench: Bench, side: Side, out: Path) -> float:
    """Seconds of one process that writes the checkpoint `out`."""
    recipe = bench.recipe(side)
    if recipe.plan.external is None:
        command = [sys.executable, "-c", "from quantgate.cli import main; main()", "quantize", str(bench.checkpoint)]
        command += ["--method", side.method, "--bits", "4", "--group-size", str(GROUP_SIZE), "--out", str(out)]
        command += ["--symmetric" if side.symmetric else "--asymmetric", "--calibration", str(bench.text)]
        command += ["--samples", str(bench.samples), "--sequence-length", str(bench.sequence_length), "--json"]
        begin = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise QuantizeError(f"{side.name}: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}")
        return time.perf_counter() - begin
    checkpoint = Checkpoint.open(bench.checkpoint)
    targets = choose_targets(open_decoder(checkpoint), recipe, checkpoint)
    scheme = next(iter(targets.schemes.values()))
    text = calibrate(checkpoint, recipe, bench.text) if recipe.plan.is_calibrated else None
    order = Order(recipe, LIBRARIES[recipe.plan.external[0]], targets, scheme, text)
    out.mkdir()
    begin = time.perf_counter()
    run_driver(order, checkpoint.path, out, bench.folder / "driver.log", silent)
    seconds = time.perf_counter() - begin
    copy_companions(checkpoint.path, out)
    return seconds


def foreign_cores_of(meter: CpuMeter, begin: os.times_result) -> float:
    """What the meter saw, less what this process's own children computed since `begin`."""
    now = os.times()
    children = now.children_user + now.children_system - begin.children_user - begin.children_system
    return max(0.0, meter.foreign_cores() - children / max(now.elapsed - begin.elapsed, 1e-3))


def repeat(bench: Bench, side: Side, row: dict[str, Any], data_dir: Path, windows: int | None) -> None:
    """One more run of a side, into its row."""
    out = bench.folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    meter, begin = CpuMeter([]), os.times()
    try:
        seconds = run_side(bench, side, out)
    except QuantizeError as failure:
        row["error"] = str(failure)
        return
    row.setdefault("seconds", []).append(round(seconds, 2))
    row.setdefault("foreign_cores", []).append(round(foreign_cores_of(meter, begin), 2))
    digest = Checkpoint.open(out).weights_digest()
    if digest not in row.setdefault("perplexity", {}):
        row["perplexity"][digest] = measure(out, bench.folder / "quality", data_dir, windows)["perplexity"]
    row["median_seconds"] = round(median(row["seconds"]), 2)
    row["median_perplexity"] = median(row["perplexity"].values())


def bars(rows: dict[str, dict[str, Any]], bf16: float) -> list[dict[str, Any]]:
    """Every promise, where both sides have figures: perplexity's rise over bf16, and seconds."""

    def rise(method: str, kind: str) -> float | None:
        found = rows.get(f"{method}, {kind}", {}).get("median_perplexity")
        return None if found is None else found - bf16

    def seconds(method: str, kind: str) -> float | None:
        return rows.get(f"{method}, {kind}", {}).get("median_seconds")

    results = []

    def judge(promise: str, ours: float | None, limits: list[float | None]) -> None:
        known = [limit for limit in limits if limit is not None]
        if ours is not None and known:
            limit = min(known)
            results.append({"promise": promise, "ours": ours, "limit": limit, "kept": ours <= limit})

    for kind in ("symmetric", "asymmetric"):
        for own, peers in PEERS.items():
            judge(f"{own}, {kind}: rise ≤ the better peer's", rise(own, kind), [rise(peer, kind) for peer in peers])
            half = [0.5 * found for peer in peers[:1] if (found := seconds(peer, kind)) is not None]
            judge(f"{own}, {kind}: seconds ≤ half of {peers[0]}", seconds(own, kind), list(half))
        judge(
            f"awq+gptq, {kind}: rise below both alone",
            rise("awq+gptq", kind),
            [rise(method, kind) for method in ("awq", "gptq")],
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", default="smollm2-135m")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="calibration windows")
    parser.add_argument("--sequence-length", type=int, default=SEQUENCE_LENGTH, help="tokens per calibration window")
    parser.add_argument("--windows", type=int, default=60, help="windows of 1024 tokens judged; 0: the whole text")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[], help="run only sides whose name contains one of these")
    parser.add_argument("--once", nargs="+", default=[], help="run sides whose name contains one of these once only")
    parser.add_argument("--out", type=Path, default=RESULTS / "quantize_peers.json")
    options = parser.parse_args()
    checkpoint = resolve_checkpoint(options.checkpoint)
    windows = options.windows or None
    sides = [side for side in all_sides() if not options.only or side.is_among(options.only)]
    needed = {external[0] for side in sides if (external := Recipe(side.method).plan.external)}
    missing = [name for name in sorted(needed) if not is_installed(LIBRARIES[name])]
    if missing:
        parser.error("not installed: " + "; ".join(f"quantgate external install {name}" for name in missing))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        text = calibration_file(checkpoint, options.data_dir / "wikitext2" / "valid.txt", folder)
        document: dict[str, Any] = {
            "checkpoint": options.checkpoint,
            "calibration": f"wikitext2/valid.txt, first {options.samples} x {options.sequence_length} tokens",
            "seconds": "one process from start to checkpoint, imports and loading included",
            "repeats": {"each side": options.repeats, "once": options.once},
            "cores": usable_cores(),
            "quiet": f"at most {QUIET_CORES} foreign cores",
            "versions": {name: LIBRARIES[name].pins for name in sorted(needed)},
            "bf16": measure(checkpoint, folder / "bf16", options.data_dir, windows),
            "rows": {side.name: {} for side in sides},
            "bars": [],
        }
        print("bf16", document["bf16"]["perplexity"], flush=True)
        short = Bench(checkpoint, text, folder, 2, 64)
        for number, side in enumerate(side for side in sides if side.symmetric):
            try:
                run_side(short, side, folder / f"warm-{number}")
            except QuantizeError as failure:
                print(f"{side.name}: first short run failed: {failure}", file=sys.stderr, flush=True)
        bench = Bench(checkpoint, text, folder, options.samples, options.sequence_length)
        for number in range(options.repeats):
            for side in sides if number % 2 == 0 else reversed(sides):
                if number and side.is_among(options.once):
                    continue
                row = document["rows"][side.name]
                repeat(bench, side, row, options.data_dir, windows)
                document["bars"] = bars(document["rows"], document["bf16"]["perplexity"])
                options.out.parent.mkdir(exist_ok=True)
                options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
                print(f"{side.name}: {row.get('error') or (row['median_perplexity'], row['seconds'])}", flush=True)
    for bar in document["bars"]:
        print(f"{'kept  ' if bar['kept'] else 'MISSED'} {bar['promise']}: {bar['ours']:.2f}, limit {bar['limit']:.2f}")


if __name__ == "__main__":
    main()
