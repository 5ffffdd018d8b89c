"""A completion's text as it grows.

The one idea: text goes out only when later tokens cannot change it: not half a character, and not what may turn out to
be the beginning of a stop string, which the client must never see.
"""

from typing import Any

REPLACEMENT = "\ufffd"


class TextStream:
    """Invariant: the pieces handed out so far are a prefix of the final text."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], min_tokens: int = 0) -> None:
        """A stop string that is complete before token number `min_tokens` is text like any other."""
        self._tokenizer = tokenizer
        self._stop = stop
        self._min_tokens = min_tokens
        self._plain: int | None = None
        self._token_ids: list[int] = []
        self._context = 0
        self._decoded = 0
        self._text = ""
        self._sent = 0

    def add(self, token_ids: list[int]) -> str:
        """The text that the new tokens made certain; none without a tokenizer."""
        if self._tokenizer is None:
            return ""
        self._token_ids += token_ids
        # Only the newest tokens are decoded, after a few old ones that say how they join.
        before = self._decode(self._token_ids[self._context : self._decoded])
        now = self._decode(self._token_ids[self._context :])
        # Tokens that add no text never open a window alone: a tokenizer may strip the space that follows them there.
        if now.endswith(REPLACEMENT) or len(now) <= len(before):
            return ""
        self._text += now[len(before) :]
        self._context, self._decoded = self._decoded, len(self._token_ids)
        return self._release(len(self._text) - self._held_back())

    def finish(self, whole: str) -> str:
        """What is still to go out of the completion's final text."""
        rest = whole[self._sent :]
        self._sent = len(whole)
        return rest

    def _release(self, end: int) -> str:
        piece = self._text[self._sent : max(self._sent, end)]
        self._sent += len(piece)
        return piece

    def _held_back(self) -> int:
        """Characters at the text's end that begin a stop string, or hold a whole one that counts (the engine cuts
        it)."""
        held = 0
        for stop in self._stop:
            place = self._text.find(stop, max(0, max(self._sent, self._plain_characters()) - len(stop) + 1))
            if place >= 0:
                held = max(held, len(self._text) - place)
            # What went out already was certain not to begin a stop string.
            for length in range(min(len(stop) - 1, len(self._text) - self._sent), held, -1):
                if self._text.endswith(stop[:length]):
                    held = length
                    break
        return held

    def _plain_characters(self) -> int:
        """Characters within which a whole stop string does not count: those of the tokens before `min_tokens`."""
        if len(self._token_ids) < self._min_tokens:
            return len(self._text)
        if self._plain is None:
            self._plain = len(self._decode(self._token_ids[: max(0, self._min_tokens - 1)]))
        return self._plain

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
