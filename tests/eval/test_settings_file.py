"""Settings files: every mistake is one line with the file, the line and the fix."""

from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, Field

from eval.settings_file import read_settings


class Complaint(Exception):
    pass


class Limit(BaseModel):
    model_config = ConfigDict(extra="forbid")
    margin: float = Field(ge=0)
    critical: bool = True


class House(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    limits: dict[str, Limit] = {}
    rules: list[Limit] = []


def complaint(tmp_path: Path, text: str) -> str:
    path = tmp_path / "house.yaml"
    path.write_text(text)
    with pytest.raises(Complaint) as caught:
        read_settings(path, House, Complaint)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def test_a_good_file_becomes_the_model(tmp_path: Path) -> None:
    path = tmp_path / "house.yaml"
    path.write_text("name: a\nlimits:\n  x: {margin: 0.1}\n")
    assert read_settings(path, House, Complaint).limits["x"].margin == 0.1


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("name: a\nlimit: {}\n", 2, "unknown key 'limit'; did you mean 'limits'?"),
        ("name: a\nlimits:\n  x:\n    marginn: 1\n", 4, "did you mean 'margin'?"),
        ("name: a\nrules:\n- margin: 1\n- margin: 1\n  zzz: 2\n", 5, "known keys: margin, critical"),
        ("limits: {}\n", 1, "the key 'name' is missing"),
        ("name: a\nlimits:\n  x: {margin: -1}\n", 3, "greater than or equal to 0, got -1"),
        ("name: a\nname: b\n", 2, "the key 'name' stands twice"),
        ("name: a\n  bad: [\n", 2, "not valid YAML"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, line: int, said: str) -> None:
    message = complaint(tmp_path, text)
    assert message.startswith(f":{line}: ")
    assert said in message


def test_an_unknown_key_is_told_before_the_missing_one_it_was_meant_to_be(tmp_path: Path) -> None:
    assert "did you mean 'name'?" in complaint(tmp_path, "nane: a\n")


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just text\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    assert "expected `key: value` lines" in complaint(tmp_path, text)


def test_a_missing_file_and_a_binary_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Complaint, match="cannot be read"):
        read_settings(tmp_path / "none.yaml", House, Complaint)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Complaint, match="not UTF-8"):
        read_settings(tmp_path / "binary.yaml", House, Complaint)
