"""Perplexity follows its stated protocol, and says so in its name."""

import math

import pytest
import torch
from transformers import LlamaForCausalLM

from eval.errors import EvalError
from eval.quality.lm_eval_adapter import EngineLM
from eval.quality.perplexity import score_windows
from eval.quality.records import result_of
from tasks.documents import Corpus, load_corpus
from tasks.suites import PerplexityRun


def test_perplexity_is_that_of_transformers_under_the_same_protocol(
    tiny_lm: EngineLM, tiny_reference: LlamaForCausalLM
) -> None:
    corpus = load_corpus("held_out_docs", None)
    samples = score_windows(tiny_lm, corpus, PerplexityRun("held_out_docs", 64, 5), None)
    ids = tiny_lm.tok_encode(corpus.text, add_special_tokens=False)
    total = 0.0
    for start in range(0, 5 * 64, 64):
        window = torch.tensor([ids[start : start + 64]])
        with torch.inference_mode():
            logits = tiny_reference(window).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum"))
    result = result_of(samples, None)
    assert result.value == pytest.approx(math.exp(total / (5 * 63)), rel=1e-4)
    assert result.metric_name == "quality.perplexity.held_out_docs.w64.s64.nobos.perplexity"
    assert [sample.tokens for sample in samples] == [63] * 5
    assert not result.higher_is_better


def test_a_limit_caps_the_windows(tiny_lm: EngineLM) -> None:
    corpus = load_corpus("held_out_docs", None)
    assert len(score_windows(tiny_lm, corpus, PerplexityRun("held_out_docs", 64, 5), 3)) == 3
    assert len(score_windows(tiny_lm, corpus, PerplexityRun("held_out_docs", 64, 2), 3)) == 2


def test_windows_that_cannot_be_are_said(tiny_lm: EngineLM) -> None:
    with pytest.raises(EvalError, match="longer than this model's context of 512"):
        score_windows(tiny_lm, load_corpus("held_out_docs", None), PerplexityRun("held_out_docs", 1024), None)
    with pytest.raises(EvalError, match="shorter than one window"):
        score_windows(tiny_lm, Corpus("short", "a few words", "x"), PerplexityRun("short", 64), None)
