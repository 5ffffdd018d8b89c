"""What lm-eval gets from the engine is what transformers gives, token for token."""

from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import LlamaForCausalLM

from eval.engine.engine import Engine
from eval.errors import EvalError
from eval.quality.lm_eval_adapter import EngineLM


def _requests(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]


def _reference(model: LlamaForCausalLM, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    with torch.inference_mode():
        logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1].log_softmax(-1)
    targets = torch.tensor(continuation)
    greedy = bool((logits.argmax(-1) == targets).all())
    return float(logits.gather(1, targets[:, None]).sum()), greedy


def test_loglikelihoods_are_those_of_transformers(tiny_lm: EngineLM, tiny_reference: LlamaForCausalLM) -> None:
    texts = [("The value of x is", " the list"), ("def f(x):", " return x"), ("a", "b" * 40), ("Lists are ", "mutable")]
    scored = tiny_lm.loglikelihood(_requests("loglikelihood", *texts))
    for (context, continuation), found in zip(texts, scored, strict=True):
        context_ids, continuation_ids = tiny_lm._encode_pair(context, continuation)
        expected = _reference(tiny_reference, context_ids, continuation_ids)
        assert found[0] == pytest.approx(expected[0], abs=1e-3)
        assert found[1] == expected[1]


def test_lm_evals_own_model_gives_the_same_numbers_and_texts(tiny_lm: EngineLM, tiny_checkpoint: Path) -> None:
    theirs = HFLM(pretrained=str(tiny_checkpoint), device="cpu", dtype="float32", batch_size=4)
    texts = [("The value of x is", " the list"), ("", "A class definition"), ("Lists are ", "mutable, tuples are not")]
    for ours, other in zip(
        tiny_lm.loglikelihood(_requests("loglikelihood", *texts)),
        theirs.loglikelihood(_requests("loglikelihood", *texts), disable_tqdm=True),
        strict=True,
    ):
        assert ours[0] == pytest.approx(other[0], abs=1e-3)
        assert ours[1] == other[1]
    long = ("Names refer to objects, and names are introduced by binding. " * 40,)
    (ours_rolling,) = tiny_lm.loglikelihood_rolling(_requests("loglikelihood_rolling", long))
    (theirs_rolling,) = theirs.loglikelihood_rolling(_requests("loglikelihood_rolling", long), disable_tqdm=True)
    assert ours_rolling == pytest.approx(theirs_rolling, rel=1e-4)
    asked = ("The with statement", {"until": ["\n", "the"], "max_gen_toks": 12, "do_sample": False})
    assert tiny_lm.generate_until(_requests("generate_until", asked)) == theirs.generate_until(
        _requests("generate_until", asked), disable_tqdm=True
    )


def test_the_greedy_continuation_is_recognised(tiny_lm: EngineLM, tiny_reference: LlamaForCausalLM) -> None:
    context = tiny_lm.tok_encode("The statement")
    with torch.inference_mode():
        written = tiny_reference.generate(torch.tensor([context]), max_new_tokens=4, do_sample=False)[0, len(context) :]
    ((_, greedy),) = tiny_lm.score([(context, written.tolist())], "test")
    assert greedy
    ((_, greedy),) = tiny_lm.score([(context, [*written.tolist()[:-1], 5])], "test")
    assert not greedy


def test_an_empty_context_is_bos(tiny_lm: EngineLM, tiny_reference: LlamaForCausalLM) -> None:
    ((found, _),) = tiny_lm.loglikelihood(_requests("loglikelihood", ("", "some words")))
    ids = tiny_lm.tok_encode("some words")
    assert found == pytest.approx(_reference(tiny_reference, [1], ids)[0], abs=1e-3)


def test_bos_that_stands_in_the_prompt_is_not_added_again(tiny_lm: EngineLM) -> None:
    assert tiny_lm.tok_encode("<s>word").count(1) == 1


def test_spaces_at_the_border_go_to_the_continuation(tiny_lm: EngineLM) -> None:
    assert tiny_lm._encode_pair("The list ", "is") == tiny_lm._encode_pair("The list", " is")


