"""A limit is drawn where it lies on the axis of what it limits, and nowhere else."""

import pytest

from registry.headline import check_of, limit_as_delta


@pytest.mark.parametrize(
    ("kind", "limit_kind", "limit", "drawn"),
    [
        ("accuracy", "margin", 0.03, -0.03),
        ("perplexity", "margin", 0.03, 0.03),
        ("perplexity", "max_ratio", 1.1, pytest.approx(0.1)),
        ("accuracy", "min", 0.5, None),
        ("perplexity", "max", 20.0, None),
        ("accuracy", "finding", None, None),
    ],
)
def test_only_a_limit_on_the_change_is_on_the_axis(
    kind: str, limit_kind: str, limit: float | None, drawn: float | None
) -> None:
    assert limit_as_delta({"limit_kind": limit_kind, "limit": limit}, kind) == drawn


def test_the_check_on_the_change_speaks_for_a_metric_with_several() -> None:
    checks = [
        {"name": "quality.a.acc:min", "limit_kind": "min"},
        {"name": "quality.a.acc:margin", "limit_kind": "margin"},
    ]
    assert check_of({"checks": checks}, "quality.a.acc")["limit_kind"] == "margin"
    assert check_of({"checks": checks}, "quality.b.acc") == {}
