"""The HTTP side: routes, limits and keys in front of the engine's thread.

The one idea: everything that can be refused is refused before the first byte of an answer, so that a stream, once
begun, only ends in `[DONE]`, in an error event, or with the client.
"""

import asyncio
import contextlib
import hmac
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from eval.engine import Engine, EvalError
from eval.engine.prompts import encode
from eval.engine.stopping import completion_text
from eval.server.engine_thread import EngineThread, QueueFullError, RequestStream, StoppedError
from eval.server.metrics import Metrics
from eval.server.protocol import (
    Ask,
    BadRequestError,
    Envelope,
    Piece,
    Usage,
    error_document,
    read_chat,
    read_completion,
)
from eval.server.text_stream import TextStream

RETRY = {"Retry-After": "1"}


@dataclass(frozen=True)
class ServerConfig:
    """`max_waiting`: requests that may wait for their first step; more are answered 429. `api_key` None: no key is
    asked for."""

    model_name: str
    api_key: str | None = None
    max_body_bytes: int = 4 * 2**20
    max_prompt_tokens: int | None = None
    max_waiting: int = 256


class Refusal(Exception):
    """An answer that is an error."""

    def __init__(
        self, status: int, message: str, kind: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.response = JSONResponse(error_document(message, kind, param), status, headers)


class GenerationError(Exception):
    """The engine could not finish a request."""


class EventStream(StreamingResponse):
    """Server-sent events, after which the requests are closed: also when the client was gone before the first event,
    and the events' own clean-up therefore never ran."""

    def __init__(self, events: AsyncIterator[str], streams: list[RequestStream]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for stream in self._streams:
                stream.close()


def create_app(engine: Engine, config: ServerConfig) -> Starlette:
    """The application; its lifespan starts and stops the engine's thread."""
    server = Server(engine, config)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        server.thread.start()
        try:
            yield
        finally:
            await asyncio.to_thread(server.thread.stop)

    return Starlette(
        lifespan=lifespan,
        routes=[
            Route("/health", server.health),
            Route("/metrics", server.metrics_text),
            Route("/v1/models", server.guarded(server.models)),
            Route("/v1/completions", server.guarded(server.completions), methods=["POST"]),
            Route("/v1/chat/completions", server.guarded(server.chat), methods=["POST"]),
        ],
    )


class Server:
    """The handlers, and what they share."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.metrics = Metrics(engine)
        self.thread = EngineThread(engine, config.max_waiting, self.metrics.observe)

    def guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """The handler behind the API key, with refusals turned into answers."""

        async def guard(request: Request) -> Response:
            try:
                self._check_key(request)
                return await handler(request)
            except Refusal as refusal:
                return refusal.response
            except BadRequestError as mistake:
                return JSONResponse(error_document(str(mistake), "invalid_request_error", mistake.param), 400)
            except ClientDisconnect:
                return Response(status_code=499)

        return guard

    async def health(self, _request: Request) -> Response:
        alive = self.thread.is_alive
        return JSONResponse({"status": "ok" if alive else "the engine has stopped"}, 200 if alive else 503)

    async def metrics_text(self, _request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, _request: Request) -> Response:
        model = {"id": self.config.model_name, "object": "model", "owned_by": "quantgate"}
        return JSONResponse({"object": "list", "data": [model | {"max_model_len": self.engine.context_tokens}]})

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, read_completion(await self._body(request), self.config.model_name), "cmpl")

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, read_chat(await self._body(request), self.config.model_name), "chatcmpl")

    # The parts of an answer

    def _check_key(self, request: Request) -> None:
        if self.config.api_key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode("latin-1"), self.config.api_key.encode()):
            raise Refusal(401, "wrong or missing API key", "authentication_error")

    async def _body(self, request: Request) -> Any:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.config.max_body_bytes:
                raise Refusal(
                    413, f"the body is larger than {self.config.max_body_bytes} bytes", "invalid_request_error"
                )
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise Refusal(400, "the body is not valid JSON", "invalid_request_error") from None

    async def _answer(self, request: Request, ask: Ask, kind: str) -> Response:
        envelope = Envelope.of(
            f"{kind}-{uuid.uuid4().hex}", self.config.model_name, ask.messages is not None, self._spell
        )
        streams = await self._submit(ask, envelope.request_id)
        if ask.stream:
            return EventStream(self._events(envelope, ask, streams), streams)
        gone = asyncio.ensure_future(_disconnected(request))
        whole = asyncio.ensure_future(self._whole(streams))
        try:
            await asyncio.wait([gone, whole], return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                raise ClientDisconnect
            return JSONResponse(envelope.whole(whole.result(), _usage(streams, ask.params.n)))
        except GenerationError as failure:
            raise Refusal(500, str(failure), "server_error") from None
        finally:
            gone.cancel()
            whole.cancel()
            for stream in streams:
                stream.close()

    async def _submit(self, ask: Ask, request_id: str) -> list[RequestStream]:
        """One stream per prompt and choice, a prompt's choices together; all of them or none."""
        count = ask.params.n * max(1, len(ask.prompts))
        if count > self.config.max_waiting:
            message = f"prompts times n is {count}: at most {self.config.max_waiting} can wait here at once"
            raise Refusal(400, message, "invalid_request_error", "n" if ask.params.n > 1 else "prompt")
        prompts = [self._chat_ids(ask.messages)] if ask.messages is not None else list(map(self._ids, ask.prompts))
        longest = max(map(len, prompts))
        if self.config.max_prompt_tokens is not None and longest > self.config.max_prompt_tokens:
            message = f"the prompt has {longest} tokens: at most {self.config.max_prompt_tokens} are allowed"
            raise Refusal(400, message, "invalid_request_error", "prompt")
        try:
            return await self.thread.submit(
                prompts, ask.params_within(self.engine.context_tokens - longest), request_id
            )
        except EvalError as failure:
            raise Refusal(400, str(failure), "invalid_request_error") from None
        except QueueFullError:
            raise Refusal(429, "too many requests wait; try again", "rate_limit_error", headers=RETRY) from None
        except StoppedError:
            raise Refusal(503, "the server takes no more requests", "server_error", headers=RETRY) from None

    def _ids(self, prompt: str | list[int]) -> list[int]:
        try:
            if isinstance(prompt, str):
                prompt.encode()
            return encode(prompt, self.engine.tokenizer, self.engine.vocab_size)
        except UnicodeEncodeError:
            message = "the prompt holds half a character (a surrogate without its other half), which is no text"
            raise Refusal(400, message, "invalid_request_error", "prompt") from None
        except EvalError as refusal:
            raise Refusal(400, str(refusal), "invalid_request_error", "prompt") from None

    def _chat_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        tokenizer = self.engine.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise Refusal(400, "this model has no chat template: use /v1/completions", "invalid_request_error")
        try:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except Exception as failure:  # a template raises what its author wrote
            raise Refusal(
                400, f"the chat template refuses these messages: {failure}", "invalid_request_error"
            ) from None
        return list(ids)

    def _spell(self, token_id: int) -> str:
        return str(self.engine.tokenizer.decode([token_id])) if self.engine.tokenizer is not None else str(token_id)

    async def _whole(self, streams: list[RequestStream]) -> list[Piece]:
        async def one(index: int, stream: RequestStream) -> Piece:
            pieces = [piece async for piece in self._pieces(index, stream)]
            logprobs = None
            if stream.request.params.logprobs is not None:
                logprobs = tuple(one for piece in pieces for one in piece.logprobs or ())
            return Piece(index, "".join(piece.text for piece in pieces), logprobs, pieces[-1].finish_reason)

        return list(await asyncio.gather(*(one(index, stream) for index, stream in enumerate(streams))))

    async def _events(self, envelope: Envelope, ask: Ask, streams: list[RequestStream]) -> AsyncIterator[str]:
        """Server-sent events, the choices' pieces as they come."""
        ready: asyncio.Queue[Piece | Exception] = asyncio.Queue()

        async def forward(index: int, stream: RequestStream) -> None:
            try:
                async for piece in self._pieces(index, stream):
                    ready.put_nowait(piece)
            except Exception as failure:  # whatever it is, the client must not wait for the rest
                ready.put_nowait(failure)

        tasks = [asyncio.create_task(forward(index, stream)) for index, stream in enumerate(streams)]
        try:
            going = len(streams)
            while going:
                piece = await ready.get()
                if isinstance(piece, Exception):
                    yield _event(error_document(str(piece), "server_error"))
                    return
                going -= piece.finish_reason is not None
                yield _event(envelope.chunk(piece))
            if ask.include_usage:
                yield _event(envelope.usage_chunk(_usage(streams, ask.params.n)))
            yield "data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()

    async def _pieces(self, index: int, stream: RequestStream) -> AsyncIterator[Piece]:
        request = stream.request
        text = TextStream(self.engine.tokenizer, tuple(request.params.stop), request.params.min_tokens)
        seen, first = 0, True
        async for event in stream:
            if event.finish_reason in ("error", "abort"):  # whoever still listens has not asked for an abort
                raise GenerationError(request.error or "the engine stopped before the answer was whole")
            new = text.add(event.new_token_ids)
            if event.finish_reason is not None:
                new += text.finish(completion_text(request, self.engine.tokenizer))
            logprobs = None
            if request.params.logprobs is not None:
                logprobs = tuple(request.logprobs[seen : seen + len(event.new_token_ids)])
            seen += len(event.new_token_ids)
            if new or logprobs or first or event.finish_reason is not None:
                yield Piece(index, new, logprobs, event.finish_reason, first)
                first = False


def _usage(streams: list[RequestStream], choices: int) -> Usage:
    requests = [stream.request for stream in streams]
    return Usage(
        sum(request.num_prompt_tokens for request in requests[::choices]),
        sum(request.num_output_tokens for request in requests),
        sum(request.prompt_cache_hit or 0 for request in requests[::choices]),
    )


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n"


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
