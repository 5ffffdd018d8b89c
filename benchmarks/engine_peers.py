"""Our engine against llama.cpp, vLLM, OpenVINO GenAI, ONNX Runtime GenAI and transformers on this CPU: SmolLM2-135M,
greedy, in bf16, INT8 and INT4 (groups of 64).

Every side is a process of its own that stays loaded and idle while the others compute. Within a cell (precision, batch,
prompt) the sides take turns, in one order and in the reverse, until each has `--repeats` repeats during which foreign
processes used at most QUIET_CORES; medians are of those, and every repeat is kept. The file is written after every row;
cells that are not asked for keep the rows that they have there, as long as their sides are still the same.

`make bench-engine` installs the peers, one environment each, and runs this; `--peers` is the folder of those
environments. A side that fails leaves its error in the row, and the others go on.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

import numpy as np
from transformers import AutoTokenizer

from eval.speed.machine import QUIET_CORES, CpuMeter, describe_machine, foreign_cores_now, usable_cores
from eval.speed.prompts import PromptSource, shipped_text
from quantgate.source import resolve_checkpoint
from quantize.home import home

HERE = Path(__file__).parent
RESULTS = HERE / "results"
sys.path.insert(0, str(HERE / "peers"))
from models import Models  # noqa: E402

BATCHES, PROMPTS = (1, 8, 32), (128, 512)
WAIT_FOR_QUIET_S = 20.0
TRIES = 3
"""Rounds per repeat that is wanted, where the machine is not quiet."""


@dataclass(frozen=True)
class Side:
    """One engine with one model. `library` names the folder of its environment; None is ours."""

    name: str
    driver: str
    model: str
    library: str | None = None

    @property
    def is_ours(self) -> bool:
        return self.driver == "quantgate"


OURS_BF16 = Side("ours bf16", "quantgate", "bf16")
SIDES = {
    "bf16": (
        OURS_BF16,
        Side("llama.cpp BF16", "llamacpp", "bf16.gguf", "llamacpp"),
        Side("vLLM bf16", "vllm", "bf16", "vllm"),
        Side("OpenVINO bf16", "openvino", "openvino-bf16", "openvino"),
        Side("transformers bf16", "transformers", "bf16"),
    ),
    "int8": (
        Side("ours W8A8", "quantgate", "w8a8"),
        Side("ours W8A16", "quantgate", "int8"),
        Side("llama.cpp Q8_0", "llamacpp", "q8_0.gguf", "llamacpp"),
        Side("vLLM W8A8", "vllm", "w8a8-bf16-head", "vllm"),
        Side("OpenVINO INT8", "openvino", "openvino-int8", "openvino"),
    ),
    "int4": (
        Side("ours W4A16", "quantgate", "int4"),
        Side("ours W4A16, 4-bit head", "quantgate", "int4-int4-head"),
        OURS_BF16,
        Side("llama.cpp Q4_0", "llamacpp", "q4_0.gguf", "llamacpp"),
        Side("OpenVINO INT4", "openvino", "openvino-int4", "openvino"),
        Side("ONNX Runtime INT4", "onnxruntime", "onnx-int4", "onnxruntime"),
    ),
}
"""The first side of a precision is the one that its bars judge; others of ours stand beside it."""

DECODE_BARS = {
    "bf16": {1: 1.2, 8: 1.3, 32: 1.2},
    "int8": {1: 1.7, 8: 1.5, 32: 1.2},
    "int4": {1: 1.4, 8: 1.3, 32: 1.2},
}
PREFILL_BAR, INT4_OVER_BF16_BAR = 1.0, 2.0


@dataclass(frozen=True)
class Cell:
    precision: str
    batch: int
    prompt_tokens: int

    @property
    def name(self) -> str:
        return f"{self.precision}, batch {self.batch}, prompt {self.prompt_tokens}"

    def takes(self, side: Side) -> bool:
        """Our bf16 stands beside INT4 where a bar compares them."""
        return side is not OURS_BF16 or self.precision == "bf16" or self.batch == 1


class Process:
    """A side that is loaded. `error` says why it is not, and from then on it is left out."""

    def __init__(self, side: Side, command: list[str], environment: dict[str, str], log: IO[bytes]) -> None:
        self.side = side
        self.error: str | None = None
        self.identity: dict[str, Any] = {}
        self._log = log
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, text=True
        )
        self.identity = self._read() or {}

    @property
    def pid(self) -> int:
        return self._process.pid

    def answer(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any] | None:
        assert self._process.stdin is not None
        try:
            print(json.dumps({"prompts": prompts, "new_tokens": new_tokens}), file=self._process.stdin, flush=True)
        except OSError:
            self.error = self.error or "it ended by itself"
        return self._read()

    def close(self) -> None:
        if self._process.stdin is not None and self._process.poll() is None:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.flush()
            words = Path(self._log.name).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            self.error = self.error or (words or ["it ended without a word"])[-1][:300]
            print(f"{self.side.name}: {self.error} ({self._log.name})", file=sys.stderr, flush=True)
            return None
        found: dict[str, Any] = json.loads(line)
        return found


@dataclass
class Measured:
    """A side's repeats in one cell: (time to all first tokens in s, decode tokens/s, foreign cores)."""

    repeats: list[tuple[float, float, float]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def quiet(self) -> int:
        return sum(foreign <= QUIET_CORES for _, _, foreign in self.repeats)

    def to_mapping(self, cell: Cell) -> dict[str, Any]:
        counted = [one for one in self.repeats if one[2] <= QUIET_CORES] or self.repeats
        first_s = median(first for first, _, _ in counted)
        return {
            "decode_tokens_per_second": round(median(rate for _, rate, _ in counted), 1),
            "prefill_tokens_per_second": round(cell.batch * cell.prompt_tokens / first_s, 1),
            "ttft_ms": round(1e3 * first_s, 1),
            "quiet_repeats": self.quiet,
            "repeats": [
                {"ttft_ms": round(1e3 * first, 1), "decode": round(rate, 1), "foreign_cores": round(foreign, 2)}
                for first, rate, foreign in self.repeats
            ],
            "first_tokens": self.tokens[:12],
        }


def start(side: Side, models: Models, interpreter: Path, tokens: int, logs: Path) -> Process:
    model = models.path(side.model)
    needed = {"quantgate": (max(BATCHES), tokens), "vllm": (max(BATCHES), tokens), "transformers": ()}
    needed |= {"openvino": (max(BATCHES), usable_cores())}
    arguments = needed.get(side.driver, (usable_cores(),))
    environment = dict(os.environ)
    if side.library is not None:
        environment.pop("PYTHONPATH", None)
    # vLLM says that it is slow without Intel's OpenMP, and pins its threads itself; the others use all cores.
    openmp = interpreter.parent.parent / "lib" / "libiomp5.so"
    if side.driver == "vllm" and openmp.exists():
        environment["LD_PRELOAD"] = str(openmp)
    environment.pop("OMP_NUM_THREADS", None)
    command = [str(interpreter), str(HERE / "peers" / f"drive_{side.driver}.py"), str(model), *map(str, arguments)]
    log = (logs / f"{side.name}.log").open("wb")
    return Process(side, command, environment, log)


def measure(cell: Cell, processes: list[Process], prompts: list[list[int]], options: argparse.Namespace) -> dict:
    measured = {process.side.name: Measured() for process in processes}
    for process in processes:
        if process.error is None:
            process.answer(prompts, 2)
    for number in range(TRIES * options.repeats):
        for process in processes if number % 2 == 0 else reversed(processes):
            found = measured[process.side.name]
            if process.error is None and found.quiet < options.repeats:
                repeat(process, prompts, options.new_tokens, found)
    return {
        "new_tokens": options.new_tokens,
        "measured": time.strftime("%Y-%m-%d %H:%M"),
        "sides": {
            process.side.name: {"error": process.error}
            if process.error is not None
            else measured[process.side.name].to_mapping(cell)
            for process in processes
        },
    }


def repeat(process: Process, prompts: list[list[int]], new_tokens: int, found: Measured) -> None:
    deadline = time.monotonic() + WAIT_FOR_QUIET_S
    while foreign_cores_now(0.25) > QUIET_CORES and time.monotonic() < deadline:
        pass
    meter = CpuMeter([process.pid])
    answer = process.answer(prompts, new_tokens)
    if answer is not None:
        rate = answer["later_tokens"] / (answer["last_s"] - answer["first_s"])
        found.repeats.append((answer["first_s"], rate, meter.foreign_cores()))
        found.tokens = answer["tokens"]


def bars(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Every promise whose row is there: ours over the best peer of the same cell."""
    results = []

    def judge(promise: str, cell: Cell, what: str, limit: float) -> None:
        judged = SIDES[cell.precision][0].name
        rates = {name: side[what] for name, side in rows[cell.name]["sides"].items() if what in side}
        peers = {name: rate for name, rate in rates.items() if not name.startswith("ours")}
        if not peers or judged not in rates:
            return
        best = max(peers, key=lambda name: peers[name])
        ratios = {
            name: round(rate / peers[best], 3)
            for name, rate in rates.items()
            if name == judged or (name.startswith("ours") and name != OURS_BF16.name)
        }
        results.append(
            {
                "bar": promise,
                "judged": judged,
                "tokens_per_second": rates[judged],
                "best_peer": best,
                "peer_tokens_per_second": peers[best],
                "ratio": ratios[judged],
                "limit": limit,
                "kept": ratios[judged] >= limit,
                "beside": {name: ratio for name, ratio in ratios.items() if name != judged},
            }
        )

    for cell in all_cells():
        if cell.name in rows:
            limit = DECODE_BARS[cell.precision][cell.batch]
            judge(f"decode: {cell.name}", cell, "decode_tokens_per_second", limit)
    for precision in ("bf16", "int8"):
        cell = Cell(precision, 1, 512)
        if cell.name in rows:
            judge(f"prefill: {cell.name}", cell, "prefill_tokens_per_second", PREFILL_BAR)
    for prompt_tokens in PROMPTS:
        cell = Cell("int4", 1, prompt_tokens)
        sides = rows.get(cell.name, {}).get("sides", {})
        rate, bf16 = (
            sides.get(side.name, {}).get("decode_tokens_per_second") for side in (SIDES["int4"][0], OURS_BF16)
        )
        if rate and bf16:
            results.append(
                {
                    "bar": f"decode: INT4 over our own bf16, batch 1, prompt {prompt_tokens}",
                    "judged": SIDES["int4"][0].name,
                    "tokens_per_second": rate,
                    "best_peer": OURS_BF16.name,
                    "peer_tokens_per_second": bf16,
                    "ratio": round(rate / bf16, 3),
                    "limit": INT4_OVER_BF16_BAR,
                    "kept": rate / bf16 >= INT4_OVER_BF16_BAR,
                    "beside": {},
                }
            )
    return results


def all_cells() -> list[Cell]:
    return [Cell(precision, batch, prompt) for precision in SIDES for batch in BATCHES for prompt in PROMPTS]


def forget_changed(document: dict[str, Any], side: str, identity: dict[str, Any]) -> None:
    """Rows measured with what a side no longer is say nothing any more."""
    if document["identities"].get(side, identity) != identity:
        document["rows"] = {name: row for name, row in document["rows"].items() if side not in row["sides"]}
    document["identities"][side] = identity


def table(document: dict[str, Any]) -> list[str]:
    lines = []
    for bar in document["bars"]:
        beside = "".join(f"; {name} {ratio:.2f}" for name, ratio in bar["beside"].items())
        lines.append(
            f"{'kept  ' if bar['kept'] else 'MISSED'} {bar['bar']}: {bar['ratio']:.2f} of {bar['limit']:.2f} "
            f"({bar['judged']} {bar['tokens_per_second']:.0f}, {bar['best_peer']} {bar['peer_tokens_per_second']:.0f}"
            f"{beside})"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", default="smollm2-135m")
    parser.add_argument("--peers", type=Path, default=home() / "peers", help="one environment per peer")
    parser.add_argument("--models", type=Path, default=home() / "peer-models", help="where the models are kept")
    parser.add_argument("--precisions", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--batches", nargs="+", type=int, choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--prompts", nargs="+", type=int, choices=PROMPTS, default=list(PROMPTS), help="tokens")
    parser.add_argument("--without", nargs="+", default=[], help="leave out sides whose name contains one of these")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "engine_peers.json")
    options = parser.parse_args()
    wanted = {side.library for precision in options.precisions for side in SIDES[precision]} - {None}
    missing = [name for name in sorted(map(str, wanted)) if not (options.peers / name / "bin" / "python").exists()]
    if missing:
        parser.error(f"{options.peers} has no environment for {', '.join(missing)}: make bench-engine installs them")

    def interpreter(library: str | None) -> Path:
        return Path(sys.executable) if library is None else options.peers / library / "bin" / "python"

    checkpoint = resolve_checkpoint(options.checkpoint)
    models = Models(checkpoint, options.models, interpreter)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer(shipped_text(), add_special_tokens=False)["input_ids"]
    document: dict[str, Any] = {"rows": {}, "identities": {}}
    if options.out.exists():
        document = json.loads(options.out.read_text(encoding="utf-8"))
    document |= {
        "checkpoint": options.checkpoint,
        "decode": "tokens/s of the whole batch, from the moment when every prompt has its first token",
        "quiet": f"at most {QUIET_CORES} foreign cores",
        "machine": describe_machine().to_mapping(),
    }
    for precision in options.precisions:
        cells = [
            cell
            for cell in all_cells()
            if cell.precision == precision and cell.batch in options.batches and cell.prompt_tokens in options.prompts
        ]
        sides = [side for side in SIDES[precision] if any(cell.takes(side) for cell in cells)]
        sides = [side for side in sides if not any(part in side.name for part in options.without)]
        for side in sides:
            models.path(side.model)
        with tempfile.TemporaryDirectory() as logs:
            # The same for every selection of cells, so that what vLLM compiled once is found again.
            tokens = max(PROMPTS) + max(128, options.new_tokens)
            processes = [start(side, models, interpreter(side.library), tokens, Path(logs)) for side in sides]
            try:
                for process in processes:
                    if process.error is None:
                        forget_changed(document, process.side.name, process.identity)
                for cell in cells:
                    source = PromptSource(ids)
                    rng = np.random.default_rng(cell.prompt_tokens)
                    prompts = [source.draw(rng, cell.prompt_tokens) for _ in range(cell.batch)]
                    using = [process for process in processes if cell.takes(process.side)]
                    row = document["rows"][cell.name] = measure(cell, using, prompts, options)
                    document["bars"] = bars(document["rows"])
                    options.out.parent.mkdir(exist_ok=True)
                    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
                    rates = {
                        name: side.get("decode_tokens_per_second", side.get("error"))
                        for name, side in row["sides"].items()
                    }
                    print(f"{cell.name}: {rates}", flush=True)
            finally:
                for process in processes:
                    process.close()
    print("\n".join(table(document)))


if __name__ == "__main__":
    main()
