"""A Hugging Face folder on disk, opened without loading it: its config, and its tensors one at a time.

Everything that identifies a checkpoint is computed here, over contents rather than over files, so that the same weights
in other shards have the same digest. Nothing is ever unpickled.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quantize.errors import QuantizeError

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"


REMAP_BYTES = 64 * 2**20


@dataclass
class MappedFile:
    """The one file that is mapped now. The pages read of a mapping count as this process's memory until it is closed;
    so only one is open, and it is opened anew after every REMAP_BYTES: else memory would grow with the checkpoint."""

    path: Path | None = None
    handle: Any = None
    read_bytes: int = 0

    def at(self, path: Path) -> Any:
        if path != self.path or self.read_bytes > REMAP_BYTES:
            with readable(path):
                self.handle = safe_open(path, framework="pt")
            self.path, self.read_bytes = path, 0
        return self.handle


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. `files` maps each tensor to the safetensors file that holds it."""

    path: Path
    config: dict[str, Any]
    files: Mapping[str, Path]
    _mapped: MappedFile = field(default_factory=MappedFile, repr=False, compare=False)

    @classmethod
    def open(cls, path: Path | str, *, quantized_ok: bool = True) -> "Checkpoint":
        """Raises QuantizeError, one line, for a path that does not exist, is not a checkpoint, holds a truncated file
        or lacks one, and with `quantized_ok=False` for one that is quantized already."""
        path = Path(path)
        if not path.exists():
            raise QuantizeError(f"{path}: no such path")
        if not path.is_dir():
            raise QuantizeError(f"{path}: not a checkpoint; expected a folder with {CONFIG} and safetensors files")
        config = read_json(path / CONFIG, "not a checkpoint")
        if not isinstance(config.get("quantization_config") or {}, dict):
            raise QuantizeError(f"{path / CONFIG}: quantization_config is no JSON object; fetch the checkpoint again")
        if not quantized_ok and "quantization_config" in config:
            method = (config["quantization_config"] or {}).get("quant_method", "an unnamed method")
            raise already_quantized(path, method)
        files = tensor_files(path)
        if not quantized_ok and any(name.endswith(".qweight") for name in files):
            raise already_quantized(path, "gptq or awq")
        return cls(path, config, files)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(sorted(self.files))

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor as a view of its mapped file; it stays valid, and the mapping closes with the last one."""
        if name not in self.files:
            raise QuantizeError(f"{self.path}: has no tensor {name}")
        file = self.files[name]
        try:
            tensor: torch.Tensor = self._mapped.at(file).get_tensor(name)
        except (SafetensorError, OSError) as failure:
            raise QuantizeError(f"{file}: cannot read {name} ({one_line(failure)}); fetch it again") from None
        self._mapped.read_bytes += tensor.nbytes
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._mapped.at(self.files[name]).get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As safetensors names it: F32, BF16, I8, ..."""
        return str(self._mapped.at(self.files[name]).get_slice(name).get_dtype())

    def weights_digest(self, visit: Callable[[str, torch.Tensor], None] | None = None) -> str:
        """sha256 over all tensors by name: name, dtype, shape, bytes. `visit` sees each tensor on the way, so that a
        check of the values does not read the disk twice."""
        digest = hashlib.sha256()
        for name in self.tensor_names:
            tensor = self.tensor(name)
            if visit is not None:
                visit(name, tensor)
            digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def tokenizer_digest(self) -> str:
        """sha256 over the tokenizer's files; the chat template is left out, it has its own."""
        digest = hashlib.sha256()
        for name in TOKENIZER_FILES:
            if (self.path / name).is_file():
                digest.update(name.encode() + b"\0" + (self.path / name).read_bytes())
        settings = self._tokenizer_config()
        settings.pop("chat_template", None)
        digest.update(json.dumps(settings, sort_keys=True).encode())
        return digest.hexdigest()

    def chat_template(self) -> str | None:
        """The template's text, from its own file or from the tokenizer's settings."""
        file = self.path / TEMPLATE
        if file.is_file():
            try:
                return file.read_text(encoding="utf-8")
            except UnicodeDecodeError as failure:
                raise QuantizeError(f"{file}: not UTF-8 ({one_line(failure)}); fetch it again") from None
        template = self._tokenizer_config().get("chat_template")
        return template if template is None or isinstance(template, str) else json.dumps(template, sort_keys=True)

    def chat_template_digest(self) -> str | None:
        template = self.chat_template()
        return None if template is None else hashlib.sha256(template.encode()).hexdigest()

    def generation_settings(self) -> dict[str, Any]:
        """What generation_config.json says, the ids that end a text among it; empty without one."""
        file = self.path / GENERATION_CONFIG
        return read_json(file, "broken generation settings") if file.is_file() else {}

    def settings(self, file_name: str) -> dict[str, Any]:
        """A JSON object beside the weights; empty without the file."""
        file = self.path / file_name
        return read_json(file, "broken settings") if file.is_file() else {}

    def content_digest(self) -> str:
        """sha256 over all that decides what the model answers: weights, config, tokenizer, chat template, generation
        settings. A result measured on one folder holds for every folder with the same digest, and for no other."""
        content = {
            "weights": self.weights_digest(),
            "config": {name: value for name, value in self.config.items() if not name.startswith("_")},
            "tokenizer": self.tokenizer_digest(),
            "chat_template": self.chat_template_digest(),
            "generation": self.generation_settings(),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def bytes(self) -> int:
        """Size of the weight files on disk."""
        return sum(file.stat().st_size for file in set(self.files.values()))

    def _tokenizer_config(self) -> dict[str, Any]:
        file = self.path / TOKENIZER_CONFIG
        return read_json(file, "broken tokenizer settings") if file.is_file() else {}


def already_quantized(path: Path, method: object) -> QuantizeError:
    return QuantizeError(f"{path}: is quantized already ({method}); quantize the original checkpoint instead")


def tensor_files(path: Path) -> dict[str, Path]:
    """Which file holds which tensor. Opens every file once, which is what finds a truncated one."""
    promised = index_of(path)
    if promised:
        names = sorted(set(promised.values()))
    else:
        names = [SINGLE] if (path / SINGLE).is_file() else sorted(file.name for file in path.glob("*.safetensors"))
    if not names:
        pickled = next((file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern)), None)
        remedy = f"only {pickled}, and pickled weights are never read: convert them" if pickled else "fetch it again"
        raise QuantizeError(f"{path}: not a checkpoint, it has no safetensors file; {remedy}")
    files: dict[str, Path] = {}
    for name in names:
        file = path / name
        if not file.is_file():
            raise QuantizeError(f"{file}: missing, though {INDEX} names it; fetch the checkpoint again")
        with readable(file), safe_open(file, framework="pt") as handle:
            files.update(dict.fromkeys(handle.keys(), file))
    lost = sorted(promised.keys() - files.keys())
    if lost:
        raise QuantizeError(
            f"{path / promised[lost[0]]}: lacks {lost[0]}, which {INDEX} promises; fetch the checkpoint again"
        )
    return files


