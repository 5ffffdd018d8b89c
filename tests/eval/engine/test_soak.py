"""Ten thousand requests leave nothing behind."""

import gc
import random

import psutil

from eval.engine import Engine, EngineConfig, SamplingParams
from eval.engine.request import Request
from eval.speed.memory_probe import _return_free_memory

REQUESTS = 10_000
ABORTED = 0.05
MOST_LIVE = 600
WARM = 5_000
MOST_GROWTH_BYTES = 16 * 2**20


def resident_bytes():
    gc.collect()
    _return_free_memory()
    return psutil.Process().memory_info().rss


def requests_alive():
    gc.collect()
    # `isinstance` would ask every object for its class, at which lazy ones of other libraries load.
    return sum(type(kept) is Request for kept in gc.get_objects())


def test_ten_thousand_requests_with_aborts_leave_the_pool_whole_and_the_memory_flat(tiny_model):
    model = tiny_model("llama", vocab_size=32, hidden_size=16, num_hidden_layers=1, intermediate_size=16)
    options = {"block_size": 2, "num_blocks": 300, "max_num_seqs": 256, "speculative": "prompt-lookup"}
    engine = Engine(model, None, EngineConfig(**options))
    chance, alive = random.Random(1), requests_alive()
    live: dict[str, None] = {}
    reasons: dict[str, int] = {}
    added = preempted = aborted = resident = 0
    while added < REQUESTS or engine.has_unfinished():
        for _ in range(min(chance.randrange(200), MOST_LIVE - len(live), REQUESTS - added)):
            prompt = [chance.randrange(30) for _ in range(chance.randrange(1, 4))]
            params = SamplingParams(
                max_tokens=chance.randrange(3, 8), temperature=chance.choice([0.0, 1.0]), seed=added
            )
            live[engine.add_request(prompt, params)] = None
            added += 1
        for output in engine.step():
            if output.finished:
                del live[output.request_id]
        while live and aborted < ABORTED * added:
            request = chance.choice(list(live))
            engine.abort(request)
            del live[request]
            aborted += 1
        for record in engine.telemetry.requests:
            reasons[record.finish_reason] = reasons.get(record.finish_reason, 0) + 1
            preempted += record.preemptions
        engine.telemetry.clear()
        engine.check_integrity()
        if added >= WARM and not resident:
            resident = resident_bytes()
    assert reasons == {"length": REQUESTS - aborted, "abort": aborted}
    assert aborted >= ABORTED * REQUESTS
    assert preempted > 0
    assert engine.pool.num_used == 0
    assert not live
    assert requests_alive() == alive
    assert resident_bytes() - resident < MOST_GROWTH_BYTES
