"""When a request ends, and the text it then has.

The one idea: the token that ends a request stays in its tokens, as in transformers; the text ends before the stop
string and shows no special tokens. A stop string that was complete before `min_tokens` is text like any other.
"""

from typing import Any

from eval.engine.request import Request

# A stop string of n characters ends within its last tokens; a byte-level token may be a quarter of a character.
TOKENS_PER_CHARACTER = 4


def finish_reason_after_token(request: Request, stop_ids: frozenset[int], tokenizer: Any) -> str | None:
    """Why the request ends with its newest token: "stop", "length" or not at all (None)."""
    params, count = request.params, request.num_output_tokens
    newest = request.token_ids[-1]
    if count >= params.min_tokens:
        if newest in params.stop_token_ids or (newest in stop_ids and not params.ignore_eos):
            return "stop"
        if params.stop and _ends_in_stop_string(request, tokenizer):
            return "stop"
    return "length" if count >= params.max_tokens else None


def completion_text(request: Request, tokenizer: Any) -> str:
    """The output as text, cut before the first stop string."""
    if tokenizer is None:
        return ""
    text, cut = _text_and_cut(request, 0, tokenizer)
    return text[:cut] if request.finish_reason == "stop" else text


def _ends_in_stop_string(request: Request, tokenizer: Any) -> bool:
    longest = max(map(len, request.params.stop))
    tail = TOKENS_PER_CHARACTER * longest + TOKENS_PER_CHARACTER
    return _text_and_cut(request, max(0, request.num_output_tokens - tail), tokenizer)[1] is not None


def _text_and_cut(request: Request, start: int, tokenizer: Any) -> tuple[str, int | None]:
    """The text of the output tokens from number `start` on, and where the first stop string that counts begins in it:
    one that ends with token number `min_tokens` or later."""
    token_ids = request.output_token_ids[start:]
    text = _decode(tokenizer, token_ids)
    if not request.params.stop:
        return text, None
    too_early = max(0, request.params.min_tokens - 1 - start)
    floor = len(_decode(tokenizer, token_ids[:too_early])) if too_early else 0
    places = (text.find(stop, max(0, floor - len(stop) + 1)) for stop in request.params.stop)
    return text, min((place for place in places if place >= 0), default=None)


def _decode(tokenizer: Any, token_ids: list[int]) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
