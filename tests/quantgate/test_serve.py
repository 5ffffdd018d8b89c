"""`quantgate serve` as a process: it answers, refuses what it cannot do in one line, and drains on SIGTERM."""

import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from quantgate.cli import main; main()", "serve", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_sigterm_lets_a_running_stream_end(tiny_checkpoint):
    process = start(tiny_checkpoint, "--port", 0, "--model-name", "tiny")
    try:
        ready = process.stderr.readline()
        address = re.search(r"serving tiny on (http://\S+)", ready).group(1)
        body = {"prompt": "Hello", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address}/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(30) == 0
    finally:
        process.kill()


def test_a_port_in_use_is_one_line(tiny_checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start(tiny_checkpoint, "--port", taken.getsockname()[1])
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.fullmatch(r"quantgate: 127.0.0.1:\d+ cannot be served on \(.*\): choose another .*\n", errors)


def test_what_cannot_draft_is_one_line(tiny_checkpoint):
    process = start(tiny_checkpoint, "--speculative", "lookup")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.fullmatch(r"quantgate: --speculative takes prompt-lookup or a checkpoint: no such .*\n", errors)


def test_a_cache_too_small_for_one_block_is_one_line(tiny_checkpoint):
    process = start(tiny_checkpoint, "--kv-cache-bytes", 10)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.fullmatch(r"quantgate: kv_cache_bytes is 10: one KV block of this model takes .*\n", errors)


@pytest.mark.parametrize("port", ["-1", "99999"])
def test_a_port_that_is_none_is_a_usage_error(tiny_checkpoint, port):
    process = start(tiny_checkpoint, "--port", port)
    assert process.wait(60) == 2
