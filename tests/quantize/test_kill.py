"""Killed at any moment, the same command goes on and ends with the same bytes; and what else may happen to OUT."""

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from quantize import Recipe, quantize_checkpoint
from quantize.errors import QuantizeError

KILLS = 10


def recipe_of(method: str) -> Recipe:
    return Recipe(method, samples=24, sequence_length=96)


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a result, its manifest without the times."""
    files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
    manifest = json.loads(files["quantgate.json"])
    manifest.pop("seconds")
    for module in manifest["modules"]:
        module.pop("seconds")
    return files | {"quantgate.json": json.dumps(manifest).encode()}


def work(source: Path, out: Path, text: Path, method: str) -> None:
    torch.set_num_threads(1)
    quantize_checkpoint(source, recipe_of(method), out, calibration=text)


def start(*arguments) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    process.start()
    return process


@pytest.mark.parametrize("method", ["gptq", "awq+gptq"])
def test_ten_kills_at_random_moments_leave_no_trace_in_the_result(spelling_llama, spelled_text, tmp_path, method):
    """Ten kills after random delays, most of them of a run that resumes a killed one. An OUT that appears, whenever it
    does, has the bytes of an undisturbed run, and so has the one of the last run, which is let go."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    work(spelling_llama, tmp_path / "undisturbed", spelled_text, method)
    duration = time.perf_counter() - begin
    moments = random.Random(method)
    killed = 0
    for _ in range(40):
        process = start(spelling_llama, tmp_path / "out", spelled_text, method)
        process.join(timeout=moments.uniform(0.05, 0.9) * duration)
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            killed += 1
        if (tmp_path / "out").exists():  # it had ended before the kill
            assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")
            os.rename(tmp_path / "out", tmp_path / f"result-{killed}")
        if killed == KILLS:
            break
    assert killed == KILLS
    work(spelling_llama, tmp_path / "out", spelled_text, method)
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")
    assert not (tmp_path / "out.partial").exists()


def test_two_runs_into_one_out_make_one_result_and_the_other_says_so(spelling_llama, spelled_text, tmp_path):
    process = start(spelling_llama, tmp_path / "out", spelled_text, "gptq")
    while not (tmp_path / "out.partial").exists() and process.is_alive():
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        assert not (tmp_path / "out").exists()
        with pytest.raises(QuantizeError, match="another process is writing it now"):
            work(spelling_llama, tmp_path / "out", spelled_text, "gptq")
    finally:
        os.kill(process.pid, signal.SIGCONT)
    process.join()
    assert process.exitcode == 0
    work(spelling_llama, tmp_path / "alone", spelled_text, "gptq")
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def test_an_out_that_cannot_be_written_is_one_line(spelling_llama, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for out in (tmp_path / "file" / "out", Path("/sys/out"), tmp_path / ("long" * 70)):
        with pytest.raises(QuantizeError) as caught:
            quantize_checkpoint(spelling_llama, Recipe("int8"), out)
        assert str(out) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
