"""The tiny Llama in transformers alone, and behind lm-eval's interface."""

from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from eval.engine.engine import Engine
from eval.quality.lm_eval_adapter import EngineLM


@pytest.fixture(scope="session")
def tiny_reference(tiny_checkpoint: Path) -> LlamaForCausalLM:
    """The same model in transformers alone."""
    return LlamaForCausalLM.from_pretrained(tiny_checkpoint).eval()


@pytest.fixture
def tiny_lm(tiny_checkpoint: Path) -> EngineLM:
    return EngineLM(Engine.from_checkpoint(tiny_checkpoint))
