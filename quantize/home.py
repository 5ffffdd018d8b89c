"""Where this project keeps what it can make again: `$QUANTGATE_HOME` or `~/.cache/quantgate`.

Deleting the folder loses time and nothing else.
"""

import os
from pathlib import Path


def home() -> Path:
    """The cache folder; it need not exist yet."""
    return Path(os.environ.get("QUANTGATE_HOME", Path.home() / ".cache" / "quantgate")).expanduser()
