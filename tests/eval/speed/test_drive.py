"""The driver against an engine of known behaviour: arrivals, concurrency, and what becomes of failures."""

import time
from dataclasses import dataclass, field

import pytest

from eval.engine.engine import StepOutput
from eval.engine.telemetry import RequestRecord, StepRecord, Telemetry
from eval.errors import EvalError
from eval.speed.drive import run_block
from eval.speed.metrics import queue_ms
from eval.speed.traffic import PlannedRequest, Traffic

STEP_S = 0.004


@dataclass
class OneTokenAStepEngine:
    """Gives each request one token per step of STEP_S seconds; refuses prompts of 99 tokens, fails those of 98."""

    telemetry: Telemetry = field(default_factory=Telemetry)
    running: dict = field(default_factory=dict)
    added: list = field(default_factory=list)
    most_in_flight: int = 0

    def add_request(self, prompt, params=None, *, request_id=None, priority=0, arrival=None, **labels):
        assert params.ignore_eos
        if len(prompt) == 99:
            raise EvalError("needs 99 tokens, there are 50")
        self.added.append((request_id, arrival, priority, labels["trace_id"]))
        self.running[request_id] = [len(prompt), params.max_tokens, 0, arrival, None]
        self.most_in_flight = max(self.most_in_flight, len(self.running))
        return request_id

    def has_unfinished(self):
        return bool(self.running)

    def step(self):
        started = time.perf_counter()
        time.sleep(STEP_S)
        outputs = []
        for name, state in list(self.running.items()):
            prompt, wanted, done, arrival, scheduled = state
            state[4] = scheduled = started if scheduled is None else scheduled
            failed = prompt == 98
            state[2] = done = done + (not failed)
            ended = failed or done == wanted
            outputs.append(
                StepOutput(name, [] if failed else [7], ended, ("error" if failed else "length") if ended else None)
            )
            if ended:
                del self.running[name]
                self.telemetry.requests.append(record(name, prompt, done, 1e3 * (scheduled - arrival), failed))
        self.telemetry.steps.append(
            StepRecord(0, 0.0, 0, 0, 0, "fcfs", 0, len(outputs), 0.0, 0, 0.0, 0, None, 0, "fake", 0.0)
        )
        return outputs


def record(name, prompt, outputs, queued_ms, failed):
    latencies = (queued_ms, None, None, None, None, None)
    error = "numbers went wrong" if failed else None
    return RequestRecord(
        name, name, "", "0", name, "candidate", prompt, outputs, prompt + outputs, *latencies, 0, 0, 0, None, "", error
    )


def traffic(arrivals, concurrency=None, prompts=4, outputs=3):
    requests = [
        PlannedRequest(
            f"w/r0/{i}", at, [1] * (prompts[i] if isinstance(prompts, list) else prompts), outputs, i, False, 0
        )
        for i, at in enumerate(arrivals)
    ]
    return Traffic("w", 0, concurrency, requests)


def test_open_requests_keep_their_planned_arrival_and_waiting_counts_as_queueing():
    engine, planned = OneTokenAStepEngine(), traffic([0.0, 0.001, 0.05])
    block = run_block(engine, planned).block
    first = block.requests[0].arrival_s
    assert [request.arrival_s - first for request in block.requests] == pytest.approx([0.0, 0.001, 0.05], abs=1e-6)
    # It came while the first step ran, and waited for that step to end.
    assert queue_ms(block.requests[1]) == pytest.approx(1e3 * (STEP_S - 0.001), abs=2.5 * 1e3 * STEP_S)
    assert queue_ms(block.requests[1]) > 1
    assert engine.added[2][2] == 2


def test_closed_traffic_never_exceeds_its_concurrency_and_fills_it():
    engine = OneTokenAStepEngine()
    block = run_block(engine, traffic([0.0] * 7, concurrency=3)).block
    assert engine.most_in_flight == 3
    assert all(len(request.token_times_s) == 3 for request in block.requests)
    assert len(block.steps) == 9


def test_refused_and_failed_requests_are_kept_with_their_error():
    block = run_block(OneTokenAStepEngine(), traffic([0.0] * 3, concurrency=2, prompts=[99, 4, 98])).block
    refused, good, failed = sorted(block.requests, key=lambda request: request.request_id)
    assert (refused.error, refused.finished) == ("needs 99 tokens, there are 50", False)
    assert good.finished
    assert failed.error == "numbers went wrong"


def test_a_step_says_how_much_context_its_decodes_read():
    block = run_block(OneTokenAStepEngine(), traffic([0.0, 0.0], concurrency=2)).block
    assert [step.context_tokens for step in block.steps] == [0, 10, 12]
