"""The verdict: a policy held against what was measured. Pure: no files, no MLflow, no clock.

A check passes when its whole interval keeps the limit, fails when its whole interval breaks it, and is inconclusive
otherwise. Any critical failure fails the candidate; else any critical check without a decision makes the verdict
inconclusive; advisory checks are listed and never decide.

How Holm enters. Passing needs *every* critical check to clear its limit, an intersection-union test, whose error does
not grow with the number of tasks: passing intervals stay uncorrected. Failing needs only *one* task to break its limit,
so with many tasks one will break it by chance. A quality check therefore fails only if its one-sided p-value against
its own limit, Holm-corrected over all critical quality checks of the verdict (the family), stays below the one-sided
level (1 - confidence) / 2. A task that breaks its limit alone but not in the family is inconclusive, and says so.
The p-value is read off the interval: normal, with the half-width that faces the limit, on the log scale for ratios.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

from eval.quality.proportions import holm
from registry.policy import Policy, Rule

Status = Literal["pass", "fail", "inconclusive", "nodata"]
QUALITY_FAMILY = "quality."


@dataclass(frozen=True)
class Interval:
    """A point estimate with its confidence limits; an exact number has low == value == high."""

    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Interval:
        return cls(value, value, value)


@dataclass(frozen=True)
class Measurement:
    """One metric of the candidate beside its baseline.

    delta: candidate - baseline, in the metric's unit; of a perplexity relative, ratio - 1. ratio: candidate / baseline.
    None: not measured in pairs.
    samples_needed: for a margin (a ratio limit minus one), how many samples would decide for an equal candidate.
    """

    name: str
    candidate: float
    baseline: float | None = None
    delta: Interval | None = None
    ratio: Interval | None = None
    higher_is_better: bool = True
    samples: int | None = None
    samples_needed: Callable[[float], int] | None = None


@dataclass(frozen=True)
class Check:
    """One limit held against one measurement. value, low, high and limit share a unit (delta, ratio or absolute).

    p_value: one-sided p of "the limit is kept". p_holm: the same, corrected over the family.
    """

    name: str
    status: Status
    critical: bool
    limit_kind: str
    limit: float | None
    value: float | None
    low: float | None
    high: float | None
    reason: str
    group: str | None = None
    p_value: float | None = None
    p_holm: float | None = None
    samples: int | None = None
    samples_needed: int | None = None

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Verdict:
    """`pass`, `fail` or `inconclusive`, the reasons a person reads, and every check behind them."""

    verdict: Literal["pass", "fail", "inconclusive"]
    reasons: tuple[str, ...]
    checks: tuple[Check, ...]


def decide(policy: Policy, measurements: Sequence[Measurement], findings: Iterable[Check] = ()) -> Verdict:
    """Hold `measurements` against `policy`; `findings` are checks made elsewhere (integrity) and count too."""
    checks: list[Check] = list(findings)
    matched: set[int] = set()
    for measurement in measurements:
        rule = policy.owner(measurement.name)
        if rule is None:
            continue
        matched.add(policy.rules.index(rule))
        checks += [_check(rule, kind, limit, measurement, policy) for kind, limit in rule.limits()]
    checks = _corrected_over_the_family(checks, policy.confidence)
    checks += [_nodata(rule) for index, rule in enumerate(policy.rules) if index not in matched]
    checks += _group_checks(policy, checks)
    return _verdict(policy, checks)


def _check(rule: Rule, kind: str, limit: float, measurement: Measurement, policy: Policy) -> Check:
    interval, unit = _interval_for(kind, measurement)
    several = len(rule.limits()) > 1
    check = Check(
        name=f"{measurement.name}:{kind}" if several else measurement.name,
        status="nodata",
        critical=rule.critical and rule.group is None,
        limit_kind=kind,
        limit=limit,
        value=None,
        low=None,
        high=None,
        reason="",
        group=rule.group,
        samples=measurement.samples,
    )
    if interval is None:
        missing = f"no {unit} to the baseline with an interval (not measured in pairs, or too few samples)"
        return replace(check, reason=f"{measurement.name}: {missing}")
    # From here on "worse" is upwards: low and high are how far the ends lie beyond the limit.
    low, value, high = _beyond(kind, limit, interval, measurement.higher_is_better)
    status: Status = "pass" if high <= 0 else "fail" if low > 0 else "inconclusive"
    p_value = break_p_value(value, value - low, policy.confidence)
    needed = None
    margin = limit if kind == "margin" else limit - 1 if kind == "max_ratio" else 0.0
    if status == "inconclusive" and margin > 0 and measurement.samples_needed is not None:
        needed = measurement.samples_needed(margin)
    check = replace(
        check,
        status=status,
        value=interval.value,
        low=interval.low,
        high=interval.high,
        p_value=p_value,
        samples_needed=needed,
    )
    return replace(check, reason=_reason(check, measurement, policy.confidence))


def _interval_for(kind: str, measurement: Measurement) -> tuple[Interval | None, str]:
    if kind == "margin":
        return measurement.delta, "difference"
    if kind in ("max_ratio", "min_ratio"):
        return measurement.ratio, "ratio"
    return Interval.exact(measurement.candidate), "value"


def _beyond(kind: str, limit: float, interval: Interval, higher_is_better: bool) -> tuple[float, float, float]:
    """(low, value, high) of how far the measured interval lies beyond the limit, on the log scale for ratios."""
    low, value, high = interval.low, interval.value, interval.high
    if kind in ("max_ratio", "min_ratio"):
        low, value, high, limit = (math.log(max(ratio, 1e-300)) for ratio in (low, value, high, limit))
    if kind == "margin" and higher_is_better:
        return -limit - high, -limit - value, -limit - low
    if kind in ("min", "min_ratio"):
        return limit - high, limit - value, limit - low
    return low - limit, value - limit, high - limit


def break_p_value(excess: float, half_width: float, confidence: float) -> float:
    """One-sided p of "the limit is kept".

    excess: how far the estimate lies beyond the limit (negative: inside). half_width: of the interval, on the side that
    faces the limit. A width of zero (an exact number) gives 0 or 1.
    """
    if half_width <= 0:
        return 0.0 if excess > 0 else 1.0
    z_reported = NormalDist().inv_cdf((1 + confidence) / 2)
    return 1 - NormalDist().cdf(excess * z_reported / half_width)


def _corrected_over_the_family(checks: list[Check], confidence: float) -> list[Check]:
    family = [
        (index, check.p_value)
        for index, check in enumerate(checks)
        if check.p_value is not None and check.name.startswith(QUALITY_FAMILY) and (check.critical or check.group)
    ]
    corrected = list(checks)
    level = (1 - confidence) / 2
    for (index, _), p_holm in zip(family, holm([p for _, p in family]), strict=True):
        check = replace(checks[index], p_holm=p_holm)
        if check.status == "fail" and p_holm >= level:
            among = f"not among {len(family)} quality checks (Holm {_told(p_holm)}, level {level:.3g})"
            note = f"{check.reason}; it breaks the limit alone, but {among}"
            check = replace(check, status="inconclusive", reason=note)
        elif check.status == "fail":
            check = replace(
                check, reason=f"{check.reason}; holds among {len(family)} quality checks (Holm {_told(p_holm)})"
            )
        corrected[index] = check
    return corrected


def _told(p_value: float) -> str:
    return "p < 0.0001" if p_value < 1e-4 else f"p = {p_value:.2g}"


def _nodata(rule: Rule) -> Check:
    kind, limit = rule.limits()[0]
    reason = (
        f"Nodata: the policy limits '{rule.metric}' ({kind} {limit:g}), and nothing that was measured has such a name"
    )
    return Check(
        rule.metric, "nodata", rule.critical and rule.group is None, kind, limit, None, None, None, reason, rule.group
    )


def _group_checks(policy: Policy, checks: Sequence[Check]) -> list[Check]:
    made = []
    for name, group in policy.groups.items():
        members = [check for check in checks if check.group == name]
        needed = group.needed(len(members))
        passed = sum(check.status == "pass" for check in members)
        failed = sum(check.status == "fail" for check in members)
        status: Status
        if passed >= needed:
            status = "pass"
        elif failed > len(members) - needed:
            status = "fail"
        else:
            status = "inconclusive"
        reason = f"group {name}: {passed} of {len(members)} checks pass and {failed} fail, {needed} must pass"
        against = [check.reason for check in members if check.status != "pass"]
        if status != "pass" and against:
            reason += f" ({'; '.join(against)})"
        made.append(
            Check(f"group.{name}", status, group.critical, "group", float(needed), float(passed), None, None, reason)
        )
    return made


def _verdict(policy: Policy, checks: Sequence[Check]) -> Verdict:
    critical = [check for check in checks if check.critical]
    failed = [check for check in critical if check.status == "fail"]
    undecided = [check for check in critical if check.status in ("inconclusive", "nodata")]
    advice = [
        f"Advisory: {check.reason}"
        for check in checks
        if not check.critical and not check.group and check.status == "fail"
    ]
    if failed:
        reasons = [check.reason for check in failed]
        if undecided:
            reasons.append(f"Undecided besides: {', '.join(check.name for check in undecided)}")
        return Verdict("fail", (*reasons, *advice), tuple(checks))
    if undecided:
        return Verdict("inconclusive", (*[check.reason for check in undecided], *advice), tuple(checks))
    if not critical:
        reason = f"policy {policy.name} has no critical check, so nothing can pass"
        return Verdict("inconclusive", (reason, *advice), tuple(checks))
    summary = f"all {len(critical)} critical checks keep their limits at {policy.confidence * 100:g} % confidence"
    return Verdict("pass", (summary, *advice), tuple(checks))


def _reason(check: Check, measurement: Measurement, confidence: float) -> str:
    """One sentence with the number, its interval, the limit and what follows."""
    assert check.value is not None
    assert check.low is not None
    assert check.high is not None
    assert check.limit is not None
    outcome = {"pass": "keeps", "fail": "breaks", "inconclusive": "may or may not keep"}[check.status]
    if check.limit_kind == "margin":
        change = f"{check.value * 100:+.1f} points ({check.low * 100:+.1f} to {check.high * 100:+.1f})"
        limit = f"the margin of {check.limit * 100:g} points"
        if not measurement.higher_is_better:
            change = f"{check.value:+.3g} ({check.low:+.3g} to {check.high:+.3g})"
            limit = f"the margin of {check.limit:g}"
    elif check.limit_kind in ("max_ratio", "min_ratio"):
        change = f"{check.value:.3f}x the baseline"
        if check.low != check.high:
            change += f" ({check.low:.3f} to {check.high:.3f})"
        limit = f"the {'upper' if check.limit_kind == 'max_ratio' else 'lower'} limit {check.limit:g}x"
    else:
        change = f"{check.value:g}"
        limit = f"the {'upper' if check.limit_kind == 'max' else 'lower'} limit {check.limit:g}"
    sentence = f"{measurement.name}: {change} {outcome} {limit}"
    if check.low != check.high:
        sentence += f" at {confidence * 100:g} %"
    if measurement.samples:
        sentence += f", {measurement.samples:,} samples"
    if check.samples_needed is not None and measurement.samples and check.samples_needed > measurement.samples:
        sentence += f"; an equal candidate would need about {check.samples_needed:,}"
    return sentence
