"""Whatever a YAML file holds, reading it gives a mapping or one line that names file and line."""

from pathlib import Path

import pytest

from tasks.errors import TaskError
from tasks.yaml_file import key_lines, read_yaml_mapping


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "found nothing"),
        (b"- a\n", "found list"),
        (b"\x00\x01", "not valid YAML"),
        (b"\xff\xfe", "not UTF-8"),
        (b"a: 1\n---\nb: 2\n", ":2: not valid YAML"),
        (b"a: 2020-99-99\n", "not valid YAML"),
        (b"a: !!bool abc\n", "not valid YAML"),
        (b"a: !!timestamp abc\n", "not valid YAML"),
        (b"a: !!python/object/apply:os.getcwd []\n", ":1: not valid YAML"),
        (b"a: 1\nb: &x [*x]\n", ":2: nested too deeply"),
        (b"a: &x\n  b: *x\n", "nested too deeply"),
        (b"a: " + b"[" * 3000, "nested too deeply"),
        (b"a: " + b"[" * 100 + b"]" * 100, "nested too deeply"),
        (b"a: 1\nb: {c: 1, c: 2}\n", ":2: the key 'c' stands twice"),
        (b'a: 1\nb: ["x\\0y"]\n', ":2: 'x\\x00y' holds a character that is no text"),
        (b'a: "\\ud800"\n', ":1: '\\ud800' holds a character that is no text"),
    ],
)
def test_what_is_no_mapping_is_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    with pytest.raises(TaskError) as caught:
        read_yaml_mapping(path, TaskError)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert said in message
    assert "\n" not in message


def test_aliases_that_end_are_read_and_a_thousandfold_one_is_looked_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    levels = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]\n" for n in range(1, 9))
    path.write_text(f"l0: &l0 [x]\n{levels}")
    _, content = read_yaml_mapping(path, TaskError)
    assert content["l1"] == [["x"]] * 10


def test_key_lines_name_every_key(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: 1\nb:\n  - {c: 1}\n  - d: {e: 2}\n")
    tree, _ = read_yaml_mapping(path, TaskError)
    assert list(key_lines(tree)) == [("a", 1), ("b", 2), ("c", 3), ("d", 4), ("e", 4)]
