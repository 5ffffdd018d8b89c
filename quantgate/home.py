"""What the front door keeps in the cache folder: fetched models, results of checkpoints measured by hand."""

from pathlib import Path

from quantize.home import home

__all__ = ["home", "models", "results"]


def models() -> Path:
    """Checkpoints that were fetched or converted."""
    return home() / "models"


def results() -> Path:
    """Quality and speed results of checkpoints given by path, one folder per content digest."""
    return home() / "results"
