"""Streamed text: whole characters only, and never a part of a stop string."""

import random

import pytest
from transformers import AutoTokenizer

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
