"""Workload files: every mistake is one line, and the planned traffic is what was asked for, the same each time."""

import json

import numpy as np
import pytest

from eval.errors import EvalError
from eval.speed.plan import has_priorities, plan_traffic
from eval.speed.prompts import DISTINCT_TOKENS, PromptSource
from eval.speed.traffic import Traffic
from eval.speed.workload import load_workload, ready_workloads

CLOSED = "mode: closed\nconcurrency: 2\nrequests: 6\nwarmup: 2\ninput_tokens: 20\noutput_tokens: {uniform: [3, 5]}\n"
TEXT = [int(token) for token in np.random.default_rng(0).integers(0, 90, 5000)]


def write(tmp_path, text, name="w.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def planned(workload, repeat=0, source=None):
    return plan_traffic(workload, repeat, source or PromptSource(TEXT))


@pytest.mark.parametrize("name", ready_workloads())
def test_ready_workloads_plan(name):
    for point in load_workload(name).points():
        traffic = planned(point)
        assert len(traffic.requests) == point.warmup + point.requests


def test_the_promised_workloads_ship():
    promised = {"chat", "code-completion", "rag-long-prompt", "summarize-batch", "mixed-long-short"}
    assert promised | {"demo-closed", "demo-open"} <= set(ready_workloads())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            CLOSED.replace("concurrency", "concurency"),
            "w.yaml:2: unknown key 'concurency'; did you mean 'concurrency'?",
        ),
        (CLOSED.replace("concurrency: 2\n", ""), "needs the key 'concurrency'"),
        (CLOSED + "rate: 3\n", "'rate' belongs to mode 'open'"),
        (CLOSED.replace("requests: 6\n", ""), "'requests' is missing"),
        (CLOSED.replace("input_tokens: 20\n", ""), "'input_tokens' is missing"),
        (CLOSED.replace("20", "0"), "greater than 0"),
        (CLOSED.replace("[3, 5]", "[5, 3]"), "low end 5 is above"),
        (CLOSED + "burstiness: 2\n", "arrivals: gamma"),
        (CLOSED + "classes: [{name: a, share: 0.5}]\n", "add up to 0.5"),
        ("mode: trace\ntrace: none.jsonl\n", "no file"),
        ("mode: [", "not valid YAML"),
    ],
)
def test_a_mistake_is_one_line_with_file_and_key(tmp_path, text, says):
    with pytest.raises(EvalError) as caught:
        load_workload(write(tmp_path, text))
    assert says in str(caught.value)
    assert "w.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_name_gets_the_closest():
    with pytest.raises(EvalError, match="did you mean 'chat'"):
        load_workload("chatt")


def test_same_seed_same_traffic_and_another_repeat_another(tmp_path):
    workload = load_workload(write(tmp_path, CLOSED))
    assert planned(workload) == planned(workload)
    assert planned(workload, 0).requests[0].prompt_token_ids != planned(workload, 1).requests[0].prompt_token_ids


def test_traffic_survives_the_pipe_to_a_worker(tmp_path):
    traffic = planned(load_workload(write(tmp_path, CLOSED)))
    assert Traffic.from_mapping(json.loads(json.dumps(traffic.to_mapping()))) == traffic


def test_no_two_prompts_begin_alike_even_when_the_text_runs_out():
    source = PromptSource(TEXT[:64])
    rng = np.random.default_rng(0)
    prompts = [source.draw(rng, 32) for _ in range(300)]
    assert len({tuple(prompt[:DISTINCT_TOKENS]) for prompt in prompts}) == 300
    assert all(len(prompt) == 32 for prompt in prompts)


def test_shared_prefix_is_shared_by_its_part_of_the_requests(tmp_path):
    text = CLOSED.replace("requests: 6", "requests: 200") + "shared_prefix: {share: 0.5, tokens: 12}\n"
    requests = planned(load_workload(write(tmp_path, text))).requests
    sharing = [request for request in requests if request.shared_prefix_tokens]
    assert 70 < len(sharing) < 130
    assert len({tuple(request.prompt_token_ids[:12]) for request in sharing}) == 1
    assert {len(request.prompt_token_ids) for request in requests} == {20}


