"""Where quantgate keeps what it can make again: fetched models, results of checkpoints measured by hand.

One folder, `$QUANTGATE_HOME` or `~/.cache/quantgate`; deleting it loses time and nothing else.
"""

import os
from pathlib import Path


def home() -> Path:
    """The cache folder; it need not exist yet."""
    return Path(os.environ.get("QUANTGATE_HOME", Path.home() / ".cache" / "quantgate")).expanduser()


def models() -> Path:
    """Checkpoints that were fetched or converted."""
    return home() / "models"


def results() -> Path:
    """Quality and speed results of checkpoints given by path, one folder per weights digest."""
    return home() / "results"
