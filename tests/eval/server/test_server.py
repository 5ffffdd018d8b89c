"""The server as OpenAI's own client sees it, and as its enemies do."""

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count

import httpx
import openai
import pytest
import uvicorn

from eval.engine import Engine, SamplingParams
from eval.server.app import ServerConfig, create_app
from eval.server.engine_thread import EngineThread, QueueFullError, StoppedError
from eval.server.protocol import SAMPLING
from eval.server.text_stream import TextStream

TEXT = "The list holds"


@contextmanager
def served(engine: Engine, **options) -> Iterator[str]:
    """The address of a server in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(engine, ServerConfig("tiny", **options))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        while not server.started:
            time.sleep(0.01)
        yield address
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
        engine.check_integrity()


@pytest.fixture(scope="module")
def engine(tiny_checkpoint) -> Engine:
    return Engine.from_checkpoint(tiny_checkpoint, num_blocks=200)


@pytest.fixture(scope="module")
def address(engine) -> Iterator[str]:
    with served(engine) as where:
        yield where


@pytest.fixture(scope="module")
def client(address) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def expected(tiny_checkpoint) -> Callable[..., str]:
    """What the engine gives by itself."""
    alone = Engine.from_checkpoint(tiny_checkpoint, num_blocks=200)

    def text(prompt, **params) -> str:
        return alone.generate([prompt], SamplingParams(**params))[0].text

    return text


def test_a_completion_is_the_engines_own(client, expected):
    answer = client.completions.create(model="tiny", prompt=TEXT, max_tokens=30, temperature=0)
    assert answer.choices[0].text == expected(TEXT, max_tokens=30)
    assert answer.object == "text_completion"
    assert answer.usage.completion_tokens == 30
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 30


def test_streamed_pieces_join_to_the_whole_text(client, expected):
    whole = expected(TEXT, max_tokens=60)
    stream = client.completions.create(
        model="tiny", prompt=TEXT, max_tokens=60, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 60


def test_several_prompts_with_several_choices_keep_their_order(client, expected):
    prompts = [TEXT, [5, 6, 7], "x"]
    for stream in (False, True):
        answer = client.completions.create(
            model="tiny", prompt=prompts, n=2, max_tokens=12, temperature=0, stream=stream
        )
        texts = [""] * 6
        for part in answer if stream else [answer]:
            for choice in part.choices:
                texts[choice.index] += choice.text
        assert texts == [expected(prompt, max_tokens=12) for prompt in prompts for _ in range(2)]


def test_choices_of_a_seeded_request_differ_and_come_again(client):
    def sample() -> list[str]:
        answer = client.completions.create(model="tiny", prompt=TEXT, n=3, max_tokens=20, temperature=1.0, seed=11)
        return [choice.text for choice in answer.choices]

    first = sample()
    assert len(set(first)) == 3
    assert sample() == first


def test_a_chat_goes_through_the_template(client, expected, tiny_checkpoint):
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    prompt = "<s>user: Hello</s>\n<s>assistant:"
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=20, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    whole = answer.choices[0].message.content
    chunks = list(
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=20, temperature=0, stream=True)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert whole == expected(prompt, max_tokens=20)


def test_a_stop_string_never_reaches_the_client(client, expected):
    free = expected(TEXT, max_tokens=60)
    stop = free[len(free) // 2 : len(free) // 2 + 3]
    wanted = free[: free.index(stop)]
    answer = client.completions.create(model="tiny", prompt=TEXT, max_tokens=60, temperature=0, stop=[stop, "%%%"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (wanted, "stop")
    seen = ""
    for chunk in client.completions.create(
        model="tiny", prompt=TEXT, max_tokens=60, temperature=0, stop=stop, stream=True
    ):
        seen += chunk.choices[0].text
        assert wanted.startswith(seen)
    assert seen == wanted


def test_logprobs_come_in_both_forms(client):
    plain = client.completions.create(model="tiny", prompt=TEXT, max_tokens=4, temperature=0, logprobs=2)
    logprobs = plain.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 4
    assert [max(top.values()) for top in logprobs.top_logprobs] == logprobs.token_logprobs
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert [len(token.top_logprobs) for token in chat.choices[0].logprobs.content] == [2, 2, 2]


def test_models_and_health(client, address):
    assert [model.id for model in client.models.list().data] == ["tiny"]
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"prompt": TEXT, "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": TEXT, "temperature": -1}, 400, "temperature"),
        ({"prompt": TEXT, "temperature": "hot"}, 400, "temperature must be a number"),
        ({"prompt": TEXT, "n": 1000}, 400, "n must be between"),
        ({"prompt": TEXT, "echo": True}, 400, "echo is not supported"),
        ({"prompt": TEXT, "logit_bias": {"5": 3}}, 400, "logit_bias"),
        ({"prompt": TEXT, "guided_json": {"type": "object"}}, 400, "guided_json"),
        ({"prompt": TEXT, "stop": [1]}, 400, "stop"),
        ({"prompt": {}}, 400, "prompt must be"),
        ({"prompt": ""}, 400, "no tokens"),
        ({"prompt": [7, 4000]}, 400, "vocabulary"),
        ({"prompt": TEXT, "max_tokens": 5000}, 400, "exceed the context of 512"),
        ({"prompt": TEXT, "model": "other"}, 400, "is not served here"),
        ({"prompt": TEXT, "model": [[1]]}, 400, "model must be a name"),
        ({"prompt": TEXT, "temperature": 10**400}, 400, "temperature is too large"),
        ({"prompt": TEXT, "top_k": 10**400}, 400, "top_k is too large"),
        ({"prompt": TEXT, "seed": -(10**400)}, 400, "seed is too large"),
        ({"prompt": TEXT, "repetition_penalty": 5e-324}, 400, "repetition_penalty"),
        ({"prompt": TEXT, "stop_token_ids": [True]}, 400, "stop_token_ids"),
        ({"prompt": TEXT, "stop_token_ids": [10**400]}, 400, "outside the vocabulary"),
        ({"prompt": TEXT, "stop": ["a"] * 65}, 400, "stop has 65 entries"),
        ({"prompt": TEXT, "logprobs": 21}, 400, "logprobs is 21"),
        ({"prompt": [10**400]}, 400, "vocabulary"),
        ({"prompt": ["a"] * 300}, 400, "prompts times n is 300"),
        ({"prompt": ["a"] * 3, "n": 128}, 400, "prompts times n is 384"),
        ([], 400, "JSON object"),
    ],
)
def test_a_bad_request_is_refused_by_name(address, body, status, named):
    answer = httpx.post(f"{address}/v1/completions", json=body)
    assert answer.status_code == status
    assert named in answer.json()["error"]["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "-1", "1" * 4000, "1" * 5000])
def test_no_number_in_any_field_is_a_defect(address, engine, number):
    fields = [*SAMPLING, "max_tokens", "n", "logprobs", "stop_token_ids", "best_of"]
    for field in fields:
        body = f'{{"prompt": [5, 6], "max_tokens": 2, "{field}": {number}}}'
        answer = httpx.post(f"{address}/v1/completions", content=body)
        if number == "-1" and field in ("seed", "presence_penalty", "frequency_penalty"):
            assert answer.status_code == 200
            continue
        assert answer.status_code == 400, (field, number)
        assert field in answer.json()["error"]["message"] or len(number) > 4300
    assert not engine.has_unfinished()


def test_half_a_character_is_refused_and_not_choked_on(address):
    half = '"a\\ud800"'
    for path, body in [
        ("completions", f'{{"prompt": {half}}}'),
        ("completions", f'{{"prompt": "a", "model": {half}}}'),
        ("chat/completions", f'{{"messages": [{{"role": "user", "content": {half}}}]}}'),
        ("chat/completions", f'{{"messages": [{{"role": {half}, "content": "a"}}]}}'),
    ]:
        answer = httpx.post(f"{address}/v1/{path}", content=body)
        assert answer.status_code == 400, body
        assert answer.json()["error"]["message"]
    answer = httpx.post(f"{address}/v1/completions", content=f'{{"prompt": "a", "max_tokens": 3, "stop": {half}}}')
    assert answer.status_code == 200


def test_parts_of_a_message_are_texts(address):
    for part in ({"type": "text"}, {"type": "text", "text": None}, {"type": "text", "text": 5}):
        body = {"messages": [{"role": "user", "content": [part]}]}
        answer = httpx.post(f"{address}/v1/chat/completions", json=body)
        assert "a part's text must be text" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_are_those_of_the_model_whatever_min_tokens_forbids(address, stream):
    body = {"prompt": [5], "max_tokens": 3, "min_tokens": 3, "stop_token_ids": list(range(60)), "logprobs": 20}
    answer = httpx.post(f"{address}/v1/completions", json=body | {"stream": stream, "temperature": 0})
    assert "Infinity" not in answer.text
    assert answer.status_code == 200


def test_requests_end_with_a_client_that_was_gone_before_the_first_event(tiny_checkpoint):
    """The events' own clean-up never runs then: a generator that was not begun has none."""
    engine = Engine.from_checkpoint(tiny_checkpoint, num_blocks=40)
    app = create_app(engine, ServerConfig("tiny"))
    body = json.dumps({"prompt": TEXT, "max_tokens": 480, "ignore_eos": True, "stream": True}).encode()
    received = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive():
        return next(received, {"type": "http.disconnect"})

    async def send(_message):
        await asyncio.sleep(0)

    async def gone() -> str:
        async with app.router.lifespan_context(app):
            headers = [(b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
            scope |= {"query_string": b"", "asgi": {"spec_version": "2.3"}}
            await app(scope, receive, send)
            deadline = time.monotonic() + 20
            while engine.has_unfinished() and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tiny") as client:
                return (await client.get("/metrics")).text

    assert 'requests_finished_total{finish_reason="abort"} 1.0' in asyncio.run(gone())
    assert not engine.has_unfinished()
    assert engine.pool.num_used == 0


def test_bodies_that_are_no_json_or_too_large_are_refused(engine, tiny_checkpoint):
    small = Engine.from_checkpoint(tiny_checkpoint, num_blocks=40)
    with served(small, max_body_bytes=1000, max_prompt_tokens=5) as address:
        assert httpx.post(f"{address}/v1/completions", content=b"{").status_code == 400
        assert httpx.post(f"{address}/v1/completions", content=b"[" * 900).status_code == 400
        assert httpx.post(f"{address}/v1/completions", json={"prompt": "x" * 2000}).status_code == 413
        long = httpx.post(f"{address}/v1/completions", json={"prompt": [3] * 6})
        assert "at most 5" in long.json()["error"]["message"]


def test_the_api_key_guards_the_api_and_not_the_probes(tiny_checkpoint):
    with served(Engine.from_checkpoint(tiny_checkpoint, num_blocks=40), api_key="sésame") as address:
        assert httpx.post(f"{address}/v1/completions", json={"prompt": "a"}).status_code == 401
        assert httpx.get(f"{address}/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
        good = {"Authorization": "Bearer sésame".encode()}
        assert httpx.get(f"{address}/v1/models", headers=good).status_code == 200
        assert httpx.get(f"{address}/health").status_code == httpx.get(f"{address}/metrics").status_code == 200


def test_the_choices_of_a_prompt_share_its_computation_and_drafts_are_counted(tiny_checkpoint):
    engine = Engine.from_checkpoint(tiny_checkpoint, num_blocks=40, speculative=str(tiny_checkpoint))
    prefilled = []
    execute = engine._runner.execute

    def spy(plan):
        prefilled.append(plan.prefill_tokens)
        return execute(plan)

    engine._runner.execute = spy
    with served(engine) as address:
        body = {"prompt": [5, 6, 7, 8, 9], "n": 4, "max_tokens": 8, "seed": 1, "ignore_eos": True}
        answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()
        metrics = httpx.get(f"{address}/metrics").text
    assert len({choice["text"] for choice in answer["choices"]}) == 4
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 32
    assert sum(prefilled) == 5
    drafted = float(re.search(r"^quantgate_speculative_draft_tokens_total (\S+)", metrics, re.M).group(1))
    accepted = [float(count) for count in re.findall(r"speculative_accepted_tokens_total{\S+} (\S+)", metrics)]
    assert 0 < sum(accepted) <= drafted


def test_a_full_queue_answers_429_with_a_time_to_wait(tiny_checkpoint):
    engine = Engine.from_checkpoint(tiny_checkpoint, max_num_seqs=1, num_blocks=40)
    with served(engine, max_waiting=1) as address:

        async def crowd() -> list[httpx.Response]:
            body = {"prompt": TEXT, "max_tokens": 150, "ignore_eos": True}
            async with httpx.AsyncClient(timeout=60) as client:
                return await asyncio.gather(*(client.post(f"{address}/v1/completions", json=body) for _ in range(8)))

        answers = asyncio.run(crowd())
    assert {answer.status_code for answer in answers} == {200, 429}
    assert all(answer.headers["retry-after"] == "1" for answer in answers if answer.status_code == 429)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks(tiny_checkpoint, stream):
    engine = Engine.from_checkpoint(tiny_checkpoint, num_blocks=40)
    with served(engine) as address:
        body = {"prompt": TEXT, "max_tokens": 480, "ignore_eos": True, "stream": stream, "n": 1}
        where = f"{address}/v1/completions"
        with suppress(httpx.ReadTimeout), httpx.stream("POST", where, json=body, timeout=0.15) as answer:
            next(answer.iter_raw())
        deadline = time.monotonic() + 20
        while engine.has_unfinished() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not engine.has_unfinished()
        assert 'requests_finished_total{finish_reason="abort"} 1.0' in httpx.get(f"{address}/metrics").text
        assert engine.pool.num_used == 0


def test_metrics_count_what_happened(tiny_checkpoint):
    with served(Engine.from_checkpoint(tiny_checkpoint, num_blocks=40)) as address:
        for _ in range(3):
            answer = httpx.post(
                f"{address}/v1/completions", json={"prompt": [9] * 40, "max_tokens": 5, "ignore_eos": True}
            )
            assert answer.status_code == 200
        usage = answer.json()["usage"]
        lines = dict(
            line.rsplit(" ", 1) for line in httpx.get(f"{address}/metrics").text.splitlines() if line[0] != "#"
        )
    assert float(lines['quantgate_requests_finished_total{finish_reason="length"}']) == 3
    assert float(lines["quantgate_generation_tokens_total"]) == 15
    assert float(lines["quantgate_prompt_tokens_total"]) == 120
    assert (
        float(lines["quantgate_prefix_cache_hit_tokens_total"]) == 2 * usage["prompt_tokens_details"]["cached_tokens"]
    )
    assert float(lines["quantgate_time_to_first_token_seconds_count"]) == 3
    assert float(lines["quantgate_requests_running"]) == 0


def test_events_are_well_formed(address):
    body = {"prompt": TEXT, "max_tokens": 3, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["object"] == "text_completion" for line in lines[:-1])


def streamed(address: str, **body) -> list[str]:
    asked = {"prompt": [5, 6, 7], "max_tokens": 4, "stream": True, **body}
    with httpx.stream("POST", f"{address}/v1/completions", json=asked, timeout=20) as answer:
        return [line.removeprefix("data: ") for line in answer.iter_lines() if line]


def test_a_model_without_a_tokenizer_streams_token_ids(tiny_checkpoint):
    engine = Engine.from_checkpoint(tiny_checkpoint, num_blocks=40)
    engine.tokenizer = None
    with served(engine) as address:
        events = streamed(address, logprobs=0, ignore_eos=True)
    assert events[-1] == "[DONE]"
    tokens = [token for event in events[:-1] for token in json.loads(event)["choices"][0]["logprobs"]["tokens"]]
    assert len(tokens) == 4
    assert all(token.isdigit() for token in tokens)


def test_a_stream_that_fails_midway_ends_with_an_error(tiny_checkpoint, monkeypatch):
    def broken(self, token_ids):
        raise ValueError("cannot decode")

    monkeypatch.setattr(TextStream, "add", broken)
    with served(Engine.from_checkpoint(tiny_checkpoint, num_blocks=40)) as address:
        (event,) = streamed(address)
        assert json.loads(event)["error"] == {
            "message": "cannot decode",
            "type": "server_error",
            "param": None,
            "code": None,
        }


def test_a_stopped_engine_says_so_and_does_not_blame_the_request(engine):
    thread = EngineThread(engine, 1, lambda *_: None)
    thread.start()
    thread.stop()
    with pytest.raises(StoppedError):
        asyncio.run(thread.submit([[5]], SamplingParams(), "late"))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_dies_midway_is_an_error_and_no_short_answer(tiny_checkpoint, stream):
    engine = Engine.from_checkpoint(tiny_checkpoint, num_blocks=40)
    step, steps = engine.step, count()

    def dying():
        if next(steps) == 3:
            raise RuntimeError("gone")
        return step()

    engine.step = dying
    body = {"prompt": [5, 6], "max_tokens": 50, "ignore_eos": True, "stream": stream}
    with served(engine) as address:
        answer = httpx.post(f"{address}/v1/completions", json=body)
    assert answer.status_code == (200 if stream else 500)
    last = json.loads(answer.text.strip().split("\n")[-1].removeprefix("data: "))
    assert last["error"]["message"] == "the engine stopped before the answer was whole"
    assert "abort" not in answer.text


def test_an_answer_may_fill_a_cache_that_is_smaller_than_the_context(tiny_checkpoint):
    with served(Engine.from_checkpoint(tiny_checkpoint, num_blocks=6)) as address:
        [model] = httpx.get(f"{address}/v1/models").json()["data"]
        body = {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}
        answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
        refused = httpx.post(f"{address}/v1/completions", json={"prompt": [5], "max_tokens": 200})
    assert model["max_model_len"] == 96
    assert answer.json()["usage"]["total_tokens"] == 96
    assert refused.status_code == 400
    assert "raise kv_cache_bytes" in refused.json()["error"]["message"]


def plans_of(engine: Engine) -> list[int]:
    """How many prompts each step of the engine computes, from now on."""
    prompts, execute = [], engine._runner.execute

    def spy(plan):
        prompts.append(len(plan.prefills))
        return execute(plan)

    engine._runner.execute = spy
    return prompts


def test_the_prompts_of_a_request_enter_together_or_not_at_all(tiny_checkpoint):
    engine = Engine.from_checkpoint(tiny_checkpoint, num_blocks=40)
    prompts = plans_of(engine)
    with served(engine) as address:
        where = f"{address}/v1/completions"
        refused = httpx.post(where, json={"prompt": [[5], [6] * 600], "max_tokens": 1})
        assert refused.status_code == 400
        assert prompts == []
        assert httpx.post(where, json={"prompt": [[5], [6], [7, 8], [9]], "max_tokens": 1}).status_code == 200
    assert prompts == [4]


def test_prompts_that_cannot_all_wait_are_refused_together(tiny_checkpoint):
    engine = Engine.from_checkpoint(tiny_checkpoint, num_blocks=40)

    async def crowd() -> None:
        thread = EngineThread(engine, 3, lambda *_: None)
        params = SamplingParams(max_tokens=1)
        first = asyncio.create_task(thread.submit([[5], [6]], params, "first"))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await thread.submit([[7], [8]], params, "second")
        third = asyncio.create_task(thread.submit([[7]], params, "third"))
        await asyncio.sleep(0)
        thread.start()
        assert [len(streams) for streams in await asyncio.gather(first, third)] == [2, 1]
        await asyncio.to_thread(thread.stop)

    asyncio.run(crowd())
    assert not engine.has_unfinished()


def test_a_request_arrives_when_it_is_submitted_and_not_when_the_running_step_ends(tiny_checkpoint):
    engine = Engine.from_checkpoint(tiny_checkpoint, num_blocks=40)
    step, begun, held = engine.step, threading.Event(), threading.Event()

    def holding():
        begun.set()
        held.wait(20)
        return step()

    engine.step = holding

    async def submitted() -> tuple[float, float]:
        thread = EngineThread(engine, 9, lambda *_: None)
        thread.start()
        await thread.submit([[5]], SamplingParams(), "first")
        await asyncio.to_thread(begun.wait, 20)
        late = asyncio.create_task(thread.submit([[6]], SamplingParams(), "late"))
        await asyncio.sleep(0)
        released = time.perf_counter()
        held.set()
        [stream] = await late
        await asyncio.to_thread(thread.stop)
        return stream.request.arrival, released

    arrival, released = asyncio.run(submitted())
    assert arrival < released
