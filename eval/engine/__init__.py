"""A continuous-batching engine over a paged KV cache: `Engine.from_checkpoint`, `generate`, `score`, `step`."""

from eval.engine.config import EngineConfig
from eval.engine.engine import Engine
from eval.engine.outcomes import Completion, Score, StepOutput
from eval.engine.request import SamplingParams, TokenLogprobs
from eval.errors import EvalError

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "EvalError",
    "SamplingParams",
    "Score",
    "StepOutput",
    "TokenLogprobs",
]
