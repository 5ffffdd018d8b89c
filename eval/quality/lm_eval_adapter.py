"""lm-eval's model interface on our engine: what lm-eval asks, the engine that will serve answers.

Texts become tokens exactly as lm-eval's own Hugging Face model does it (context and continuation encoded together, the
tokenizer's default special tokens, BOS or else EOS before an empty context), so that scores can be set beside
published ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from eval.engine.engine import Engine
from eval.engine.identity import end_of_sequence_ids
from eval.engine.request import SamplingParams
from eval.errors import EvalError
from eval.quality.batches import BatchRecord, record_batch
from quantize.progress import Progress, silent

TOKENS_PER_CALL = 32_768
DEFAULT_MAX_GEN_TOKENS = 256

TokenPair = tuple[list[int], list[int]]


class EngineLM(TemplateLM):
    """lm-eval's LM over an `Engine`.

    Keeps, for the evidence: `batches` (what was packed together), `truncated` (requests that lost their left part) and
    `scored_tokens` (tokens per (context, continuation)).
    """

    def __init__(self, engine: Engine, progress: Progress = silent) -> None:
        super().__init__()
        if engine.tokenizer is None:
            raise EvalError("this checkpoint has no tokenizer; an evaluation needs one beside the weights")
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.batches: list[BatchRecord] = []
        self.truncated = 0
        self.scored_tokens: dict[tuple[str, str], int] = {}
        self._progress = progress
        self._samples = 0

    # What lm-eval's template asks

    @property
    def max_length(self) -> int:
        """The engine's context: how many tokens it may be fed. A scored sequence may be one longer, since its last
        token is only scored."""
        return self.engine.context_tokens

    @property
    def eot_token_id(self) -> int:
        stop_ids = sorted(end_of_sequence_ids(self.engine.model))
        if not stop_ids and self.tokenizer.eos_token_id is None:
            raise EvalError("this checkpoint names no end-of-sequence token; set eos_token_id in its config.json")
        return stop_ids[0] if stop_ids else int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is replaced by: BOS where the tokenizer has one, else EOS."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self.engine.identity()["tokenizer_digest"])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids. By default with the special tokens that the tokenizer adds, but never BOS twice."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not self.tokenizer.chat_template:
            raise EvalError("this checkpoint has no chat template; evaluate without one")
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [self._fitted(context, continuation) for _, context, continuation in requests]
        for request, pair in zip(requests, pairs, strict=True):
            self.scored_tokens[request[0]] = len(pair[1])
        return [(sum(logprobs), greedy) for logprobs, greedy in self.score(pairs, "score tasks")]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood of whole texts, in windows of the model's context, each token scored once."""
        pairs: list[TokenPair] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            (text,) = request.args
            windows = get_rolling_token_windows(
                self.tok_encode(text, add_special_tokens=False), self.prefix_token_id, self.max_length, 1
            )
            for window in map(make_disjoint_window, windows):
                pairs.append(window)
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (logprobs, _) in zip(owners, self.score(pairs, "score texts"), strict=True):
            totals[owner] += sum(logprobs)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Text up to, and without, the first of the request's stop strings."""
        prompts, params = [], []
        for index, request in enumerate(requests):
            context, asked = request.args
            settings = normalize_gen_kwargs(asked, DEFAULT_MAX_GEN_TOKENS)
            max_tokens = min(int(settings["max_gen_toks"]), self.max_length - 1)
            prompt_ids = self.tok_encode(context) or [self.prefix_token_id]
            room = self.max_length - max_tokens
            self.truncated += len(prompt_ids) > room
            prompts.append(prompt_ids[-room:])
            params.append(
                SamplingParams(
                    max_tokens=max_tokens,
                    temperature=float(settings.get("temperature", 0.0)),
                    top_p=float(settings.get("top_p", 1.0)),
                    top_k=int(settings.get("top_k", 0)),
                    seed=index,
                    stop=tuple(stop for stop in settings["until"] if stop),
                )
            )
        texts: list[str] = []
        for part in self._parts([(prompt, []) for prompt in prompts]):
            indices = range(*part.indices(len(prompts)))
            self._record(indices, [(len(prompts[index]), 0) for index in indices])
            count = self._counted("generate", len(texts), len(prompts))
            completions = self.engine.generate(prompts[part], params[part], count)
            failed = next((completion for completion in completions if completion.error), None)
            if failed is not None:
                raise EvalError(f"generating failed: {failed.error}")
            texts += [completion.text for completion in completions]
        self._samples += len(prompts)
        return texts

    # The one way to the engine

    def score(self, pairs: Sequence[TokenPair], what: str) -> list[tuple[list[float], bool]]:
        """(logprob of each continuation token in nats, whether greedy decoding would write it) for each pair."""
        results: list[tuple[list[float], bool]] = [([], True)] * len(pairs)
        done = 0
        for part in self._parts(pairs):
            order = _contexts_apart(pairs, range(*part.indices(len(pairs))))
            lengths = [(len(pairs[index][0]), len(pairs[index][1])) for index in order]
            self._record(order, lengths)
            scores = self.engine.score([pairs[index] for index in order], self._counted(what, done, len(pairs)))
            for index, scored in zip(order, scores, strict=True):
                results[index] = (list(scored.logprobs), bool(scored.is_greedy))
            done += len(order)
        self._samples += len(pairs)
        return results

    def _record(self, indices: Iterable[int], lengths: Sequence[tuple[int, int]]) -> None:
        samples = [self._samples + index for index in indices]
        version = self.engine.identity()["chat_template_digest"]
        self.batches.append(record_batch(len(self.batches), samples, lengths, version))

    def _counted(self, what: str, before: int, total: int) -> Progress:
        """The engine's progress on one part, told as progress on the whole."""
        return lambda _what, done, _total: self._progress(what, before + done, total)

    def _parts(self, pairs: Sequence[TokenPair]) -> Iterator[slice]:
        """Runs of pairs that fill a few engine steps each; the engine packs a run as it likes, and a run is what the
        evidence calls a batch."""
        start, tokens = 0, 0
        for index, (context, continuation) in enumerate(pairs):
            tokens += len(context) + len(continuation)
            if tokens >= TOKENS_PER_CALL:
                yield slice(start, index + 1)
                start, tokens = index + 1, 0
        if start < len(pairs):
            yield slice(start, len(pairs))

    def _fitted(self, context: list[int], continuation: list[int]) -> TokenPair:
        """The pair cut to the model's context from the left, as lm-eval does; at least one context token stays."""
        excess = len(context) + len(continuation) - (self.max_length + 1)
        if excess <= 0:
            return context, continuation
        self.truncated += 1
        if excess < len(context):
            return context[excess:], continuation
        whole = (context + continuation)[-(self.max_length + 1) :]
        return whole[:1], whole[1:]


def _contexts_apart(pairs: Sequence[TokenPair], indices: Iterable[int]) -> list[int]:
    """`indices`, each context's first pair before any context's second: a step cannot reuse what it computes itself, so
    the choices of one question must not share a step if the later ones are to find its context in the prefix cache."""
    turns: Counter[tuple[int, ...]] = Counter()
    turn: dict[int, int] = {}
    for index in indices:
        context = tuple(pairs[index][0])
        turn[index] = turns[context]
        turns[context] += 1
    return sorted(turn, key=lambda index: turn[index])
