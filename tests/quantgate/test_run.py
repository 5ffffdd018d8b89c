"""A campaign goes from its file to its verdicts, once, whatever interrupts it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORKLOAD = """\
name: short
mode: closed
concurrency: 2
requests: 2
warmup: 1
repeats: 2
seed: 1
input_tokens: 16
output_tokens: 4
"""

SUITE = """\
name: few
tasks: [quantgate_grammar]
limit: 4
perplexity:
  - {corpus: held_out_docs, window: 64, windows: 2}
"""


@pytest.fixture
def campaign(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    (tmp_path / "short.yaml").write_text(WORKLOAD)
    (tmp_path / "few.yaml").write_text(SUITE)
    path = tmp_path / "campaign.yaml"
    path.write_text(
        f"name: trial\nbaseline: {tiny_checkpoint}\ncalibration: {{samples: 2, sequence_length: 32}}\n"
        "variants:\n  int8: {method: int8}\n  gptq: {method: gptq, group_size: 32}\n  kv: {kv_dtype: int8}\n"
        "suite: few.yaml\nworkload: short.yaml\n"
    )
    return path


def stamps(folder: Path) -> dict[str, int]:
    """When each stage's result was written."""
    names = ("quantgate.json", "quality.json", "speed.json")
    return {str(path): path.stat().st_mtime_ns for name in names for path in folder.rglob(name)}


def test_a_campaign_ends_with_a_verdict_for_every_variant_and_a_second_run_repeats_nothing(
    quantgate, campaign: Path, tmp_path: Path
) -> None:
    first = quantgate("run", campaign, "--json")
    assert first.code == 0, first.err
    document = json.loads(first.out)
    assert {name: variant["verdict"] for name, variant in document["variants"].items()}.keys() == {
        "baseline",
        "int8",
        "gptq",
        "kv",
    }
    assert document["variants"]["kv"]["checkpoint"] == document["variants"]["baseline"]["checkpoint"]
    assert document["variants"]["kv"]["run_id"] != document["variants"]["baseline"]["run_id"]
    kv = document["variants"]["kv"]["metrics"]
    assert kv["memory.weights_bytes.ratio"] == 1
    assert kv["memory.kv_bytes_per_token.ratio"] == (16 + 4) / (16 * 2)
    assert "quality.perplexity.held_out_docs.w64.s64.nobos.perplexity.ratio" in kv
    for name in ("int8", "gptq"):
        variant = document["variants"][name]
        assert variant["verdict"] in ("pass", "fail", "inconclusive")
        assert variant["reasons"]
        assert variant["metrics"]["memory.weights_bytes.ratio"] < 1
        assert "quality.perplexity.held_out_docs.w64.s64.nobos.perplexity.ratio" in variant["metrics"]
        assert variant["metrics"]["speed.short.decode_tokens_per_second"] > 0
        assert variant["run_id"]
    assert Path(document["report"]).is_file()
    assert all(isinstance(value, float) for value in document["metrics"].values())

    before = stamps(tmp_path / "runs")
    assert len(before) == 2 + 4 + 4
    table = quantgate("run", campaign)
    assert table.code == 0, table.err
    assert stamps(tmp_path / "runs") == before
    for shown in ("int8", "gptq", "KV int8", "verdict", "quantgate ui", "report.html", "release approve", "--reason"):
        assert shown in table.out

    text = campaign.read_text().replace("  gptq: {method: gptq, group_size: 32}\n", "")
    campaign.write_text(text.replace("{method: int8}", "{method: int8, compute: a8}"))
    without = quantgate("run", campaign, "--json")
    changed = json.loads(without.out)["variants"]
    assert changed.keys() == {"baseline", "int8", "kv"}
    after = stamps(tmp_path / "runs")
    written = {Path(path).relative_to(tmp_path / "runs/trial") for path in after if after[path] != before[path]}
    assert written == {Path("variants/int8/quality/quality.json"), Path("variants/int8/speed/speed.json")}
    assert changed["int8"]["run_id"] != document["variants"]["int8"]["run_id"], "a8 is another variant"
    for measured, where in (("quality", "identity"), ("speed", "candidate")):
        result = json.loads((tmp_path / f"runs/trial/variants/int8/{measured}/{measured}.json").read_text())
        assert result[where]["compute"] == "a8"
    assert "gptq" not in (tmp_path / "runs/trial/report.html").read_text()
    assert (tmp_path / "runs/trial/variants/gptq/quality/quality.json").is_file(), "its results are kept"

    submitted = quantgate("release", "submit", "runs/trial/variants/int8", "--json")
    assert submitted.code == 0, submitted.err
    assert json.loads(submitted.out)["id"] == "trial-int8"


def test_a8_of_a_baseline_without_quantized_weights_ends_before_anything_is_measured(
    quantgate, campaign: Path, tmp_path: Path
) -> None:
    campaign.write_text(campaign.read_text().replace("kv_dtype: int8", "compute: a8"))
    refused = quantgate("run", campaign)
    assert refused.code == 1
    assert "compute a8 rounds what quantized weights are multiplied with, and it has none" in refused.err
    assert not list((tmp_path / "runs").rglob("quality.json"))


def test_a_killed_campaign_goes_on_where_it_was(campaign: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "QUANTGATE_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    environment.pop("MLFLOW_TRACKING_URI", None)
    command = [sys.executable, "-c", "from quantgate.cli import main; main()", "run", str(campaign), "--json"]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    killed = start()
    finished_stage = tmp_path / "runs/trial/variants/baseline/quality/quality.json"
    deadline = time.monotonic() + 240
    while not finished_stage.exists():
        assert killed.poll() is None, killed.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    before = stamps(tmp_path / "runs")
    again = start()
    out, err = again.communicate(timeout=400)
    assert again.returncode == 0, err
    assert json.loads(out)["variants"]["gptq"]["verdict"]
    after = stamps(tmp_path / "runs")
    assert before.items() <= after.items()


def test_two_runs_of_one_campaign_do_not_mix(quantgate, campaign: Path, tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "runs/trial").mkdir(parents=True)
    held = os.open(tmp_path / "runs/trial", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        refused = quantgate("run", campaign)
    finally:
        os.close(held)
    assert refused.code == 1
    assert "another quantgate runs this campaign" in refused.err