def index_of(path: Path) -> dict[str, str]:
    """The file's name of each tensor, as the index says; empty without an index."""
    if not (path / INDEX).is_file():
        return {}
    weight_map = read_json(path / INDEX, "broken index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise QuantizeError(f"{path / INDEX}: has no weight_map; fetch the checkpoint again")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            raise QuantizeError(f"{path / INDEX}: names {file!r}, which is no file of this folder; fetch it again")
    return weight_map


@contextmanager
def readable(file: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as failure:
        raise QuantizeError(f"{file}: truncated or broken ({one_line(failure)}); fetch it again") from None


def read_json(file: Path, otherwise: str) -> dict[str, Any]:
    """A JSON object from a file; `otherwise` says what it means that there is none."""
    if not file.is_file():
        raise QuantizeError(f"{file.parent}: {otherwise}, it has no {file.name}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        # Half a character, as in "\\ud800", can be neither shown nor written on.
        json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as failure:
        # A number of thousands of digits is no JSONDecodeError, but a ValueError like it.
        raise QuantizeError(f"{file}: {otherwise}, not valid JSON ({one_line(failure)})") from None
    if not isinstance(content, dict):
        raise QuantizeError(f"{file}: {otherwise}, expected a JSON object")
    return content


def refuse_nonfinite(checkpoint: Checkpoint) -> Callable[[str, torch.Tensor], None]:
    """A visitor for `weights_digest` that names the first tensor with NaN or inf."""

    def visit(name: str, tensor: torch.Tensor) -> None:
        if tensor.is_floating_point() and tensor.numel() and not all_finite(tensor):
            what = "NaN" if torch.isnan(tensor).any() else "inf"
            raise QuantizeError(
                f"{checkpoint.files[name]}: {name} holds {what}; such weights cannot be quantized, "
                "repair or fetch them again"
            )

    return visit


def all_finite(tensor: torch.Tensor) -> bool:
    """The extremes show NaN and inf alike, and are found much faster than by asking every value."""
    return bool(torch.isfinite(torch.stack(tensor.aminmax())).all())


def whole_numbers(file: Path, name: str, dtype: object) -> QuantizeError:
    """The error for integers where a model wants weights."""
    return QuantizeError(f"{file}: {name} holds whole numbers ({dtype}), not weights; fetch the checkpoint again")


def one_line(failure: Exception) -> str:
    return " ".join(str(failure).split())
