"""OpenAI's completions and chat completions as values: what a request body asks for, and what the answers look like.

The one idea: a field that would change the answer is either obeyed or refused by name; nothing is dropped in silence.
Field names and shapes are those of OpenAI's API reference; top_k, min_p, ignore_eos and the like are vLLM's additions.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eval.engine import EvalError, SamplingParams, TokenLogprobs
from eval.server.text_stream import REPLACEMENT

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_LOGPROBS = 20
"""Like vLLM's; a whole vocabulary for every token of many choices would fill the memory."""
HIGHEST = 2**63 - 1
LOWEST_LOGPROB = -9999.0
"""What stands for the logprob of what cannot come, since JSON has no infinity; OpenAI's and vLLM's value."""
SAMPLING = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
    "ignore_eos": bool,
    "min_tokens": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
}
REFUSED: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "echo": (None, False),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "prompt_logprobs": (None, 0),
    "return_tokens_as_token_ids": (None, False),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None, []),
    "guided_grammar": (None,),
    "structured_outputs": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1.0),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
}
"""Fields that are not supported, with the values that ask for nothing."""
REFUSED_IN_COMPLETIONS = REFUSED | {"add_special_tokens": (None, True), "max_completion_tokens": (None,)}
REFUSED_IN_CHATS = REFUSED | {"add_special_tokens": (None, False)}


class BadRequestError(Exception):
    """What is wrong with a request body; `param` is the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Ask:
    """One HTTP request: its prompts (text, token ids, or messages of a chat), each to be answered `params.n` times."""

    prompts: tuple[str | list[int], ...]
    params: SamplingParams
    stream: bool
    include_usage: bool
    messages: list[dict[str, Any]] | None = None
    fills_context: bool = False

    def params_within(self, room: int) -> SamplingParams:
        """The parameters with `room` tokens left in the context."""
        if not self.fills_context:
            return self.params
        return replace(self.params, max_tokens=max(1, room, self.params.min_tokens))


def read_completion(body: Any, model: str) -> Ask:
    """Raises BadRequestError, naming the field."""
    body = _checked(body, model, REFUSED_IN_COMPLETIONS)
    logprobs = _value(body, "logprobs", int)
    best_of = _value(body, "best_of", int)
    if best_of not in (None, _value(body, "n", int) or 1):
        raise BadRequestError("best_of other than n is not supported", "best_of")
    max_tokens = _value(body, "max_tokens", int)
    return _ask(body, _prompts(body.get("prompt")), 16 if max_tokens is None else max_tokens, logprobs)


def read_chat(body: Any, model: str) -> Ask:
    """Without a limit of its own, the answer may fill the context. Raises BadRequestError, naming the field."""
    body = _checked(body, model, REFUSED_IN_CHATS)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages must be a list with at least one message", "messages")
    plain = [_message(message, index) for index, message in enumerate(messages)]
    limits = [_value(body, name, int) for name in ("max_completion_tokens", "max_tokens")]
    limit = next((limit for limit in limits if limit is not None), None)
    top = _value(body, "top_logprobs", int)
    wanted = _value(body, "logprobs", bool)
    if top and not wanted:
        raise BadRequestError("top_logprobs needs logprobs: true", "top_logprobs")
    ask = _ask(body, (), 1 << 30 if limit is None else limit, (top or 0) if wanted else None, plain)
    return replace(ask, fills_context=limit is None)


def _checked(body: Any, model: str, refused: Mapping[str, tuple[Any, ...]]) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    named = body.get("model")
    if not isinstance(named, str | None):
        raise BadRequestError("model must be a name", "model")
    if named not in (None, model):
        raise BadRequestError(f"model {named[:100]!r} is not served here: this is {model}", "model")
    for field, harmless in refused.items():
        if body.get(field) not in harmless:
            raise BadRequestError(f"{field} is not supported", field)
    return body


def _value(body: Mapping[str, Any], field: str, kind: type) -> Any:
    value = body.get(field)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) <= HIGHEST else None
        if value is None:
            raise BadRequestError(f"{field} is too large a number", field)
    if value is not None and (not isinstance(value, kind) or (kind is not bool and isinstance(value, bool))):
        name = {float: "a number", int: "a whole number", bool: "true or false"}[kind]
        raise BadRequestError(f"{field} must be {name}", field)
    if isinstance(value, int) and not -HIGHEST <= value <= HIGHEST:
        raise BadRequestError(f"{field} is too large a number", field)
    return value


def _prompts(prompt: Any) -> tuple[str | list[int], ...]:
    if isinstance(prompt, str) or _is_ids(prompt):
        return (prompt,)
    if isinstance(prompt, list) and prompt and all(isinstance(one, str) or _is_ids(one) for one in prompt):
        return tuple(prompt)
    raise BadRequestError("prompt must be a text, a list of token ids, or a list of these", "prompt")


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
    )


def _message(message: Any, index: int) -> dict[str, Any]:
    """One message with its content as text."""
    field = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequestError(f"{field} must have a role and a content", "messages")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise BadRequestError(f"{field}: only parts of type text are supported", "messages")
        if not all(isinstance(part.get("text"), str) for part in content):
            raise BadRequestError(f"{field}: a part's text must be text", "messages")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRequestError(f"{field}: content must be text", "messages")
    return {**message, "content": content}


def _ask(
    body: Mapping[str, Any],
    prompts: tuple[str | list[int], ...],
    max_tokens: int,
    logprobs: int | None,
    messages: list[dict[str, Any]] | None = None,
) -> Ask:
    fields: dict[str, Any] = {name: _value(body, name, kind) for name, kind in SAMPLING.items()}
    if fields["temperature"] is None:
        fields["temperature"] = 1.0  # OpenAI's default; the engine's own is greedy
    for name, text in (("stop", str), ("stop_token_ids", int)):
        value = body.get(name)
        one = [value] if isinstance(value, text) and not isinstance(value, bool) else value
        fields[name] = one
        if one is None:
            continue
        if not isinstance(one, list) or not all(type(part) is text for part in one):
            raise BadRequestError(f"{name} must be a list of {text.__name__}", name)
        if len(one) > MAX_STOPS:
            raise BadRequestError(f"{name} has {len(one)} entries: at most {MAX_STOPS} are allowed", name)
    if logprobs is not None and logprobs > MAX_LOGPROBS:
        name = "logprobs" if messages is None else "top_logprobs"
        raise BadRequestError(f"{name} is {logprobs}: it must be at most {MAX_LOGPROBS}", name)
    choices = _value(body, "n", int)
    if choices is not None and not 1 <= choices <= MAX_CHOICES:
        raise BadRequestError(f"n must be between 1 and {MAX_CHOICES}", "n")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequestError("stream_options must be an object", "stream_options")
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        params = SamplingParams(max_tokens=max_tokens, logprobs=logprobs, n=choices or 1, **given)
    except EvalError as refusal:
        message = str(refusal).removeprefix("SamplingParams.")
        raise BadRequestError(message, message.split()[0]) from None
    stream = bool(_value(body, "stream", bool))
    return Ask(prompts, params, stream, bool(_value(options, "include_usage", bool)), messages)


# Answers


@dataclass(frozen=True)
class Piece:
    """A choice's newest text and tokens; `finish_reason` with the last one."""

    index: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: str | None
    first: bool = False


