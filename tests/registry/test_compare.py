"""From two result folders to comparison.json."""

import json
from pathlib import Path

import pytest

from registry.compare import compare, compare_variants
from registry.errors import RegistryError
from registry.policy import Policy, Rule, load_policy
from registry.variant import CampaignRecord, VariantRecord
from tests.registry.campaign_folder import VARIANTS, write_campaign, write_variant

POLICY = load_policy("default")


def rewrite(path: Path, **changes: object) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | changes))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    folder = write_campaign(tmp_path, per_task=200, variants={"int4": VARIANTS["int4"]})
    return folder / "variants" / "baseline", folder / "variants" / "int4"


def test_a_broken_variant_fails_with_the_tasks_that_broke(campaign: CampaignRecord) -> None:
    int4 = next(variant for variant in campaign.candidates if variant.name == "int4")
    assert int4.verdict == "fail"
    assert any("quality.perplexity.heldout" in reason for reason in int4.comparison["reasons"])


def test_what_is_returned_is_what_is_written(pair: tuple[Path, Path], tmp_path: Path) -> None:
    document = compare(*pair, POLICY, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "comparison.json").read_text()) == document


def test_a_comparison_holds_tasks_flips_with_texts_and_power(pair: tuple[Path, Path]) -> None:
    document = compare(*pair, POLICY, None)
    grammar = next(task for task in document["tasks"] if task["task"] == "grammar")
    assert grammar["lost"] > 0
    assert 0 < grammar["mde"] < 0.2
    lost = [flip for flip in document["flips"] if flip["task"] == "grammar" and flip["direction"] == "lost"]
    assert len(lost) == grammar["lost"]
    assert lost[0]["baseline_answer"] != lost[0]["candidate_answer"]
    assert "Question" in lost[0]["prompt"]
    assert document["metrics"]["quality.grammar.acc.delta.low"] <= document["metrics"]["quality.grammar.acc.delta"]


def test_a_model_equal_in_everything_but_size_passes(tmp_path: Path) -> None:
    folder = write_campaign(tmp_path, variants={})
    write_variant(folder, "same", VARIANTS["int8"].__class__(0, 0, 100_000_000, 1.1, 1.0))
    document = compare(folder / "variants" / "baseline", folder / "variants" / "same", POLICY, None)
    assert document["verdict"] == "pass", document["reasons"]


def test_other_samples_cannot_be_paired(pair: tuple[Path, Path], tmp_path: Path) -> None:
    baseline, candidate = pair
    other = write_variant(tmp_path / "other", "baseline", VARIANTS["int8"], per_task=50)
    with pytest.raises(RegistryError, match="only the baseline has it"):
        compare(baseline, other, POLICY, None)
    assert not (candidate / "comparison.json").exists()


def test_speed_of_other_weights_is_refused(pair: tuple[Path, Path]) -> None:
    baseline, candidate = pair
    rewrite(candidate / "speed" / "speed.json", candidate={"weights_digest": "f" * 64})
    with pytest.raises(RegistryError, match="measure both on the same checkpoint"):
        compare(baseline, candidate, POLICY, None)


def test_speed_of_other_kernels_is_refused(pair: tuple[Path, Path]) -> None:
    baseline, candidate = pair
    timed = json.loads((candidate / "speed" / "speed.json").read_text())["candidate"]
    rewrite(candidate / "speed" / "speed.json", candidate=timed | {"kernels": {"dequantize": 210}})
    with pytest.raises(RegistryError, match=r"timed the candidate with kernels \{'dequantize': 210\}"):
        compare(baseline, candidate, POLICY, None)


def test_speed_of_another_engine_is_refused_though_its_version_is_the_same(pair: tuple[Path, Path]) -> None:
    baseline, candidate = pair
    for file, key in (("quality/quality.json", "identity"), ("speed/speed.json", "candidate")):
        identity = json.loads((candidate / file).read_text())[key]
        engine = {"engine_version": "0.3.0", "engine_fingerprint": f"of {key}"}
        rewrite(candidate / file, **{key: identity | engine})
    with pytest.raises(RegistryError, match="timed the candidate with engine_fingerprint of candidate"):
        compare(baseline, candidate, POLICY, None)


