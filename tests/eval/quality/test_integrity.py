"""The harness's own checks pass on a sound engine and each finds the fault that it is for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from eval.quality import integrity
from eval.quality.lm_eval_adapter import EngineLM
from eval.quality.paired import same_protocol


@dataclass(frozen=True)
class _Score:
    logprobs: list[float]
    is_greedy: bool = False


Pairs = Sequence[tuple[list[int], list[int]]]


def _broken(model: EngineLM, score: Callable[[Pairs], list[list[float]]]) -> EngineLM:
    model.engine.score = lambda pairs: [_Score(logprobs) for logprobs in score(pairs)]  # type: ignore[method-assign]
    return model


def _sound(pairs: Pairs) -> list[list[float]]:
    return [[-float(token % 7) for token in continuation] for _, continuation in pairs]


def test_a_sound_engine_passes_every_check(tiny_lm: EngineLM) -> None:
    checks = {
        **integrity.check_engine(tiny_lm),
        **integrity.check_text(tiny_lm, chat_template=True),
        **integrity.check_truncation(tiny_lm),
    }
    assert set(checks.values()) == {"pass"}
    assert integrity.leakage_result(checks) == "pass"


def test_neighbours_that_leak_are_found(tiny_lm: EngineLM) -> None:
    def leaks(pairs: Pairs) -> list[list[float]]:
        shift = sum(len(context) for context, _ in pairs) % 11
        return [[value - shift for value in scores] for scores in _sound(pairs)]

    checks = integrity.check_engine(_broken(tiny_lm, leaks))
    assert checks["alone_vs_batched"].startswith("fail: a logprob moved by")
    assert checks["no_leak_between_samples"].startswith("fail")
    assert "no_leak_between_samples fail" in integrity.leakage_result(checks)


def test_a_future_that_leaks_is_found(tiny_lm: EngineLM) -> None:
    def leaks(pairs: Pairs) -> list[list[float]]:
        return [[value - len(scores) for value in scores] for scores in _sound(pairs)]

    assert integrity.check_engine(_broken(tiny_lm, leaks))["no_leak_from_future"].startswith("fail")


def test_positions_that_do_not_restart_are_found(tiny_lm: EngineLM) -> None:
    def drifts(pairs: Pairs) -> list[list[float]]:
        return [[value - place for value in scores] for place, scores in enumerate(_sound(pairs))]

    assert integrity.check_engine(_broken(tiny_lm, drifts))["position_ids"].startswith("fail")


def test_a_tokenizer_that_ends_where_the_model_does_not_stop_is_found(tiny_lm: EngineLM) -> None:
    tiny_lm.tokenizer.eos_token = "<s>"
    assert integrity.check_text(tiny_lm, chat_template=False)["stop_tokens"] == (
        "fail: the tokenizer ends a text with id 1, the model stops at [2]"
    )


def test_prompts_that_were_cut_are_counted(tiny_lm: EngineLM) -> None:
    tiny_lm.truncated = 3
    assert integrity.check_truncation(tiny_lm)["truncation"].startswith("fail: 3 requests were longer than 512")


def test_a_template_that_drops_the_message_is_found(tiny_lm: EngineLM) -> None:
    tiny_lm.tokenizer.chat_template = "nothing"
    assert integrity.check_text(tiny_lm, chat_template=True)["chat_template"].startswith("fail")
    assert integrity.check_text(tiny_lm, chat_template=False)["chat_template"] == "pass"


def test_protocols_are_compared_part_by_part(tiny_lm: EngineLM) -> None:
    protocol = integrity.text_protocol(tiny_lm, chat_template=False)
    other = {**protocol, "chat_template_applied": True}
    assert set(same_protocol(protocol, protocol).values()) == {"pass"}
    found = same_protocol(protocol, other)
    assert [name for name, outcome in found.items() if outcome != "pass"] == ["chat_template_applied"]


@pytest.mark.real
def test_the_real_checkpoint_passes_every_check(real_checkpoint) -> None:
    from eval.engine.engine import Engine

    model = EngineLM(Engine.from_checkpoint(real_checkpoint))
    assert set(integrity.check_engine(model).values()) == {"pass"}