def test_poisson_and_gamma_keep_the_rate_and_gamma_the_spread(tmp_path):
    text = "mode: open\nrate: 50\nrequests: 4000\ninput_tokens: 8\noutput_tokens: 2\n"
    for more, spread in [("", 1.0), ("arrivals: gamma\nburstiness: 4\n", 0.5)]:
        times = [
            r.arrival_s
            for r in planned(load_workload(write(tmp_path, text + more)), source=PromptSource(TEXT)).requests
        ]
        gaps = np.diff(times)
        assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.1)
        assert np.std(gaps) / np.mean(gaps) == pytest.approx(spread, rel=0.1)


def test_sweep_becomes_named_points(tmp_path):
    text = CLOSED.replace("mode: closed\nconcurrency: 2", "mode: sweep\nsweep: {rate: [0.5, 2]}")
    points = load_workload(write(tmp_path, text)).points()
    assert [(point.name, point.mode, point.rate) for point in points] == [
        ("w.rate-0_5", "open", 0.5),
        ("w.rate-2", "open", 2),
    ]


def test_classes_have_their_own_lengths_and_priorities(tmp_path):
    text = CLOSED.replace("requests: 6", "requests: 300") + (
        "classes:\n  - {name: short, share: 0.8}\n  - {name: long, share: 0.2, priority: 3, input_tokens: 40}\n"
    )
    requests = planned(load_workload(write(tmp_path, text))).requests
    assert {(len(request.prompt_token_ids), request.priority) for request in requests} == {(20, 0), (40, 3)}
    assert 0.1 < np.mean([request.priority == 3 for request in requests]) < 0.3


@pytest.mark.parametrize(("first", "second", "differ"), [(0, 1, True), (0, 0, False), (2, 2, False)])
def test_a_workload_has_priorities_where_its_requests_differ_in_them(tmp_path, first, second, differ):
    classes = "".join(f"  - {{name: c{p}-{i}, share: 0.5, priority: {p}}}\n" for i, p in enumerate((first, second)))
    assert has_priorities(load_workload(write(tmp_path, f"{CLOSED}classes:\n{classes}"))) == differ
    rows = [{"timestamp": 1, "input_tokens": 4, "output_tokens": 1, "priority": p} for p in (first, second)]
    write(tmp_path, "\n".join(map(json.dumps, rows)), "t.jsonl")
    assert has_priorities(load_workload(write(tmp_path, "mode: trace\ntrace: t.jsonl\n"))) == differ


@pytest.mark.parametrize("name", ready_workloads())
def test_only_the_mixed_ready_workload_has_priorities(name):
    assert has_priorities(load_workload(name)) == (name == "mixed-long-short")


def test_trace_replays_its_timestamps(tmp_path):
    rows = [
        {"timestamp": 105.5, "input_tokens": 9, "output_tokens": 2},
        {"timestamp": 100, "input_tokens": 4, "output_tokens": 1},
    ]
    write(tmp_path, "\n".join(map(json.dumps, rows)), "t.jsonl")
    requests = planned(load_workload(write(tmp_path, "mode: trace\ntrace: t.jsonl\n"))).requests
    assert [(r.arrival_s, len(r.prompt_token_ids), r.output_tokens) for r in requests] == [(0.0, 4, 1), (5.5, 9, 2)]


def test_a_bad_trace_line_is_named(tmp_path):
    write(tmp_path, '{"timestamp": 1, "input_tokens": 3}\n', "t.jsonl")
    workload = load_workload(write(tmp_path, "mode: trace\ntrace: t.jsonl\n"))
    with pytest.raises(EvalError, match=r"t.jsonl:1: no 'output_tokens'"):
        planned(workload)


def test_lengths_come_from_a_file(tmp_path):
    write(tmp_path, "7\n\n9\n", "lengths.txt")
    workload = load_workload(write(tmp_path, CLOSED.replace("20", "{file: lengths.txt}")))
    assert {len(request.prompt_token_ids) for request in planned(workload).requests} <= {7, 9}
    write(tmp_path, "7\nx\n", "lengths.txt")
    with pytest.raises(EvalError, match=r"lengths.txt:2: 'x' is not a whole number"):
        planned(workload)


def test_lognormal_stays_in_its_bounds(tmp_path):
    text = CLOSED.replace("20", "{lognormal: {median: 30, sigma: 1.5, min: 8, max: 60}}").replace(
        "requests: 6", "requests: 500"
    )
    lengths = [len(request.prompt_token_ids) for request in planned(load_workload(write(tmp_path, text))).requests]
    assert min(lengths) == 8
    assert max(lengths) == 60
    assert 25 < np.median(lengths) < 36
