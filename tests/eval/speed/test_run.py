"""Measuring end to end on a tiny model: evidence, pairing, reuse, and that nothing is left behind by a failure."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pyarrow.parquet as parquet
import pytest

from eval.errors import EvalError
from eval.speed import run
from eval.speed.result import SCHEMAS, SpeedResult
from eval.speed.run import measure
from eval.speed.workload import load_workload
from tests.eval.speed.conftest import write_tiny_checkpoint

WORKLOAD = """
mode: sweep
sweep: {concurrency: [2, 3]}
requests: 6
warmup: 2
repeats: 2
input_tokens: {uniform: [20, 40]}
output_tokens: {uniform: [6, 10]}
slo: {ttft_ms: 60000, tpot_ms: 60000}
"""
OPTIONS = {"num_blocks": 64, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def workload(tmp_path_factory):
    path = tmp_path_factory.mktemp("workload") / "tiny.yaml"
    path.write_text(WORKLOAD)
    return load_workload(path)


@pytest.fixture(scope="module")
def paired(tiny_checkpoint, workload, tmp_path_factory):
    out = tmp_path_factory.mktemp("paired") / "speed"
    told = []
    result = measure(
        tiny_checkpoint,
        against=tiny_checkpoint,
        workload=workload,
        out=out,
        engine_options=OPTIONS,
        threads=1,
        price_per_hour=1.0,
        progress=lambda *what: told.append(what),
    )
    return result, told


def single_point(workload):
    return workload.points()[0]


def workers_of(pid):
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(pid).children(recursive=True)
        return [child for child in children if "eval.speed.worker" in " ".join(child.cmdline())]
    return []


def test_the_result_is_read_back_as_it_was_returned(paired):
    result, _ = paired
    assert SpeedResult.read(result.directory) == result


def test_evidence_has_exactly_the_agreed_fields_and_both_sides(paired):
    result, _ = paired
    for kind, schema in SCHEMAS.items():
        table = parquet.read_table(result.directory / f"{kind}.parquet")
        assert table.column_names == schema.names
        assert set(table["variant"].to_pylist()) == {"baseline", "candidate"}
    assert sorted(path.name for path in result.directory.iterdir()) == [
        "requests.parquet",
        "resources.parquet",
        "speed.json",
        "steps.parquet",
    ]


def test_both_sides_ran_the_same_requests_with_the_lengths_that_were_asked_for(paired):
    result, _ = paired
    rows = parquet.read_table(result.directory / "requests.parquet").to_pylist()
    sides = {
        side: sorted(
            (row["request_id"], row["input_tokens"], row["output_tokens"]) for row in rows if row["variant"] == side
        )
        for side in ("baseline", "candidate")
    }
    probe = [row for row in rows if "/r1000000/" in row["request_id"]]
    assert sides["baseline"] == sides["candidate"]
    assert len(sides["candidate"]) == 2 * 2 * (6 + 2)
    assert probe == []
    for check in ("prefix_cache", "preemptions", "failures", "output_length", "token_counts", "same_work"):
        assert result.validity[check] == "pass"


def test_metrics_are_flat_finite_and_paired(paired):
    result, _ = paired
    metrics = result.metrics
    for name in ("ttft_ms.p50", "itl_ms.p99", "tpot_ms.mean", "e2e_ms.max", "queue_ms.p90", "prefill_ms.p95"):
        assert metrics[f"speed.tiny.concurrency-2.{name}"] >= 0
    for name in ("decode_tokens_per_second", "output_tokens_per_second", "requests_per_second", "goodput"):
        assert metrics[f"speed.tiny.concurrency-3.{name}"] > 0
        assert (
            metrics[f"speed.tiny.concurrency-3.{name}.ratio.low"] <= metrics[f"speed.tiny.concurrency-3.{name}.ratio"]
        )
    assert metrics["speed.tiny.concurrency-2.cost_per_million_tokens"] > 0
    assert metrics["speed.tiny.concurrency-2.bandwidth_utilization"] > 0
    assert set(result.baseline_metrics) == {name for name in metrics if ".ratio" not in name}


def test_a_side_that_drafts_is_measured_against_itself_without(tiny_checkpoint, workload, tmp_path):
    result = measure(
        tiny_checkpoint,
        against=tiny_checkpoint,
        workload=single_point(workload),
        out=tmp_path / "speed",
        engine_options=OPTIONS,
        candidate_options={"speculative": str(tiny_checkpoint), "speculative_tokens": 3},
        repeats=1,
        threads=1,
    )
    name = single_point(workload).name
    rate = result.metrics[f"speed.{name}.speculative_accept_rate"]
    assert 0.5 < rate <= 1
    assert result.metrics[f"speed.{name}.speculative_accept_rate.position_1"] >= rate
    assert 2 < result.metrics[f"speed.{name}.speculative_accepted_length"] <= 4
    assert not any("speculative" in metric for metric in result.baseline_metrics)
    assert f"speed.{name}.bandwidth_utilization" in result.baseline_metrics
    assert f"speed.{name}.bandwidth_utilization" not in result.metrics
    assert result.validity["token_counts"] == result.validity["same_work"] == "pass"
    assert result.baseline["speculative"] is None
    assert result.candidate["speculative"] == result.candidate["weights_digest"]
    rows = parquet.read_table(tmp_path / "speed" / "requests.parquet").to_pylist()
    assert all((row["speculative_accept_rate"] is None) == (row["variant"] == "baseline") for row in rows)


def test_requests_with_priorities_are_scheduled_by_them_unless_told_otherwise(tiny_checkpoint, tmp_path):
    path = tmp_path / "urgent.yaml"
    path.write_text(
        "mode: closed\nconcurrency: 3\nrequests: 4\nrepeats: 1\ninput_tokens: 8\noutput_tokens: 2\n"
        "classes:\n  - {name: urgent, share: 0.5}\n  - {name: patient, share: 0.5, priority: 1}\n"
    )
    by_priority, in_turn = (
        measure(tiny_checkpoint, workload=path, out=tmp_path / name, engine_options=OPTIONS | more, threads=1)
        for name, more in (("priority", {}), ("fcfs", {"scheduler_policy": "fcfs"}))
    )
    for result, policy in ((by_priority, "priority"), (in_turn, "fcfs")):
        assert result.candidate["scheduler_policy"] == policy
        assert result.protocol["engine_options"]["scheduler_policy"] == policy
        steps = parquet.read_table(result.directory / "steps.parquet")
        assert set(steps["scheduler_policy"].to_pylist()) == {policy}
    assert by_priority.key != in_turn.key


def test_memory_is_split_and_measured(paired):
    result, _ = paired
    metrics = result.metrics
    kv_bytes_per_token = 2 * 2 * 2 * 16 * 2  # layers, K and V, heads, head size, bytes of bf16
    assert metrics["memory.kv_bytes_per_token"] == kv_bytes_per_token
    assert metrics["memory.kv_cache_bytes"] == 64 * 16 * kv_bytes_per_token
    assert 1e5 < metrics["memory.weights_bytes"] < 4e5
    assert metrics["memory.checkpoint_bytes"] >= metrics["memory.weights_bytes"]
    assert metrics["memory.process_peak_bytes"] > 5e7
    assert 0 <= metrics["memory.activation_peak_bytes"] < metrics["memory.process_peak_bytes"]


def test_blocks_are_interleaved_and_progress_reaches_its_total(paired):
    result, told = paired
    assert result.protocol["order"] == ["baseline", "candidate", "candidate", "baseline"]
    assert [what for what in told if what[1] == what[2]][-1][2] == 2 * 2 * 2 * 8
    blocks = [what for what, _, _ in told if what.startswith("tiny.concurrency-2")]
    assert list(dict.fromkeys(blocks)) == ["tiny.concurrency-2 baseline", "tiny.concurrency-2 candidate"]


def test_a_checkpoint_against_itself_is_not_called_different(paired):
    metrics = paired[0].metrics
    names = ("ttft_ms.p50", "itl_ms.p50", "tpot_ms.p50", "e2e_ms.p50", "output_tokens_per_second")
    keys = [f"speed.tiny.concurrency-{c}.{name}.ratio" for c in (2, 3) for name in names]
    assert any(metrics[f"{key}.low"] <= 1 <= metrics[f"{key}.high"] for key in keys)


def test_the_same_measurement_is_reused_and_another_is_not(paired, tiny_checkpoint, workload, monkeypatch):
    result, _ = paired

    def no_worker(variant):
        raise EvalError("a worker was started")

    monkeypatch.setattr(run, "WorkerProcess", no_worker)
    again = {
        "against": tiny_checkpoint,
        "workload": workload,
        "out": result.directory,
        "threads": 1,
        "price_per_hour": 1.0,
    }
    assert measure(tiny_checkpoint, engine_options=OPTIONS, **again) == result
    with pytest.raises(EvalError, match="a worker was started"):
        measure(tiny_checkpoint, engine_options=OPTIONS | {"num_blocks": 65}, **again)
    monkeypatch.setattr(run, "engine_fingerprint", lambda: "of other kernels")
    with pytest.raises(EvalError, match="a worker was started"):
        measure(tiny_checkpoint, engine_options=OPTIONS, **again)
    assert SpeedResult.read(result.directory) == result


def test_a_killed_worker_leaves_no_result_and_no_process(tiny_checkpoint, workload, tmp_path):
    def kill_when_it_runs(what, done, total):
        if what.startswith("tiny"):
            for worker in workers_of(os.getpid()):
                worker.kill()

    with pytest.raises(EvalError, match=r"candidate: the measuring process ended \(signal 9\)"):
        measure(
            tiny_checkpoint,
            workload=single_point(workload),
            out=tmp_path / "speed",
            engine_options=OPTIONS,
            threads=1,
            progress=kill_when_it_runs,
        )
    assert list(tmp_path.iterdir()) == []
    assert workers_of(os.getpid()) == []


def test_an_interrupt_leaves_no_result_and_no_process(tiny_checkpoint, workload, tmp_path):
    def interrupt(what, done, total):
        assert len(workers_of(os.getpid())) == 2
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(tiny_checkpoint, against=tiny_checkpoint, workload=workload, out=tmp_path / "speed", progress=interrupt)
    assert list(tmp_path.iterdir()) == []
    assert workers_of(os.getpid()) == []


def test_a_worker_ends_with_a_parent_that_was_killed():
    script = (
        "import time\nfrom eval.speed.worker_process import WorkerProcess\n"
        "with WorkerProcess('candidate') as worker:\n    print(worker.pid, flush=True)\n    time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.1)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_sides_with_different_tokenizers_are_refused(tiny_checkpoint, workload, tmp_path):
    other = write_tiny_checkpoint(tmp_path / "other", merges=(("t", "h"),))
    with pytest.raises(EvalError, match="tokenizer differs"):
        measure(other, against=tiny_checkpoint, workload=workload, out=tmp_path / "speed", threads=1)
    assert not (tmp_path / "speed").exists()


def test_requests_that_can_never_fit_are_one_error_with_the_numbers(tiny_checkpoint, workload, tmp_path):
    with pytest.raises(EvalError, match=r"candidate: every request of tiny.concurrency-2 failed") as caught:
        measure(
            tiny_checkpoint,
            workload=single_point(workload),
            out=tmp_path / "speed",
            engine_options={"num_blocks": 1},
            threads=1,
        )
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", ["nowhere", "empty"])
def test_what_is_not_a_checkpoint_is_one_line(bad, workload, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(EvalError, match=bad):
        measure(tmp_path / bad, workload=workload, out=tmp_path / "speed")


def test_a_wrong_engine_option_is_named(tiny_checkpoint, workload, tmp_path):
    with pytest.raises(EvalError, match="num_blcks"):
        measure(tiny_checkpoint, workload=workload, out=tmp_path / "speed", engine_options={"num_blcks": 3})


def test_a_folder_that_is_something_else_is_not_replaced(tiny_checkpoint, workload, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(EvalError, match="exists already"):
        measure(tiny_checkpoint, workload=workload, out=tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_a_torn_result_is_not_read(tmp_path):
    with pytest.raises(EvalError, match="no speed result"):
        SpeedResult.read(tmp_path)
    (tmp_path / "speed.json").write_text(json.dumps({"key": "x"})[:-2])
    with pytest.raises(EvalError, match="not a speed result"):
        SpeedResult.read(tmp_path)
