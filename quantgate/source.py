"""From what a user types to a checkpoint folder: a path, a GGUF file, a fetchable name or a hub id."""

import hashlib
from pathlib import Path
from typing import Any

from quantgate import home
from quantgate.errors import FrontDoorError
from quantgate.fetch import FETCHABLE, Progress, fetch


def resolve_checkpoint(reference: str, progress: Progress | None = None) -> Path:
    """The local folder of a checkpoint, fetched or converted into the cache where need be.

    Args:
        reference: a Hugging Face folder, a `.gguf` file, a name that `quantgate fetch` knows, or a hub id `owner/name`.

    Raises:
        FrontDoorError: nothing of that name exists here, or the hub does not answer.
    """
    path = Path(reference).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise FrontDoorError(
                f"{reference} is a file, not a checkpoint: give the folder that holds config.json, or a .gguf file"
            )
        return _converted_gguf(path, progress)
    if reference in FETCHABLE:
        return fetch(reference, progress)
    if _looks_like_hub_id(reference):
        return _from_hub(reference, progress)
    known = ", ".join(FETCHABLE)
    raise FrontDoorError(f"no such checkpoint: {reference} (give a folder, a .gguf file, a hub id, or one of: {known})")


def speculative_options(speculative: str | None, tokens: int, progress: Progress | None = None) -> dict[str, Any]:
    """Engine options for what a user types at --speculative; none without."""
    from eval.engine.speculative import PROMPT_LOOKUP

    if speculative is None:
        return {}
    if speculative != PROMPT_LOOKUP:
        try:
            speculative = str(resolve_checkpoint(speculative, progress).resolve())
        except FrontDoorError as error:
            raise FrontDoorError(f"--speculative takes {PROMPT_LOOKUP} or a checkpoint: {error}") from None
    return {"speculative": speculative, "speculative_tokens": tokens}


def _looks_like_hub_id(reference: str) -> bool:
    owner, slash, name = reference.partition("/")
    return bool(slash and owner and name) and "/" not in name and not reference.startswith((".", "~"))


def _converted_gguf(gguf: Path, progress: Progress | None) -> Path:
    from quantize.formats.gguf import convert_gguf

    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = home.models() / f"{gguf.stem}-{digest[:12]}"
    if not (target / "config.json").is_file():
        if progress:
            progress(f"converting {gguf.name} to a bf16 checkpoint", 0, 1)
        target.parent.mkdir(parents=True, exist_ok=True)
        convert_gguf(gguf, target)
    return target


def _from_hub(reference: str, progress: Progress | None) -> Path:
    from huggingface_hub import snapshot_download

    if progress:
        progress(f"downloading {reference}", 0, 1)
    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
        return Path(snapshot_download(reference, allow_patterns=patterns))
    except Exception as error:
        why = str(error).splitlines()[0]
        here = Path(reference).parent
        found = f"{here} has no {Path(reference).name}" if here.is_dir() else f"there is no folder {here}"
        raise FrontDoorError(
            f"no such checkpoint: {reference}: {found} here, and the hub did not give it ({why}); "
            "check the spelling or the network"
        ) from error
