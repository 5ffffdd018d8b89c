"""What was done to a checkpoint, module by module: `quantgate.json`, written into the result and readable from it.

Two runs on the same input write the same manifest, save the fields called `seconds`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from quantize.atomic import write_atomically
from quantize.checkpoint import read_json
from quantize.errors import QuantizeError

MANIFEST = "quantgate.json"
GGUF_KEY = "quantgate.manifest"
"""Under which a GGUF file carries the same text."""
CALIBRATION_FIELDS = {"source", "digest", "samples", "sequence_length"}
TOO_FEW = "too few calibration tokens"
HIGHEST = 2**63
"""Above any count of bytes; far larger ones cannot even be shown, since no float holds them."""
NAMED = 8
"""How many modules a note names; all of them have their records."""


@dataclass(frozen=True)
class ModuleRecord:
    """One quantized linear. relative_error is ‖WX−ŴX‖²/‖WX‖² on the calibration inputs X where error_of is "outputs",
    ‖W−Ŵ‖²/‖W‖² where it is "weights" (methods that need no calibration), and None where what an external quantizer left
    cannot be compared. clipped_scales counts groups whose range was cut on purpose, dead_columns inputs that
    calibration never moved. bytes is the size of its tensors as stored. tokens is how many calibration tokens reached
    it, None where none were asked for."""

    name: str
    bits: int
    group_size: int
    symmetric: bool
    relative_error: float | None
    error_of: str
    fallback: str | None
    dead_columns: int
    clipped_scales: int
    parameters: int
    bytes: int
    seconds: float
    tokens: int | None = None


@dataclass(frozen=True)
class Manifest:
    """fingerprint is a digest of all that decides the result's bytes. bytes_* count the weight files; bits_per_weight
    counts the quantized modules with their scales. coverage compares the modules that the recipe asked for with those
    found packed in the result."""

    source_digest: str
    fingerprint: str
    recipe: Mapping[str, Any]
    calibration: Mapping[str, Any] | None
    versions: Mapping[str, str]
    modules: tuple[ModuleRecord, ...]
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    coverage: Mapping[str, int]
    notes: tuple[str, ...]
    seconds: float
    tokenizer_digest: str = ""
    chat_template_digest: str | None = None
    schema: int = field(default=1)

    def write(self, folder: Path) -> None:
        write_atomically(
            folder / MANIFEST, json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        )

    @classmethod
    def read(cls, folder: Path | str) -> "Manifest":
        """Also from a GGUF file that one was converted into. Raises QuantizeError when the folder has no manifest, or
        one that this version does not know."""
        file = Path(folder) if Path(folder).suffix == ".gguf" else Path(folder) / MANIFEST
        content = manifest_of_gguf(file) if file.suffix == ".gguf" else read_json(file, "not a checkpoint of ours")
        names = {entry.name for entry in fields(cls)}
        if content.get("schema") != 1 or set(content) != names:
            raise QuantizeError(f"{file}: written by another version; quantize again")
        try:
            modules = tuple(ModuleRecord(**module) for module in content["modules"])
            manifest = cls(**{**content, "modules": modules, "notes": tuple(content["notes"])})
            wrong = next((name for record in [manifest, *modules] for name in _misfits(record)), None)
            wrong = wrong or next(_gaps(manifest), None)
        except TypeError:
            wrong = "modules"
        if wrong is not None or not modules:
            raise QuantizeError(f"{file}: {wrong or 'modules'} is damaged; quantize again")
        return manifest


def too_few_tokens(modules: tuple[ModuleRecord, ...]) -> tuple[str, ...]:
    """A sentence that names what calibration hardly reached, by the module above the linears (an expert); none when
    everything was reached."""
    short: dict[str, int] = {}
    for record in modules:
        if (
            record.fallback is not None
            and record.tokens is not None
            and (TOO_FEW in record.fallback or not record.tokens)
        ):
            owner = record.name.rpartition(".")[0]
            short[owner] = max(short.get(owner, 0), record.tokens)
    if not short:
        return ()
    shown = [f"{name} ({tokens} tokens)" for name, tokens in list(short.items())[:NAMED]]
    more = f" and {len(short) - NAMED} more" if len(short) > NAMED else ""
    return (f"{TOO_FEW}, so rounded to nearest: {', '.join(shown)}{more}; calibrate on more text",)


def manifest_of_gguf(file: Path) -> dict[str, Any]:
    from quantize.formats.gguf import read_metadata

    written = read_metadata(file).get(GGUF_KEY)
    if written is None:
        raise QuantizeError(f"{file}: not a checkpoint of ours, it has no {GGUF_KEY}")
    try:
        content = json.loads(written)
    except (TypeError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise QuantizeError(f"{file}: {GGUF_KEY} is damaged; convert or quantize again")
    return content


def _misfits(record: object) -> Iterator[str]:
    """The fields of which the value is not of the type that the class gives them."""
    for name, hint in get_type_hints(type(record)).items():
        allowed = tuple(get_origin(kind) or kind for kind in (get_args(hint) if type(hint) is UnionType else (hint,)))
        value = getattr(record, name)
        fits = isinstance(value, (*allowed, int) if float in allowed else allowed)
        too_large = isinstance(value, int) and not -HIGHEST <= value <= HIGHEST
        if not fits or too_large or (isinstance(value, float) and not isfinite(value)):
            yield name


def _gaps(manifest: Manifest) -> Iterator[str]:
    """The mappings without what every one of them has."""
    if not isinstance(manifest.recipe.get("method"), str):
        yield "recipe"
    if not all(isinstance(manifest.coverage.get(name), int) for name in ("expected", "packed")):
        yield "coverage"
    if manifest.calibration is not None and not manifest.calibration.keys() >= CALIBRATION_FIELDS:
        yield "calibration"