def test_speed_intervals_of_another_confidence_forbid_a_pass(pair: tuple[Path, Path]) -> None:
    baseline, candidate = pair
    rewrite(candidate / "speed" / "speed.json", protocol={"confidence": 0.95})
    rules = (Rule(metric="memory.weights_bytes", max_ratio=0.9),)
    assert compare(baseline, candidate, Policy(rules=rules), None)["verdict"] == "pass"
    strict = compare(baseline, candidate, Policy(rules=rules, confidence=0.99), None)
    assert strict["verdict"] == "inconclusive"
    assert "speed intervals hold 0.95, the policy asks for 0.99" in strict["reasons"][0]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"integrity": {"future_leak": "fail: token 3 sees token 4"}}, "token 3 sees token 4"),
        ({"protocol": {"stop_ids": [7]}}, "stop_ids is"),
    ],
    ids=["a failed integrity check", "another protocol"],
)
def test_a_broken_harness_forbids_a_pass(tmp_path: Path, broken: dict[str, object], said: str) -> None:
    folder = write_campaign(tmp_path, per_task=50, variants={"int8": VARIANTS["int8"]})
    baseline, candidate = folder / "variants" / "baseline", folder / "variants" / "int8"
    rewrite(candidate / "quality" / "quality.json", **broken)
    policy = Policy(rules=(Rule(metric="memory.weights_bytes", max_ratio=0.9),))
    document = compare(baseline, candidate, policy, None)
    assert document["verdict"] == "inconclusive"
    assert said in " ".join(document["reasons"])


def test_without_speed_the_speed_limits_are_nodata(pair: tuple[Path, Path]) -> None:
    baseline, candidate = pair
    (candidate / "speed" / "speed.json").unlink()
    document = compare(baseline, candidate, POLICY, None)
    assert {check["name"] for check in document["checks"] if check["status"] == "nodata"} >= {"speed.*.ttft_ms.p95"}


def test_a_policy_may_limit_what_the_quantizer_counted(campaign: CampaignRecord) -> None:
    policy = Policy(rules=(Rule(metric="quantize.fallbacks", max=0),))
    gptq = next(variant for variant in campaign.candidates if variant.name == "gptq")
    assert gptq.manifest is not None
    assert compare_variants(campaign.baseline, gptq, policy, None)["verdict"] == "pass"


def test_a_speed_ratio_without_an_interval_decides_nothing(pair: tuple[Path, Path]) -> None:
    baseline, candidate = pair
    path = candidate / "speed" / "speed.json"
    metrics = json.loads(path.read_text())["metrics"]
    del metrics["speed.chat.ttft_ms.p95.ratio.low"]
    rewrite(path, metrics=metrics)
    document = compare(baseline, candidate, POLICY, None)
    (check,) = (check for check in document["checks"] if check["name"] == "speed.chat.ttft_ms.p95")
    assert check["status"] == "nodata"
    assert "too few samples" in check["reason"]


def test_results_in_folders_of_their_own_compare_the_same(pair: tuple[Path, Path]) -> None:
    baseline, candidate = pair
    records = [VariantRecord.of_results(each.name, None, each / "quality", each / "speed") for each in pair]
    separate = compare_variants(*records, POLICY, None)
    assert separate["verdict"] == compare(baseline, candidate, POLICY, None)["verdict"]


def test_a_variant_of_a_campaign_finds_its_checkpoint_and_manifest(pair: tuple[Path, Path]) -> None:
    _, candidate = pair
    record = VariantRecord.read(candidate)
    assert record.checkpoint == candidate.parent.parent / "checkpoints" / candidate.name
    assert record.metrics()["quantize.bits_per_weight"] == 4.25
    assert record.recipe()["recipe.method"] == "int4"


def test_half_an_evaluation_is_named(pair: tuple[Path, Path]) -> None:
    baseline, _ = pair
    (baseline / "quality" / "quality.json").write_text("{")
    with pytest.raises(RegistryError, match=r"quality\.json:1: not valid JSON"):
        VariantRecord.read(baseline)
