"""Which variant bears which alias after which acts, on plain values."""

import pytest

from registry.mirror import aliases_after


@pytest.mark.parametrize(
    ("acts", "expected"),
    [
        ([], {"champion": "base"}),
        ([("a", "draft"), ("a", "evaluated")], {"champion": "base", "candidate": "a"}),
        ([("a", "canary"), ("a", "promoted")], {"champion": "a", "previous": "base"}),
        ([("a", "promoted"), ("b", "canary")], {"champion": "a", "previous": "base", "candidate": "b"}),
        ([("a", "promoted"), ("b", "promoted")], {"champion": "b", "previous": "a"}),
        ([("a", "promoted"), ("b", "promoted"), ("b", "rolled_back")], {"champion": "a", "previous": "base"}),
        ([("a", "promoted"), ("b", "promoted"), ("a", "rolled_back")], {"champion": "b", "previous": "base"}),
        ([("a", "promoted"), ("a", "rolled_back")], {"champion": "base"}),
        ([("a", "evaluated"), ("b", "evaluated"), ("a", "rejected")], {"champion": "base", "candidate": "b"}),
        ([("a", "evaluated"), ("a", "rejected")], {"champion": "base"}),
    ],
)
def test_aliases_follow_the_ledger(acts: list[tuple[str, str]], expected: dict[str, str]) -> None:
    assert aliases_after("base", acts) == expected
