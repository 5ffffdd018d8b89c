"""The engine's fingerprint follows the source that computes, not where it lies."""

import shutil
from pathlib import Path

import pytest

import quantize.kernels
from eval import engine
from eval.engine.fingerprint import SUFFIXES, engine_fingerprint, source_digest, sources_in

SOURCES = {
    "eval/engine": Path(engine.__file__).parent,
    "quantize/kernels": Path(quantize.kernels.__file__).parent,
}


def digest_in(folder):
    return source_digest({name: sources_in(folder / name) for name in SOURCES})


@pytest.fixture
def installed(tmp_path):
    """The sources in another place, as an installed wheel has them."""
    for name, source in SOURCES.items():
        shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_a_fingerprint_is_short_and_the_same_at_every_call():
    assert engine_fingerprint() == engine_fingerprint()
    assert len(engine_fingerprint()) == 16


def test_the_same_source_elsewhere_has_the_same_digest(installed):
    assert digest_in(installed) == source_digest({name: sources_in(path) for name, path in SOURCES.items()})


def test_every_kernel_is_in_it(installed):
    found = [name for package in SOURCES for name in sources_in(installed / package)]
    assert {"decoder_step.cpp", "dense_linear.h", "scheduler.py", "cpu/linear.cpp", "triton/launch.py"} <= set(found)


@pytest.mark.parametrize(
    "changed", ["eval/engine/decoder_step.cpp", "eval/engine/sampler.py", "quantize/kernels/cpu/linear.h"]
)
def test_a_changed_source_has_another_digest(installed, changed):
    before = digest_in(installed)
    (installed / changed).write_text((installed / changed).read_text() + " ")
    assert digest_in(installed) != before


def test_a_renamed_source_has_another_digest(installed):
    before = digest_in(installed)
    (installed / "eval/engine/sampler.py").rename(installed / "eval/engine/drawing.py")
    assert digest_in(installed) != before


def test_what_is_no_source_changes_nothing(installed):
    before = digest_in(installed)
    (installed / "eval/engine/__pycache__").mkdir()
    (installed / "eval/engine/__pycache__/engine.cpython-311.pyc").write_bytes(b"x")
    (installed / "eval/engine/notes.txt").write_text("x")
    assert ".pyc" not in SUFFIXES
    assert digest_in(installed) == before
