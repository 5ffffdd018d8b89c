"""Policies: what a YAML file may say, and how a mistake in it is named."""

from pathlib import Path

import pytest

from registry.errors import RegistryError
from registry.policy import Policy, load_policy


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    return path


def test_the_default_policy_ships_and_limits_quality_speed_and_memory() -> None:
    policy = load_policy("default")
    assert policy.owner("quality.grammar.acc").margin == 0.03
    assert policy.owner("quality.perplexity.heldout.w1024.s1024.nobos.ppl").max_ratio == 1.10
    assert policy.owner("speed.chat.tpot_ms.mean").max_ratio == 1.0
    assert policy.owner("speed.chat.ttft_ms.p95").max_ratio == 1.20
    assert policy.owner("memory.weights_bytes").max_ratio == 0.90
    assert policy.owner("speed.chat.queue_ms.p50") is None


def test_the_first_rule_that_matches_owns_the_metric(tmp_path: Path) -> None:
    policy = load_policy(
        write(tmp_path, "rules:\n- {metric: quality.facts.acc, margin: 0.1}\n- {metric: quality.*.acc, margin: 0.01}\n")
    )
    assert policy.owner("quality.facts.acc").margin == 0.1
    assert policy.owner("quality.other.acc").margin == 0.01


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("rules:\n- metric: quality.*.acc\n  margn: 0.01\n  margin: 0.01\n", 3, ["margn", "did you mean 'margin'"]),
        ("confidense: 0.9\nrules:\n- {metric: a, max: 1}\n", 1, ["confidense", "did you mean 'confidence'"]),
        ("rules:\n- {metric: a, max: 1}\nconfidence: 1.5\n", 3, ["confidence"]),
        ("name: x\nrules:\n- metric: quality.*.acc\n", 3, ["states no limit", "margin"]),
        ("rules:\n- {metric: a, margin: -0.1}\n", 2, ["margin", "greater than or equal to 0"]),
        ("rules:\n- {metric: a, max: .nan}\n", 2, ["max", "finite"]),
        ("rules:\n- {metric: a, max: 1, group: g}\n", 1, ["group 'g'"]),
        ("rules: [}\n", 1, ["not valid YAML"]),
        ("groups:\n  g: {ned: all}\nrules:\n- {metric: a, max: 1, group: g}\n", 2, ["ned", "did you mean 'need'"]),
    ],
)
def test_a_mistake_is_one_line_with_file_line_and_key(tmp_path: Path, text: str, line: int, words: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(RegistryError) as caught:
        load_policy(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}:{line}:")
    for word in words:
        assert word in message


def test_an_unknown_policy_names_the_shipped_ones() -> None:
    with pytest.raises(RegistryError, match=r"nope.*default"):
        load_policy("nope")


def test_a_policy_goes_out_as_json_and_comes_back() -> None:
    policy = load_policy("default")
    assert Policy.model_validate(policy.to_mapping()) == policy
