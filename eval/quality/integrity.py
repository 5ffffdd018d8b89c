"""Checks of the harness itself, with every evaluation: a broken harness looks like a regression.

Each check scores a few probe sequences on the engine that is being evaluated, so it sees its kernels, its packing and
its cache; together they take some hundred tokens. A check is "pass" or "fail: why".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.engine.identity import end_of_sequence_ids
from eval.quality.lm_eval_adapter import EngineLM, TokenPair

# Largest difference in nats that rounding may make in one token's logprob when matrix shapes change.
TOLERANCE = {"float32": 2e-3, "float16": 0.15, "bfloat16": 0.5}
LEAK_CHECKS = ("alone_vs_batched", "no_leak_between_samples", "no_leak_from_future", "position_ids")

_PROBES = (
    "The old clock in the hall struck seven, and nobody in the house was awake to hear it.",
    "def area(width, height):\n    return width * height\n\nprint(area(3, 4))",
    "Water boils at a lower temperature on a high mountain, because the air presses on it less.",
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen",
)
_NEIGHBOURS = (
    "A green bicycle leaned against the wall of the station all winter long.",
    "Sort the list, take the first three values, and add them to the total.",
)


def check_engine(model: EngineLM) -> dict[str, str]:
    """The checks of packing, masks and positions."""
    tolerance = TOLERANCE.get(str(model.engine.identity()["dtype"]), TOLERANCE["bfloat16"])
    probes = [_halves(model.tok_encode(text, add_special_tokens=False)) for text in _PROBES]
    neighbours = [_halves(model.tok_encode(text, add_special_tokens=False)) for text in _NEIGHBOURS]
    alone = [_logprobs(model, [probe])[0] for probe in probes]
    together = _logprobs(model, probes)
    crowded = _logprobs(model, [neighbours[0], *probes, neighbours[1]])[1:-1]
    turned = _logprobs(model, [neighbours[1], *probes[::-1], neighbours[0]])[1:-1][::-1]
    shortened = [(context, continuation[: len(continuation) // 2]) for context, continuation in probes]
    before_the_end = _logprobs(model, shortened)
    return {
        "alone_vs_batched": _equal(alone, together, tolerance),
        "no_leak_between_samples": _equal(crowded, together, tolerance),
        "position_ids": _equal(turned, crowded, tolerance),
        "no_leak_from_future": _equal(
            [scores[: len(cut[1])] for scores, cut in zip(together, shortened, strict=True)], before_the_end, tolerance
        ),
    }


def check_text(model: EngineLM, chat_template: bool) -> dict[str, str]:
    """The checks of special tokens: BOS at most once, the tokenizer's end of text among the model's stops, a chat
    template that renders."""
    return {
        "bos": _check_bos(model),
        "stop_tokens": _check_stop_tokens(model),
        "chat_template": _check_chat_template(model, chat_template),
    }


def check_truncation(model: EngineLM) -> dict[str, str]:
    """After the run: a request that lost part of its prompt was not the task that its name says."""
    if model.truncated == 0:
        return {"truncation": "pass"}
    return {"truncation": f"fail: {model.truncated} requests were longer than {model.max_length} tokens and were cut"}


def leakage_result(integrity: Mapping[str, str]) -> str:
    """One line on all leak checks together, for the batches' evidence."""
    failed = [f"{name} {integrity[name]}" for name in LEAK_CHECKS if integrity.get(name) != "pass"]
    return "; ".join(failed) or "pass"


def text_protocol(model: EngineLM, chat_template: bool) -> dict[str, Any]:
    """What a comparison must find equal on both sides."""
    tokenizer = model.tokenizer
    return {
        "bos": {"leading_ids": model.tok_encode("")[:1], "empty_context_id": model.prefix_token_id},
        "stop_ids": sorted(end_of_sequence_ids(model.engine.model)),
        "chat_template_applied": chat_template,
        "vocabulary": len(tokenizer),
        "truncation_side": "left",
        "max_length": model.max_length,
    }


def _halves(token_ids: list[int]) -> TokenPair:
    middle = max(1, len(token_ids) // 3)
    return token_ids[:middle], token_ids[middle:]


def _logprobs(model: EngineLM, pairs: Sequence[TokenPair]) -> list[list[float]]:
    return [list(scored.logprobs) for scored in model.engine.score(list(pairs))]


def _equal(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], tolerance: float) -> str:
    worst = max(abs(a - b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True))
    return "pass" if worst <= tolerance else f"fail: a logprob moved by {worst:.3g} nats, rounding explains {tolerance}"


def _check_bos(model: EngineLM) -> str:
    bos = model.tokenizer.bos_token
    if not bos:
        return "pass"
    once = model.tok_encode("word")
    again = model.tok_encode(bos + "word")
    if again[:2] == [model.tokenizer.bos_token_id] * 2:
        return "fail: a prompt that starts with BOS gets a second one"
    if model.tokenizer.bos_token_id in once[1:]:
        return "fail: BOS appears inside a prompt"
    return "pass"


def _check_stop_tokens(model: EngineLM) -> str:
    stops, ending = end_of_sequence_ids(model.engine.model), model.tokenizer.eos_token_id
    if stops and ending is not None and ending not in stops:
        return f"fail: the tokenizer ends a text with id {ending}, the model stops at {sorted(stops)}"
    return "pass"


def _check_chat_template(model: EngineLM, chat_template: bool) -> str:
    if not chat_template:
        return "pass"
    rendered = model.apply_chat_template([{"role": "user", "content": "probe text"}])
    return "pass" if "probe text" in rendered else "fail: the template drops the user's message"