@dataclass(frozen=True)
class Usage:
    """Token counts; `cached` prompt tokens came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached: int

    def to_mapping(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(frozen=True)
class Envelope:
    """What is equal in all answers to one request. `spell` turns a token id into its text."""

    request_id: str
    model: str
    created: int
    is_chat: bool
    spell: Callable[[int], str]

    @classmethod
    def of(cls, request_id: str, model: str, is_chat: bool, spell: Callable[[int], str]) -> "Envelope":
        return cls(request_id, model, int(time.time()), is_chat, spell)

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """The answer in one piece; `pieces` are whole choices."""
        return self._document(
            "chat.completion" if self.is_chat else "text_completion",
            [self._choice(piece, "message") for piece in pieces],
        ) | {"usage": usage.to_mapping()}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """One event of a stream."""
        return self._document(self._stream_kind, [self._choice(piece, "delta")])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last event of a stream that was to include the usage."""
        return self._document(self._stream_kind, []) | {"usage": usage.to_mapping()}

    @property
    def _stream_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        identity = {"id": self.request_id, "object": kind, "created": self.created, "model": self.model}
        return {**identity, "choices": choices}

    def _choice(self, piece: Piece, part: str) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": piece.index, "finish_reason": piece.finish_reason, "logprobs": None}
        if piece.logprobs is not None:
            choice["logprobs"] = self._logprobs(piece.logprobs)
        if not self.is_chat:
            return {**choice, "text": piece.text}
        content: dict[str, Any] = {"content": piece.text}
        if piece.first or part == "message":
            content = {"role": "assistant", **content}
        return {**choice, part: content}

    def _logprobs(self, logprobs: tuple[TokenLogprobs, ...]) -> dict[str, Any]:
        if self.is_chat:
            return {
                "content": [
                    self._token(one.token_id, one.logprob)
                    | {"top_logprobs": [self._token(token_id, value) for token_id, value in one.top]}
                    for one in logprobs
                ]
            }
        return {
            "tokens": [self.spell(one.token_id) for one in logprobs],
            "token_logprobs": [finite(one.logprob) for one in logprobs],
            "top_logprobs": [{self.spell(token_id): finite(value) for token_id, value in one.top} for one in logprobs],
            "text_offset": [],
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        """`bytes` is None for a part of a character: its text holds what stands for it, not its own bytes."""
        text = self.spell(token_id)
        known = None if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": finite(logprob), "bytes": known}


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def error_document(message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's form of an error."""
    # What a client sent may be in it, half a character among that, which UTF-8 does not hold.
    message = message.encode(errors="backslashreplace").decode()
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}
