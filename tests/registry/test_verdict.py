"""The verdict's logic as claims, on plain values."""

import pytest

from registry.policy import Group, Policy, Rule
from registry.verdict import Check, Interval, Measurement, decide


def accuracy(name: str, value: float, low: float, high: float, **more: object) -> Measurement:
    return Measurement(f"quality.{name}.acc", 0.5 + value, 0.5, delta=Interval(value, low, high), samples=500, **more)


def ratio(name: str, value: float, low: float, high: float) -> Measurement:
    return Measurement(name, value, 1.0, ratio=Interval(value, low, high))


MARGIN = Policy(rules=(Rule(metric="quality.*.acc", margin=0.02),))
SPEED = Policy(rules=(Rule(metric="speed.*", min_ratio=1.0),))


def test_an_interval_that_clears_the_margin_passes() -> None:
    assert decide(MARGIN, [accuracy("a", -0.005, -0.015, 0.005)]).verdict == "pass"


def test_an_equal_model_passes_although_it_is_not_better() -> None:
    assert decide(MARGIN, [accuracy("a", 0.0, -0.01, 0.01)]).verdict == "pass"


def test_an_interval_that_breaks_the_margin_fails_with_its_numbers() -> None:
    verdict = decide(MARGIN, [accuracy("grammar", -0.06, -0.08, -0.04)])
    assert verdict.verdict == "fail"
    for part in ("quality.grammar.acc", "-6.0 points", "-8.0 to -4.0", "margin of 2 points", "500 samples"):
        assert part in verdict.reasons[0]


def test_an_interval_across_the_margin_is_inconclusive_and_says_how_many_samples_decide() -> None:
    verdict = decide(MARGIN, [accuracy("a", -0.015, -0.035, 0.005, samples_needed=lambda margin: round(80 / margin))])
    assert verdict.verdict == "inconclusive"
    assert "an equal candidate would need about 4,000" in verdict.reasons[0]


def test_one_critical_failure_fails_whatever_the_rest_says() -> None:
    verdict = decide(
        MARGIN, [accuracy("a", 0.0, -0.01, 0.01), accuracy("b", -0.2, -0.25, -0.15), accuracy("c", -0.02, -0.1, 0.06)]
    )
    assert verdict.verdict == "fail"
    assert "quality.b.acc" in verdict.reasons[0]
    assert verdict.reasons[1] == "Undecided besides: quality.c.acc"


def test_an_advisory_failure_is_told_and_does_not_decide() -> None:
    policy = Policy(
        rules=(Rule(metric="quality.*.acc", margin=0.02), Rule(metric="speed.*", min_ratio=1.0, critical=False))
    )
    verdict = decide(policy, [accuracy("a", 0.0, -0.01, 0.01), ratio("speed.chat.x", 0.5, 0.45, 0.55)])
    assert verdict.verdict == "pass"
    assert any(reason.startswith("Advisory: speed.chat.x") for reason in verdict.reasons)


def test_a_limit_on_what_was_not_measured_is_inconclusive() -> None:
    policy = Policy(
        rules=(Rule(metric="quality.*.acc", margin=0.02), Rule(metric="speed.*.ttft_ms.p95", max_ratio=1.1))
    )
    verdict = decide(policy, [accuracy("a", 0.0, -0.01, 0.01)])
    assert verdict.verdict == "inconclusive"
    (reason,) = verdict.reasons
    assert reason.startswith("Nodata: the policy limits 'speed.*.ttft_ms.p95' (max_ratio 1.1)")


def test_an_unpaired_speed_cannot_pass() -> None:
    verdict = decide(SPEED, [Measurement("speed.chat.decode", 120.0)])
    assert verdict.verdict == "inconclusive"
    assert "(not measured in pairs" in verdict.reasons[0]


def test_nothing_critical_passes_nothing() -> None:
    policy = Policy(rules=(Rule(metric="speed.*", min_ratio=1.0, critical=False),))
    assert decide(policy, [ratio("speed.x", 2.0, 1.9, 2.1)]).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(1.0, 1.2, "pass"), (0.8, 0.99, "fail"), (0.95, 1.05, "inconclusive")]
)
def test_ratio_limits_are_held_against_the_interval(low: float, high: float, expected: str) -> None:
    assert decide(SPEED, [ratio("speed.x", (low + high) / 2, low, high)]).verdict == expected


def test_memory_is_exact_so_it_is_never_inconclusive() -> None:
    policy = Policy(rules=(Rule(metric="memory.weights_bytes", max_ratio=0.9),))
    assert decide(policy, [ratio("memory.weights_bytes", 0.9, 0.9, 0.9)]).verdict == "pass"
    assert decide(policy, [ratio("memory.weights_bytes", 0.91, 0.91, 0.91)]).verdict == "fail"


def test_a_rule_with_two_limits_makes_two_checks() -> None:
    policy = Policy(rules=(Rule(metric="quality.*.acc", margin=0.02, min=0.6),))
    verdict = decide(policy, [accuracy("a", 0.0, -0.01, 0.01)])
    assert [check.name for check in verdict.checks] == ["quality.a.acc:margin", "quality.a.acc:min"]
    assert verdict.verdict == "fail"


def test_a_break_by_chance_among_many_tasks_is_inconclusive() -> None:
    barely = accuracy("barely", -0.04, -0.0595, -0.0205)
    assert decide(MARGIN, [barely]).verdict == "fail"
    others = [accuracy(f"t{i}", 0.0, -0.015, 0.015) for i in range(19)]
    verdict = decide(MARGIN, [*others, barely])
    assert verdict.verdict == "inconclusive"
    assert "among 20 quality checks" in verdict.reasons[0]


def test_a_clear_break_among_many_tasks_still_fails() -> None:
    others = [accuracy(f"t{i}", 0.0, -0.015, 0.015) for i in range(19)]
    verdict = decide(MARGIN, [*others, accuracy("broken", -0.10, -0.12, -0.08)])
    assert verdict.verdict == "fail"


def test_passing_is_not_made_harder_by_more_tasks() -> None:
    assert decide(MARGIN, [accuracy(f"t{i}", -0.01, -0.0199, -0.0001) for i in range(50)]).verdict == "pass"


@pytest.mark.parametrize(("need", "expected"), [("all", "fail"), ("any", "pass"), (2, "pass"), (3, "fail")])
def test_a_group_decides_together(need: str | int, expected: str) -> None:
    policy = Policy(rules=(Rule(metric="quality.*.acc", margin=0.02, group="g"),), groups={"g": Group(need=need)})
    results = [accuracy("a", 0.0, -0.01, 0.01), accuracy("b", 0.0, -0.01, 0.01), accuracy("c", -0.2, -0.25, -0.15)]
    assert decide(policy, results).verdict == expected


def test_an_integrity_finding_stops_a_pass() -> None:
    finding = Check(
        "integrity.padding", "inconclusive", True, "integrity", None, None, None, None, "padding side differs"
    )
    verdict = decide(MARGIN, [accuracy("a", 0.0, -0.01, 0.01)], [finding])
    assert verdict.verdict == "inconclusive"
    assert verdict.reasons == ("padding side differs",)
