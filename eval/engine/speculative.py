"""Speculative decoding: guesses at a request's next tokens, for one step to compute and verify all of them.

The one idea: a draft only proposes. Each token is still decided by the model's own logits and by the number that the
request draws for that place in its output, and a draft counts if it is that very token; so the tokens, greedy or
sampled, are those that the same seed gives without drafts, whoever drafted and however many found room in the step. For
a proposal that is a point (prompt lookup), this is rejection sampling: a draft is accepted with the probability that
the model gives it, and a rejected one leaves the model's distribution without it (Leviathan et al. 2023, section 2.3).
A draft model draws with the same number, a coupling that accepts often where the two models agree (Daliri et al. 2025,
"Coupling without communication and drafter-invariant speculative decoding").
"""

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from eval.engine.request import Request

PROMPT_LOOKUP = "prompt-lookup"
LONGEST_NGRAM, SHORTEST_NGRAM = 4, 2


class Speculator(Protocol):
    def propose(self, requests: Sequence[Request]) -> None:
        """Give decoding requests their `draft_token_ids`, where there is a guess."""
        ...


def num_wanted(request: Request, num_tokens: int) -> int:
    """How many drafts the request has use for: `num_tokens`, or fewer where its `max_tokens` is near. The token after
    the last draft comes for nothing."""
    return max(0, min(num_tokens, request.params.max_tokens - request.num_output_tokens - 1))


class PromptLookup:
    """Proposes what followed the newest earlier occurrence of the request's last tokens, in its prompt or output. The
    longest n-gram that occurred decides; a copy that reaches the end goes on with what it has copied, so that a loop
    is drafted in full length (Saxena 2023, "Prompt lookup decoding")."""

    def __init__(self, num_tokens: int):
        self._num_tokens = num_tokens
        self._places: WeakKeyDictionary[Request, dict[tuple[int, ...], int]] = WeakKeyDictionary()
        self._indexed: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def propose(self, requests: Sequence[Request]) -> None:
        for request in requests:
            wanted = num_wanted(request, self._num_tokens)
            if wanted:
                self._index(request)
                request.draft_token_ids = self._continuation(request, wanted)

    def _index(self, request: Request) -> None:
        """Note where every n-gram before the last token ends; the newest place wins. A request's tokens only grow."""
        places = self._places.setdefault(request, {})
        tokens = request.token_ids
        for end in range(self._indexed.get(request, SHORTEST_NGRAM), len(tokens)):
            for length in range(SHORTEST_NGRAM, min(LONGEST_NGRAM, end) + 1):
                places[tuple(tokens[end - length : end])] = end
        self._indexed[request] = max(SHORTEST_NGRAM, len(tokens))

    def _continuation(self, request: Request, count: int) -> list[int]:
        places, tokens = self._places[request], request.token_ids
        for length in range(LONGEST_NGRAM, SHORTEST_NGRAM - 1, -1):
            place = places.get(tuple(tokens[-length:]))
            if place is not None and len(tokens) >= length:
                period = len(tokens) - place
                return [tokens[place + offset % period] for offset in range(count)]
        return []
