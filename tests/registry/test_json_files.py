"""Documents are whole or absent, and anybody may read them whom the umask lets."""

import os

import pytest

from registry.errors import RegistryError
from registry.json_files import read_json, write_json, write_text


def test_a_document_has_the_mode_of_any_new_file_and_stands_alone(tmp_path):
    before = os.umask(0o027)
    try:
        write_json(tmp_path / "deep" / "a.json", {"a": 1})
    finally:
        os.umask(before)
    assert read_json(tmp_path / "deep" / "a.json") == {"a": 1}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.json"]
    assert (tmp_path / "deep" / "a.json").stat().st_mode & 0o777 == 0o640


def test_what_cannot_be_written_is_one_line_and_leaves_the_old_file(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "a.json", tmp_path / "folder"):
        with pytest.raises(RegistryError, match=f"{path}: cannot be written") as caught:
            write_text(path, "new")
        assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "old"


def test_a_number_that_was_not_measured_is_no_document(tmp_path):
    with pytest.raises(RegistryError, match="NaN"):
        write_json(tmp_path / "a.json", {"a": float("nan")})
    assert not list(tmp_path.iterdir())
