"""What the machine is: flags to names, a kept bandwidth, and work that is not ours."""

import json
import os
import subprocess
import sys
import time

from eval.speed import machine


def test_flags_become_instruction_sets():
    assert machine.instruction_sets({"avx2", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"}) == (
        "AVX2",
        "AVX-512",
        "VNNI",
    )
    assert machine.instruction_sets({"avx512f"}) == ()


def test_bandwidth_is_measured_once_a_boot(monkeypatch, tmp_path):
    monkeypatch.setenv("QUANTGATE_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "QUIET_CORES", 99.0)
    first = machine.read_bandwidth()
    assert first.best > 1e8
    assert machine.read_bandwidth() == first
    kept = tmp_path / "bandwidth.json"
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"boot": "another"}))
    assert machine.read_bandwidth() != first


def test_a_bandwidth_from_a_busy_time_is_measured_again_when_it_is_quieter(monkeypatch):
    monkeypatch.setattr(machine, "QUIET_CORES", -1.0)
    monkeypatch.setattr(machine, "foreign_cores_now", lambda seconds: -2.0)
    assert machine.read_bandwidth() is not machine.read_bandwidth()


def test_own_work_is_not_foreign_but_a_strangers_is():
    stranger = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        all_seen, stranger_is_ours = machine.CpuMeter([]), machine.CpuMeter([stranger.pid])
        time.sleep(0.8)
        seen, without = all_seen.foreign_cores(), stranger_is_ours.foreign_cores()
    finally:
        stranger.kill()
        stranger.wait()
    assert seen - without > 0.2 / (1 + os.getloadavg()[0])


def test_the_description_is_json_and_names_the_essentials():
    described = json.loads(json.dumps(machine.describe_machine().to_mapping()))
    assert described["usable_cores"] >= 1
    assert described["memory_bytes"] > 0
    assert described["read_bandwidth"]["all_threads"] > 0
