"""Streamed text: whole characters only, and never a part of a stop string."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from eval.engine import SamplingParams
from eval.engine.request import Request
from eval.engine.stopping import completion_text, finish_reason_after_token
from eval.server.text_stream import TextStream

TEXT = "Grüße, 世界! naïve café — ✓ 🙂 ends here.\n  two  spaces"


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


@pytest.mark.parametrize("seed", range(5))
def test_pieces_are_a_growing_prefix_of_the_text(tokenizer, seed):
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    stream, seen, start = TextStream(tokenizer, ()), "", 0
    while start < len(ids):
        count = random.Random(seed + start).randint(1, 3)
        seen += stream.add(ids[start : start + count])
        start += count
        assert TEXT.startswith(seen)
    assert seen + stream.finish(TEXT) == TEXT


@pytest.mark.parametrize("stop", ["here", "s h", "🙂 ends", "Gr", "two  spaces"])
def test_nothing_of_a_stop_string_goes_out(tokenizer, stop):
    final = TEXT[: TEXT.index(stop)]
    stream, seen = TextStream(tokenizer, (stop, "never")), ""
    for token_id in tokenizer(TEXT, add_special_tokens=False).input_ids:
        seen += stream.add([token_id])
        assert final.startswith(seen)
        if len(seen) == len(final):
            break
    assert seen + stream.finish(final) == final


class Words:
    """Token i is word i. Special words are skipped, and the first space of a text stripped, as in Llama 2."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def decode(self, token_ids, **_):
        text = "".join(word for word in map(self.words.__getitem__, token_ids) if not word.startswith("<"))
        return text.removeprefix(" ")


@pytest.mark.parametrize("words", [(" Hello", "<s>", " world"), (" Hello", "<s>", "<s>", " ", " world"), ("<s>", " a")])
def test_a_skipped_token_takes_no_space_with_it(words):
    tokenizer = Words(*words, " and", " more")
    whole = tokenizer.decode(range(len(tokenizer.words)))
    stream = TextStream(tokenizer, ())
    seen = "".join(stream.add([token_id]) for token_id in range(len(tokenizer.words)))
    assert (seen, stream.finish(whole)) == (whole, "")


class Letters:
    """Token i is the letter chr(i)."""

    def decode(self, token_ids, **_):
        return "".join(map(chr, token_ids))


@given(
    letters=st.text("ab\n", min_size=1, max_size=12),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=3), min_size=1, max_size=2),
    min_tokens=st.integers(0, 12),
    tokens_per_step=st.integers(1, 3),
)
def test_a_stop_string_before_min_tokens_holds_nothing_up_and_no_other_goes_out(
    letters, stops, min_tokens, tokens_per_step
):
    tokenizer, longest = Letters(), max(map(len, stops))
    params = SamplingParams(max_tokens=len(letters), min_tokens=min(min_tokens, len(letters)), stop=stops)
    request = Request("r", [1], params)
    stream, seen, new = TextStream(tokenizer, params.stop, params.min_tokens), "", []
    for letter in letters:
        new.append(ord(letter))
        request.token_ids.append(new[-1])
        request.finish_reason = finish_reason_after_token(request, frozenset(), tokenizer)
        if len(new) == tokens_per_step or request.finish_reason is not None:
            seen += stream.add(new)
            new = []
            if request.finish_reason is not None:
                break
            assert request.num_output_tokens - len(seen) < longest
    whole = completion_text(request, tokenizer)
    assert whole.startswith(seen)
    assert seen + stream.finish(whole) == whole
