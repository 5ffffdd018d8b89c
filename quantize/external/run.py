"""One checkpoint through an external quantizer: our targets, group size and calibration tokens in, a variant out.

The library runs in its own environment (`drive.py`) and writes into `OUT.partial`; what it wrote is counted against
what was asked for before the folder gets its name. It cannot be continued, so a killed run begins anew.
"""

import hashlib
import json
import os
import re
import selectors
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from quantize.atomic import atomic_directory, one_line_os_errors
from quantize.calibration import Calibration, calibrate
from quantize.checkpoint import Checkpoint, refuse_nonfinite
from quantize.companions import copy_companions
from quantize.decoder import open_decoder
from quantize.errors import QuantizeError
from quantize.external.environments import Library, folder, is_installed, last_line, library_named
from quantize.external.written import written_modules
from quantize.fingerprint import fingerprint, finished_before, versions
from quantize.formats.choose import quantization_of
from quantize.manifest import MANIFEST, Manifest
from quantize.progress import Progress, silent
from quantize.recipe import Recipe
from quantize.scheme import Scheme
from quantize.targets import Targets, choose_targets

DRIVER = Path(__file__).with_name("drive.py")
SILENCE_SECONDS = 3600.0
"""A library that says nothing for so long hangs."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # With as many workers as cores gptqmodel asks for more than a 2-core machine has, and crashes.
    "GPTQMODEL_CPU_WORKERS": "4",
}


@dataclass(frozen=True)
class Order:
    """What a library is to do: everything that decides its result, beside the source."""

    recipe: Recipe
    library: Library
    targets: Targets
    scheme: Scheme
    calibration: Calibration | None

    def job(self, source: Path, out: Path, report: Path) -> dict[str, Any]:
        _, algorithm = self.recipe.plan.external or ("", "")
        return {
            "library": self.library.name,
            "algorithm": algorithm,
            "source": str(source.absolute()),
            "out": str(out.absolute()),
            "report": str(report),
            "bits": self.scheme.bits,
            "group_size": self.scheme.group_size,
            "symmetric": self.scheme.symmetric,
            "token_ids": self.calibration.token_ids.tolist() if self.calibration else [],
        }


def quantize_externally(
    checkpoint: Checkpoint, recipe: Recipe, out: Path, calibration: Path | None, replace: bool, tell: Progress = silent
) -> Manifest:
    """Writes the library's checkpoint OUT, with a manifest of ours. Run again when OUT holds the result of the same
    work, it does nothing. Raises QuantizeError, one line, when the library is not installed, cannot do it on this
    machine, fails (its output is kept in the log that the line names) or leaves modules out."""
    begin = time.perf_counter()
    name, _ = recipe.plan.external or ("", "")
    library = library_named(name)
    if not is_installed(library):
        raise QuantizeError(f"method: {recipe.method}: run first: quantgate external install {name}")
    if name == "autogptq" and not torch.cuda.is_available():
        raise QuantizeError(
            f"method: {recipe.method}: AutoGPTQ quantizes on CUDA only, and there is none; "
            "external:gptqmodel writes the same format on a CPU"
        )
    decoder = open_decoder(checkpoint)
    targets = choose_targets(decoder, recipe, checkpoint)
    schemes = set(targets.schemes.values())
    scheme = next(iter(schemes))
    tell("checking the source", 0, 1)
    source_digest = checkpoint.weights_digest(refuse_nonfinite(checkpoint))
    text = calibrate(checkpoint, recipe, calibration) if recipe.plan.is_calibrated else None
    order = Order(recipe, library, targets, scheme, text)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    driver = hashlib.sha256(DRIVER.read_bytes()).hexdigest()
    identity = fingerprint(checkpoint, recipe, text, device, source_digest, [driver, *library.pins])
    finished = finished_before(out, identity)
    if finished is not None:
        return finished
    with atomic_directory(out, replace=replace and (out / MANIFEST).is_file()) as partial:
        log = folder() / "logs" / f"{name}-{identity[:12]}.log"
        report = run_driver(order, checkpoint.path, partial, log, tell)
        manifest = finish(order, checkpoint, partial, report, source_digest, identity, begin)
    tell("done", 1, 1)
    return manifest


def run_driver(order: Order, source: Path, out: Path, log: Path, tell: Progress) -> dict[str, Any]:
    """The driver's report, after it has written the checkpoint into `out`."""
    own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="quantgate-external-") as scratch, log.open("wb") as output:
        job, report = Path(scratch) / "job.json", Path(scratch) / "report.json"
        job.write_text(json.dumps(order.job(source, out, report)), encoding="utf-8")
        with subprocess.Popen(
            [str(order.library.python), "-I", str(DRIVER), str(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=scratch,
            env=own | ENVIRONMENT,
        ) as process:
            try:
                assert process.stdout is not None
                follow(process.stdout, output, order.library.name, log, tell)
                process.wait()
            except BaseException:
                process.kill()
                raise
        if process.returncode or not report.is_file():
            how = f"ended by signal {-process.returncode}" if process.returncode < 0 else last_line(log)
            raise QuantizeError(f"method: {order.recipe.method}: {order.library.name} failed ({how}); see {log}")
        content: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return content


def follow(stream: IO[bytes], output: IO[bytes], name: str, log: Path, tell: Progress) -> None:
    """Copies the library's output into the log as it comes, and its own count of steps onto the progress bar."""
    tell(name, 0, 1)
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            if not selector.select(SILENCE_SECONDS):
                raise QuantizeError(f"{name}: has said nothing for {SILENCE_SECONDS:.0f} seconds; see {log}")
            piece = os.read(stream.fileno(), 65536)
            if not piece:
                return
            output.write(piece)
            output.flush()
            counts = re.findall(rb"\b(\d{1,4}) ?(?:/|of) ?(\d{1,4})\b", piece)
            if counts:
                done, total = (int(count) for count in counts[-1])
                if 0 < done <= total:
                    tell(name, done, total)


def finish(
    order: Order,
    checkpoint: Checkpoint,
    out: Path,
    report: dict[str, Any],
    source_digest: str,
    identity: str,
    begin: float,
) -> Manifest:
    """Tokenizer and manifest beside what the library wrote, once that has been counted."""
    with one_line_os_errors(out):
        copy_companions(checkpoint.path, out)
    result = Checkpoint.open(out)
    modules = written_modules(checkpoint, result, order.targets, order.recipe.plan.scaling is not None)
    lost = sorted(set(order.targets.schemes) - {module.name for module in modules})
    if lost:
        raise QuantizeError(
            f"method: {order.recipe.method}: left {len(lost)} of {len(order.targets.schemes)} modules unquantized, "
            f"{lost[0]} first; use a method of quantgate's own"
        )
    text = order.calibration
    stored = quantization_of(result).get("quant_method")
    manifest = Manifest(
        source_digest=source_digest,
        fingerprint=identity,
        recipe=order.recipe.to_mapping(),
        calibration=None if text is None else text.to_mapping(checkpoint.chat_template_digest()),
        versions=versions() | {f"external.{name}": used for name, used in report["versions"].items()},
        modules=modules,
        bytes_before=checkpoint.bytes(),
        bytes_after=result.bytes(),
        bits_per_weight=8 * sum(module.bytes for module in modules) / sum(module.parameters for module in modules),
        coverage={"expected": len(order.targets.schemes), "packed": len(modules)},
        notes=(
            *order.targets.notes,
            *((text.note,) if text is not None and text.note else ()),
            f"written by {order.library.name} as {stored}",
        ),
        seconds=round(time.perf_counter() - begin, 3),
        tokenizer_digest=checkpoint.tokenizer_digest(),
        chat_template_digest=checkpoint.chat_template_digest(),
    )
    manifest.write(out)
    return manifest
