"""Quantizes a checkpoint layer by layer from disk, and loads the result with kernels that fit the machine."""

from typing import TYPE_CHECKING, Any

from quantize.checkpoint import Checkpoint
from quantize.errors import QuantizeError
from quantize.manifest import Manifest
from quantize.recipe import Recipe

if TYPE_CHECKING:
    from quantize.load import load_model
    from quantize.pipeline import quantize_checkpoint

__all__ = ["Checkpoint", "Manifest", "QuantizeError", "Recipe", "load_model", "quantize_checkpoint"]


def __getattr__(name: str) -> Any:
    # transformers takes seconds to import; who only reads a manifest should not wait for it.
    if name == "quantize_checkpoint":
        from quantize.pipeline import quantize_checkpoint

        return quantize_checkpoint
    if name == "load_model":
        from quantize.load import load_model

        return load_model
    raise AttributeError(f"module 'quantize' has no attribute {name!r}")
