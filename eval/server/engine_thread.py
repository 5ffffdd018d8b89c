"""The engine in a thread of its own, and its requests as asynchronous streams.

The one idea: only this thread touches the engine. Others leave it commands (add, abort) and are handed events on their
own event loop, so a slow client never holds up a step, and a client that is gone frees its blocks at the next one.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

from eval.engine import Engine, EvalError, SamplingParams
from eval.engine.request import Request
from eval.engine.telemetry import RequestRecord, Speculation, StepRecord

Observer = Callable[[list[RequestRecord], list[StepRecord], Speculation], None]


@dataclass(frozen=True)
class Event:
    """Tokens that a request got in one step; `finish_reason` is None while it goes on."""

    request: Request
    new_token_ids: list[int]
    finish_reason: str | None


class QueueFullError(Exception):
    """As many requests wait as may wait; later there may be room."""


class StoppedError(Exception):
    """The engine takes nothing any more: it was told to stop, or has failed."""


@dataclass
class _Subscriber:
    request: Request
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event]

    def send(self, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class RequestStream:
    """One sample's events until it ends; `close` aborts its request, with all samples, if it has not."""

    def __init__(self, thread: "EngineThread", request: Request, events: "asyncio.Queue[Event]") -> None:
        self.request = request
        self._thread = thread
        self._events = events
        self._ended = False

    async def __aiter__(self) -> AsyncIterator[Event]:
        while not self._ended:
            event = await self._events.get()
            self._ended = event.finish_reason is not None
            yield event

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            self._thread.abort(self.request.group_id)


class EngineThread:
    """Invariant: every sample in the engine has one subscriber, and it gets exactly one event with a finish reason."""

    def __init__(self, engine: Engine, max_waiting: int, observer: Observer) -> None:
        """max_waiting: how many requests may wait for their first step; `observer` sees the telemetry of every step,
        in this thread, after which it is forgotten."""
        self.engine = engine
        self.max_waiting = max_waiting
        self._observer = observer
        self._commands: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._ended = False
        self._on_their_way = 0
        self._subscribers: dict[str, dict[int, _Subscriber]] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends what still runs, with reason "abort", and waits for the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    async def submit(
        self, prompts: Sequence[list[int]], params: SamplingParams, request_id: str
    ) -> "list[RequestStream]":
        """The streams of the prompts' samples, a prompt's together, once the engine has taken in all prompts between
        two steps; or none of them. Each prompt is a request of its own, `request_id`-0 the first.

        Raises EvalError when one can never run, QueueFullError when not all of them may wait (where nothing waits, all
        may), and StoppedError.
        """
        arrival = time.perf_counter()
        loop = asyncio.get_running_loop()
        accepted: asyncio.Future[list[_Subscriber]] = loop.create_future()
        new = params.n * len(prompts)
        if self.waiting >= min(self.max_waiting, max(1, self.max_waiting - new + 1)):
            raise QueueFullError
        self._on_their_way += new
        named = {f"{request_id}-{index}": prompt for index, prompt in enumerate(prompts)}
        self._post(lambda: self._add(named, params, arrival, loop, accepted))
        try:
            subscribers = await asyncio.shield(accepted)
        except asyncio.CancelledError:
            for each in named:
                self.abort(each)
            raise
        return [RequestStream(self, subscriber.request, subscriber.events) for subscriber in subscribers]

    def abort(self, request_id: str) -> None:
        self._post(lambda: self._abort(request_id))

    @property
    def waiting(self) -> int:
        """Requests that have no step yet, those still on their way to the engine among them."""
        return self.engine.scheduler.num_waiting + self._on_their_way

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            if not self._ended:
                self._commands.append(command)
                self._wake.notify()
                return
        command()

    def _run(self) -> None:
        try:
            while self._obey():
                outputs = self.engine.step()
                for output in outputs:
                    subscribers = self._subscribers.get(output.request_id, {})
                    subscriber = subscribers.get(output.index)
                    if subscriber is not None:
                        subscriber.send(Event(subscriber.request, output.new_token_ids, output.finish_reason))
                        if output.finished:
                            del subscribers[output.index]
                        if not subscribers:
                            del self._subscribers[output.request_id]
                self._observe()
        except BaseException as failure:
            self.failure = failure
            raise
        finally:
            self._stopping = True
            with self._wake:
                self._ended = True
                commands, self._commands = self._commands, []
            for command in commands:
                command()
            for request_id in list(self._subscribers):
                self._abort(request_id)

    def _obey(self) -> bool:
        """Does what was asked for; waits while there is nothing to do. False: the thread is to end."""
        while True:
            with self._wake:
                while not self._commands and not self._stopping and not self.engine.has_unfinished():
                    self._wake.wait()
                if self._stopping:
                    return False
                commands, self._commands = self._commands, []
            for command in commands:
                command()
            self._observe()
            if self.engine.has_unfinished():
                return True

    def _observe(self) -> None:
        telemetry = self.engine.telemetry
        if telemetry.requests or telemetry.steps:
            self._observer(list(telemetry.requests), list(telemetry.steps), telemetry.speculation)
            telemetry.clear()

    def _add(
        self,
        prompts: Mapping[str, list[int]],
        params: SamplingParams,
        arrival: float,
        loop: asyncio.AbstractEventLoop,
        accepted: "asyncio.Future[list[_Subscriber]]",
    ) -> None:
        added: dict[str, list[_Subscriber]] = {}
        refusal: EvalError | StoppedError | None = None
        try:
            if self._stopping:
                raise StoppedError
            for request_id, prompt in prompts.items():
                self.engine.add_request(prompt, params, request_id=request_id, arrival=arrival)
                samples = self.engine.samples_of(request_id)
                added[request_id] = [_Subscriber(sample, loop, asyncio.Queue()) for sample in samples]
                self._subscribers[request_id] = dict(enumerate(added[request_id]))
        except (EvalError, StoppedError) as failure:
            refusal = failure
            for request_id in added:
                self._abort(request_id)

        def answer() -> None:
            self._on_their_way -= params.n * len(prompts)
            if accepted.cancelled():
                return
            if refusal is not None:
                accepted.set_exception(refusal)
            else:
                accepted.set_result([subscriber for subscribers in added.values() for subscriber in subscribers])

        try:
            loop.call_soon_threadsafe(answer)
        except RuntimeError:
            for request_id in added:
                self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        subscribers = self._subscribers.pop(request_id, {})
        if subscribers:
            self.engine.abort(request_id)
        for subscriber in subscribers.values():
            subscriber.send(Event(subscriber.request, [], "abort"))
