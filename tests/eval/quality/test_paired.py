"""Comparisons of two sets of samples: what they report, what they refuse, what they decide."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eval.errors import EvalError
from eval.quality.paired import compare_tasks, flips, non_inferiority
from eval.quality.samples import Sample, read_samples, write_samples


def _samples(scores: list[float], task: str = "toy", metric: str = "acc", sources: int | None = None) -> list[Sample]:
    return [
        Sample(
            task=task,
            metric=metric,
            doc_id=index,
            document_hash=f"d{index}",
            prompt_hash=f"p{index}",
            target_hash=f"t{index}",
            prompt=f"prompt {index}",
            target="yes",
            answer="yes" if score else "no",
            score=float(score),
            logprobs=(-1.0, -2.0),
            source=str(index if sources is None else index % sources),
            tokens=1000 if metric == "nll" else 3,
        )
        for index, score in enumerate(scores)
    ]


def test_difference_flips_and_tests_come_from_the_disagreements_alone() -> None:
    before = _samples([1] * 60 + [0] * 40)
    after = _samples([0] * 7 + [1] * 53 + [1] + [0] * 39)
    (found,) = compare_tasks(before, after)
    assert (found.gained, found.lost, found.samples) == (1, 7, 100)
    assert found.delta == pytest.approx(-0.06)
    assert found.mcnemar_p == pytest.approx(0.0703, abs=1e-4)
    assert found.mcnemar_p_holm == found.mcnemar_p
    assert found.low < -0.06 < found.high
    directions = [flip.direction for flip in flips(before, after)]
    assert directions == ["lost"] * 7 + ["gained"]


def test_order_of_the_candidates_samples_does_not_matter() -> None:
    before, after = _samples([1, 0, 1, 1]), _samples([1, 1, 1, 0])
    assert compare_tasks(before, after) == compare_tasks(before, after[::-1])


@pytest.mark.parametrize("field", ["document_hash", "prompt_hash", "target_hash"])
def test_a_sample_with_another_hash_is_an_error_that_names_it(field: str) -> None:
    before = _samples([1, 0, 1])
    after = [before[0], replace(before[1], **{field: "other"}), before[2]]
    with pytest.raises(EvalError, match=f"toy sample 1: {field}"):
        compare_tasks(before, after)


def test_samples_on_one_side_only_are_an_error() -> None:
    with pytest.raises(EvalError, match="only the baseline"):
        compare_tasks(_samples([1, 0]), _samples([1]))
    with pytest.raises(EvalError, match="only the candidate"):
        compare_tasks(_samples([1]), _samples([1, 0]))
    with pytest.raises(EvalError, match="no samples"):
        compare_tasks([], [])


def test_margin_decides_three_ways() -> None:
    before = _samples([1] * 500 + [0] * 300)
    (same,) = compare_tasks(before, before)
    (worse,) = compare_tasks(before, _samples([0] * 100 + [1] * 400 + [0] * 300))
    (unclear,) = compare_tasks(before, _samples([0] * 12 + [1] * 488 + [0] * 300))
    assert non_inferiority(same, 0.02) == "pass"
    assert non_inferiority(worse, 0.02) == "fail"
    assert non_inferiority(unclear, 0.02) == "inconclusive"
    with pytest.raises(EvalError, match="positive"):
        non_inferiority(same, 0.0)


def test_perplexity_is_compared_as_a_ratio_and_lower_is_better() -> None:
    rng = np.random.default_rng(1)
    base = list(3.0 + 0.3 * rng.standard_normal(20))
    before = _samples(base, "perplexity.x", "nll")
    after = _samples([value + 0.05 + 0.005 * noise for value, noise in zip(base, rng.standard_normal(20), strict=True)],
                     "perplexity.x", "nll")  # fmt: skip
    (found,) = compare_tasks(before, after)
    assert found.kind == "perplexity"
    assert found.baseline == pytest.approx(math.exp(np.mean(base)))
    assert found.ratio == pytest.approx(math.exp(0.05), rel=0.005)
    assert found.low < found.delta < found.high
    assert found.high - found.low < 0.01, "windows are paired, so their own spread must cancel"
    assert non_inferiority(found, 0.10) == "pass"
    assert non_inferiority(found, 0.01) == "fail"
    assert found == compare_tasks(before, after)[0], "the bootstrap is seeded"


def test_bootstrap_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(150):
        base = 3.0 + 0.3 * rng.standard_normal(20)
        after = base + 0.03 + 0.02 * rng.standard_normal(20)
        (found,) = compare_tasks(_samples(list(base), metric="nll"), _samples(list(after), metric="nll"))
        covered += found.low <= math.expm1(0.03) <= found.high
    assert 0.90 <= covered / 150 <= 0.99


def test_one_window_decides_nothing() -> None:
    (found,) = compare_tasks(_samples([3.0], metric="nll"), _samples([3.0], metric="nll"))
    assert non_inferiority(found, 0.5) == "inconclusive"
    assert math.isfinite(found.low)
    assert math.isfinite(found.high)
    assert math.isfinite(found.mde)


def test_questions_about_one_text_widen_the_interval() -> None:
    scores = [1] * 400
    worse = [0 if index % 100 < 5 else 1 for index in range(400)]
    (alone,) = compare_tasks(_samples(scores), _samples(worse))
    (clustered,) = compare_tasks(_samples(scores, sources=100), _samples(worse, sources=100))
    assert clustered.design_effect == pytest.approx(4.0, rel=0.05)
    assert clustered.high - clustered.low > 1.8 * (alone.high - alone.low)


@pytest.mark.parametrize("sources", [2, 3, 5, 10])
def test_few_sources_cover_the_truth_as_often_as_many(sources: int) -> None:
    rng = np.random.default_rng(4)
    covered = 0
    for _ in range(150):
        gain_share = np.clip(rng.normal(0.5, 0.4, sources), 0, 1)
        changes = (rng.random((40, sources)) < 0.2) * np.where(rng.random((40, sources)) < gain_share, 1, -1)
        before, after = (changes < 0).astype(float).ravel(), (changes > 0).astype(float).ravel()
        (found,) = compare_tasks(_samples(list(before), sources=sources), _samples(list(after), sources=sources))
        covered += found.low <= 0 <= found.high
    assert covered / 150 > 0.9


def test_answers_about_a_single_source_decide_nothing() -> None:
    same = _samples([1] * 400, sources=1)
    (found,) = compare_tasks(same, same)
    assert (found.low, found.high) == (-1.0, 1.0)
    assert non_inferiority(found, 0.5) == "inconclusive"
    assert math.isfinite(found.mde)


def test_scores_between_0_and_1_that_never_changed_still_leave_an_interval() -> None:
    few, many = (_samples([0.5] * count, metric="f1") for count in (3, 3000))
    assert non_inferiority(compare_tasks(few, few)[0], 0.02) == "inconclusive"
    assert non_inferiority(compare_tasks(many, many)[0], 0.02) == "pass"


def test_one_changed_score_does_not_rule_out_a_change_the_other_way() -> None:
    before = _samples([0.5] * 50, metric="f1")
    (found,) = compare_tasks(before, _samples([0.3] + [0.5] * 49, metric="f1"))
    assert found.low < found.delta < 0 < found.high


def test_a_score_of_which_less_is_better_is_judged_the_other_way_round() -> None:
    def toxic(scores: list[float]) -> list[Sample]:
        return [replace(sample, metric="toxicity", higher_is_better=False) for sample in _samples(scores)]

    before, worse = toxic([0] * 500), toxic([1] * 100 + [0] * 400)
    (found,) = compare_tasks(before, worse)
    assert (found.gained, found.lost, found.delta) == (0, 100, pytest.approx(0.2))
    assert non_inferiority(found, 0.05) == "fail"
    assert non_inferiority(compare_tasks(worse, before)[0], 0.05) == "pass"
    assert {flip.direction for flip in flips(before, worse)} == {"lost"}


def test_bits_per_byte_are_compared_as_bits() -> None:
    before = _samples([2.0] * 5, metric="bits_per_byte")
    (found,) = compare_tasks(before, _samples([2.2 + 0.01 * step for step in range(5)], metric="bits_per_byte"))
    assert found.baseline == pytest.approx(2.0 / math.log(2))
    assert found.candidate == pytest.approx(2.22 / math.log(2))
    assert found.ratio == pytest.approx(1.11)
    assert 0.09 < found.low < found.delta < found.high < 0.13


def test_family_is_corrected_together() -> None:
    before = _samples([1] * 50, "a") + _samples([1] * 50, "b")
    after = _samples([0] * 6 + [1] * 44, "a") + _samples([1] * 50, "b")
    first, second = compare_tasks(before, after)
    assert first.mcnemar_p == pytest.approx(2 / 2**6)
    assert first.mcnemar_p_holm == pytest.approx(2 * 2 / 2**6)
    assert second.mcnemar_p_holm == 1.0


def test_effect_detectable_and_samples_needed_agree() -> None:
    before = _samples([1] * 460 + [0] * 40)
    (found,) = compare_tasks(before, _samples([0] * 20 + [1] * 440 + [1] * 20 + [0] * 20))
    assert found.samples_needed(found.mde) == pytest.approx(500, abs=1)
    assert found.samples_needed(0.01) > found.samples_needed(0.02)


def test_samples_survive_their_file(tmp_path: Path) -> None:
    samples = _samples([1, 0, 1])
    write_samples(tmp_path / "samples.parquet", samples)
    assert read_samples(tmp_path / "samples.parquet") == samples
    (tmp_path / "broken.parquet").write_bytes(b"not parquet")
    with pytest.raises(EvalError, match="not a samples file"):
        read_samples(tmp_path / "broken.parquet")
