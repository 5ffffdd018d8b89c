"""When a request ends, and the text it then has.

The one idea: the token that ends a request stays in its tokens, as in transformers; the text ends before the stop
string and shows no special tokens.
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
    text = _decode(tokenizer, request.output_token_ids)
    if request.finish_reason == "stop":
        cuts = [position for stop in request.params.stop if (position := text.find(stop)) >= 0]
        text = text[: min(cuts, default=len(text))]
    return text


def _ends_in_stop_string(request: Request, tokenizer: Any) -> bool:
    longest = max(map(len, request.params.stop))
    tail = request.output_token_ids[-(TOKENS_PER_CHARACTER * longest + TOKENS_PER_CHARACTER) :]
    text = _decode(tokenizer, tail)
    return any(stop in text for stop in request.params.stop)


def _decode(tokenizer: Any, token_ids: list[int]) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
