"""JSON documents on disk: read with a one-line error, written whole or not at all.

A document is written beside its place and renamed into it, so a killed run leaves the old file or the new one,
never half of either. Numbers must be finite: NaN is not JSON, and a metric that is NaN was not measured.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from registry.errors import RegistryError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; RegistryError if the file is missing, unreadable or not an object."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RegistryError(f"{path}: no such file; run the stage that writes it first") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RegistryError(f"{path}: cannot be read ({error})") from None
    except json.JSONDecodeError as error:
        raise RegistryError(
            f"{path}:{error.lineno}: not valid JSON ({error.msg}); remove it and run its stage again"
        ) from None
    if not isinstance(document, dict):
        raise RegistryError(f"{path}: holds a {type(document).__name__}, expected a JSON object")
    return document


def write_text(path: Path, text: str) -> None:
    """Write `text` (UTF-8) to `path`, atomically; RegistryError if the disk refuses."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise RegistryError(
            f"{path}: cannot be written ({error.strerror or error}); free space or choose another place"
        ) from None


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write `document` to `path`, atomically; a NaN or infinite number in it is a RegistryError."""
    try:
        text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise RegistryError(f"{path}: a number in it is NaN or infinite, so it was not measured ({error})") from None
    write_text(path, text + "\n")


def file_digest(path: Path) -> str:
    """sha256 of the file's bytes, in hex."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise RegistryError(f"{path}: cannot be read ({error.strerror or error})") from None


def document_digest(document: object) -> str:
    """sha256, in hex, of the document's canonical JSON (sorted keys, no spaces)."""
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()
