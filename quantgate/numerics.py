"""What a variant has beside its weights: what keys and values are kept in, and how quantized weights meet their inputs.

The one idea: these decide answers as much as the weights do, so they go as one value from a command or a campaign file
into the engine, the cache's folders and the names that people read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from eval.engine.config import EngineConfig, compute_named

AUTO = "auto"
"""What the model, or the checkpoint, has by itself."""


@dataclass(frozen=True)
class Numerics:
    """Raises EvalError, one line, for an unknown name."""

    kv_dtype: str = AUTO
    compute: str = AUTO

    def __post_init__(self) -> None:
        EngineConfig(kv_dtype=self.kv_dtype)
        compute_named(self.compute)

    @classmethod
    def of_mapping(cls, settings: Mapping[str, Any]) -> Numerics:
        """From those keys of a mapping that are fields; the others are somebody else's."""
        return cls(**{field.name: str(settings[field.name]) for field in fields(cls) if field.name in settings})

    def engine_options(self) -> dict[str, str]:
        """None of them where the model's own serves, so that a result does not depend on its being said."""
        return {name: value for name, value in asdict(self).items() if value != AUTO}

    def folder_suffix(self) -> str:
        """Keeps variants of the same weights out of each other's folders."""
        kv = "" if self.kv_dtype == AUTO else f"-kv-{self.kv_dtype}"
        return kv if self.compute == AUTO else f"{kv}-{self.compute}"

    def said(self) -> str:
        """As a variant's name goes on, " with a8 and int8 KV"; empty where there is nothing to say."""
        parts = [] if self.compute == AUTO else [self.compute]
        parts += [] if self.kv_dtype == AUTO else [f"{self.kv_dtype} KV"]
        return f" with {' and '.join(parts)}" if parts else ""


OWN = Numerics()
"""The baseline's."""
