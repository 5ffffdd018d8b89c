"""A kernel is built once per machine; where it cannot be built, one warning says so and torch serves."""

import ctypes
import warnings

import pytest

from quantize import native_build
from quantize.native_build import load_native


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTGATE_HOME", str(tmp_path))
    load_native.cache_clear()
    yield
    load_native.cache_clear()


def source(tmp_path, text):
    path = tmp_path / "answer.cpp"
    path.write_text(text)
    return path


def test_second_load_compiles_nothing(tmp_path, monkeypatch):
    path = source(tmp_path, 'extern "C" int answer() { return 42; }')
    library = load_native(path)
    if library is None:
        pytest.skip("no C++ compiler here")
    assert library.answer() == 42
    load_native.cache_clear()
    calls = []
    run = native_build.subprocess.run

    def counted(command, **rest):
        calls.append(command)
        return run(command, **rest)

    monkeypatch.setattr(native_build.subprocess, "run", counted)
    assert isinstance(load_native(path), ctypes.CDLL)
    assert [command[1] for command in calls] == ["--version"]


def test_a_changed_include_is_built_anew(tmp_path):
    part = tmp_path / "parts" / "part.h"
    part.parent.mkdir()
    (part.parent / "middle.h").write_text('#pragma once\n#include "part.h"\n#include "../parts/middle.h"\n')
    path = source(tmp_path, '#include "parts/middle.h"\nextern "C" int answer() { return ANSWER; }')
    answers = []
    for value in (1, 2):
        part.write_text(f"#pragma once\n#define ANSWER {value}\n")
        load_native.cache_clear()
        library = load_native(path)
        if library is None:
            pytest.skip("no C++ compiler here")
        answers.append(library.answer())
    assert answers == [1, 2]


def test_code_that_does_not_compile_is_one_warning(tmp_path):
    with pytest.warns(UserWarning, match=r"answer\.cpp could not be built"):
        assert load_native(source(tmp_path, "this is not C++")) is None
    assert list((tmp_path / "kernels").glob("*.so")) == []


def test_no_compiler_is_one_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    path = source(tmp_path, "")
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        assert load_native(path) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_native(path) is None


def test_switch_turns_the_kernels_off(tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTGATE_NATIVE", "0")
    assert load_native(source(tmp_path, 'extern "C" int answer() { return 42; }')) is None


def test_results_tell_avx2_from_the_widest(monkeypatch):
    monkeypatch.delenv("QUANTGATE_NATIVE", raising=False)
    widest = native_build.native_build()
    monkeypatch.setenv("QUANTGATE_NATIVE", "avx2")
    assert (widest is None) == (native_build.native_build() is None)
    assert widest is None or native_build.native_build() == f"{widest} for avx2"
    monkeypatch.setenv("QUANTGATE_NATIVE", "0")
    assert native_build.native_build() is None
