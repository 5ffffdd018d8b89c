"""Whether a result is that of the very same work: a digest of all that decides its bytes.

With it a run that is started again knows what it may continue, and what is finished.
"""

import hashlib
import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from quantize.calibration import Calibration
from quantize.checkpoint import Checkpoint
from quantize.errors import QuantizeError
from quantize.manifest import MANIFEST, Manifest
from quantize.native_build import native_build
from quantize.recipe import Recipe

REVISION = 8
"""Raised whenever a change of the code gives other bytes for the same recipe, so that old work is not continued."""


def fingerprint(
    checkpoint: Checkpoint,
    recipe: Recipe,
    calibration: Calibration | None,
    device: torch.device,
    source_digest: str,
    library: Sequence[str] = (),
) -> str:
    """A digest of all that decides the bytes of the result. library: the versions of what does the work, where it is
    not this package."""
    decisive = {
        "revision": REVISION,
        "source": source_digest,
        "tokenizer": (checkpoint.tokenizer_digest(), checkpoint.chat_template_digest()),
        "generation": checkpoint.generation_settings(),
        "config": checkpoint.config,
        "recipe": recipe.to_mapping(),
        "calibration": calibration.digest if calibration else None,
        "versions": versions(),
        "device": device.type,
        "native": native_build(),
        "library": list(library),
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=False).encode()).hexdigest()


def versions(*more: str) -> dict[str, str]:
    """Of this package and of those that it computes with; `more` are further distributions."""
    try:
        own = metadata.version("quantgate")
    except metadata.PackageNotFoundError:
        own = "not installed"
    return {
        "quantgate": own,
        **{name: metadata.version(name) for name in ("torch", "transformers", "safetensors", *more)},
    }


def finished_before(out: Path, identity: str) -> Manifest | None:
    """The manifest in OUT, if OUT is the whole result of the same work."""
    if not (out / MANIFEST).is_file():
        return None
    try:
        manifest = Manifest.read(out)
        Checkpoint.open(out)
    except QuantizeError:
        return None
    return manifest if manifest.fingerprint == identity else None
