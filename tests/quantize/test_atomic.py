"""Folders exist whole or not at all, and have one builder at a time."""

import errno
import os
import subprocess
import sys

import pytest

from quantize.atomic import atomic_directory, one_line_os_errors, write_atomically
from quantize.errors import QuantizeError


def test_the_folder_appears_only_at_the_end(tmp_path):
    out = tmp_path / "out"
    with atomic_directory(out) as folder:
        (folder / "a").write_text("1")
        assert not out.exists()
    assert (out / "a").read_text() == "1"
    assert list(tmp_path.iterdir()) == [out]


def test_a_file_that_its_writer_made_private_gets_the_mode_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        with atomic_directory(tmp_path / "out") as folder:
            (folder / "deep").mkdir()
            for name in ("weights", "deep/weights"):
                (folder / name).touch(0o600)
            (folder / "readable").touch()
    finally:
        os.umask(before)
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert modes == {0o640}


def fail_after(out, names, **options) -> None:
    """Work that writes some files and then fails."""
    with atomic_directory(out, **options) as folder:
        for name in names:
            (folder / name).write_text("1")
        raise ValueError


def test_an_error_leaves_nothing(tmp_path):
    with pytest.raises(ValueError):
        fail_after(tmp_path / "out", ["a"])
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_resumable_work_leaves_what_was_done_and_nothing_if_nothing_was(tmp_path):
    with pytest.raises(ValueError):
        fail_after(tmp_path / "out", [], resumable=True)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError):
        fail_after(tmp_path / "out", ["a"], resumable=True)
    with atomic_directory(tmp_path / "out", resumable=True) as folder:
        assert (folder / "a").read_text() == "1"


def test_leftovers_of_a_killed_run_do_not_survive_into_work_that_cannot_resume(tmp_path):
    (tmp_path / "out.partial" / "deep").mkdir(parents=True)
    (tmp_path / "out.partial" / "stale").write_text("old")
    with atomic_directory(tmp_path / "out"):
        pass
    assert list((tmp_path / "out").iterdir()) == []


def test_an_existing_folder_is_refused_unless_it_is_empty_or_to_be_replaced(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with atomic_directory(out) as folder:
        (folder / "a").write_text("1")
    with pytest.raises(QuantizeError, match="exists already"), atomic_directory(out):
        pass
    with atomic_directory(out, replace=True) as folder:
        (folder / "b").write_text("2")
    assert [entry.name for entry in out.iterdir()] == ["b"]
    assert list(tmp_path.iterdir()) == [out]


def test_a_second_process_is_told_that_the_folder_is_being_written(tmp_path):
    out = tmp_path / "out"
    program = (
        f"from quantize.atomic import atomic_directory as a\nwith a(__import__('pathlib').Path({str(out)!r})): pass"
    )
    with atomic_directory(out):
        second = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert "another process is writing it now" in second.stderr
    assert out.is_dir()


@pytest.mark.parametrize(("code", "said"), [(errno.ENOSPC, "disk is full"), (errno.EROFS, "can be written")])
def test_what_the_file_system_says_becomes_one_line(tmp_path, code, said):
    with pytest.raises(QuantizeError, match=said) as caught, one_line_os_errors(tmp_path):
        raise OSError(code, os.strerror(code))
    assert "\n" not in str(caught.value)


def test_a_full_disk_reported_by_safetensors_counts_too(tmp_path):
    with pytest.raises(QuantizeError, match="disk is full"), one_line_os_errors(tmp_path):
        raise RuntimeError("I/O error: No space left on device (os error 28)")


def test_a_file_is_replaced_whole(tmp_path):
    write_atomically(tmp_path / "f", "one")
    write_atomically(tmp_path / "f", b"two")
    assert (tmp_path / "f").read_text() == "two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]