def test_a_long_prompt_loses_its_left_part_and_is_counted(tiny_lm: EngineLM) -> None:
    long = "word " * 600
    ((found, _),) = tiny_lm.loglikelihood(_requests("loglikelihood", (long, " end")))
    context, continuation = tiny_lm._encode_pair(long, " end")
    kept = context[-(tiny_lm.max_length + 1 - len(continuation)) :]
    ((expected, _),) = tiny_lm.score([(kept, continuation)], "test")
    assert found == pytest.approx(sum(expected), abs=1e-4)
    assert tiny_lm.truncated == 1


def test_a_text_longer_than_the_context_is_scored_in_windows_each_token_once(tiny_lm: EngineLM) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 80
    (total,) = tiny_lm.loglikelihood_rolling(_requests("loglikelihood_rolling", (text,)))
    tokens = len(tiny_lm.tok_encode(text, add_special_tokens=False))
    assert tokens > 2 * tiny_lm.max_length
    assert sum(length for batch in tiny_lm.batches for length in batch.segment_ids) >= tokens
    assert -20 * tokens < total < 0


def test_generation_is_greedy_and_ends_before_the_stop_string(
    tiny_lm: EngineLM, tiny_reference: LlamaForCausalLM
) -> None:
    prompt = "The yield expression"
    ids = tiny_lm.tok_encode(prompt)
    with torch.inference_mode():
        written = tiny_reference.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    text = tiny_lm.tokenizer.decode(written, skip_special_tokens=True)
    whole, cut = tiny_lm.generate_until(
        _requests(
            "generate_until",
            (prompt, {"until": [], "max_gen_toks": 12}),
            (prompt, {"until": [text[4:7]], "max_gen_toks": 12, "do_sample": False, "temperature": 0.7}),
        )
    )
    assert whole == text
    assert cut == text[: text.find(text[4:7])]


def test_sampling_is_seeded(tiny_lm: EngineLM) -> None:
    settings = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 1.5}
    first = tiny_lm.generate_until(_requests("generate_until", ("A class", settings), ("A class", settings)))
    again = tiny_lm.generate_until(_requests("generate_until", ("A class", settings), ("A class", settings)))
    assert first == again
    assert first[0] != first[1]


def test_the_chat_template_is_the_checkpoints(tiny_lm: EngineLM) -> None:
    rendered = tiny_lm.apply_chat_template([{"role": "user", "content": "hello"}])
    assert rendered == "<s>user: hello</s>\n<s>assistant:"
    tiny_lm.tokenizer.chat_template = None
    with pytest.raises(EvalError, match="no chat template"):
        tiny_lm.apply_chat_template([{"role": "user", "content": "hello"}])


def test_choices_of_one_question_find_its_context_in_the_prefix_cache(tiny_lm: EngineLM) -> None:
    question = "A question that is long enough to fill several blocks of the cache, as questions with examples are."
    requests = _requests("loglikelihood", *[(question, f" {choice}") for choice in ("yes", "no", "perhaps")])
    together = tiny_lm.loglikelihood(requests)
    crowd = [(f"{number}. {question}", f" {choice}") for number in range(120) for choice in ("yes", "no", "perhaps")]
    tiny_lm.loglikelihood(_requests("loglikelihood", *crowd))
    assert any((step.reuse_rate or 0) > 0.5 for step in tiny_lm.engine.telemetry.steps)
    again = tiny_lm.loglikelihood(requests)
    assert [score for score, _ in again] == pytest.approx([score for score, _ in together], abs=1e-3)


def test_a_cache_smaller_than_the_context_makes_the_windows_shorter(tiny_checkpoint: Path) -> None:
    small = EngineLM(Engine.from_checkpoint(tiny_checkpoint, num_blocks=4))
    assert small.max_length == 64
    (total,) = small.loglikelihood_rolling(_requests("loglikelihood_rolling", ("Names refer to objects. " * 40,)))
    assert total < 0
