"""A block's planned traffic: every prompt, length, arrival and priority, fixed before any engine runs.

Plain data, so that it crosses the pipe to a worker; `eval.speed.plan` makes it from a workload.
"""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class PlannedRequest:
    """One request to come. `arrival_s` counts from the block's start and is 0 where concurrency decides."""

    request_id: str
    arrival_s: float
    prompt_token_ids: list[int]
    output_tokens: int
    priority: int
    warmup: bool
    shared_prefix_tokens: int


@dataclass(frozen=True)
class Traffic:
    """A block: `concurrency` requests in flight, or (None) each at its own arrival time."""

    workload: str
    repeat: int
    concurrency: int | None
    requests: list[PlannedRequest]

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_mapping(mapping: dict[str, Any]) -> "Traffic":
        return Traffic(**{**mapping, "requests": [PlannedRequest(**request) for request in mapping["requests"]]})
