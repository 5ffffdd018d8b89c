"""Benchmarks from a folder: read strictly, and every mistake in one line that names file and line."""

import json
from pathlib import Path

import pytest

from tasks.documents import load_corpus, load_task
from tasks.errors import TaskError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the benchmarks' layout, with two documents each."""
    _write(tmp_path / "piqa" / "valid.jsonl", [{"goal": f"g{n}", "sol1": "a", "sol2": "b"} for n in range(2)])
    (tmp_path / "piqa" / "valid-labels.lst").write_text("0\n1\n")
    _write(tmp_path / "lambada" / "test.jsonl", [{"text": "one two three"}, {"text": "four five six"}])
    _write(tmp_path / "gsm8k" / "test.jsonl", [{"question": "1 + 1?", "answer": "2\n#### 2"}])
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "test.txt").write_text(" = Title = \n some text\n")
    return tmp_path


def _write(path: Path, documents: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))


def test_documents_and_labels_come_together(folder: Path) -> None:
    task = load_task("piqa", folder)
    assert task is not None
    assert [document["label"] for document in task.documents] == [0, 1]
    assert task.config["doc_to_text"] == "Question: {{goal}}\nAnswer:"
    assert task.chance == 0.5


def test_a_short_name_is_the_same_task(folder: Path) -> None:
    assert load_task("lambada", folder) == load_task("lambada_openai", folder)
    assert load_corpus("wikitext", folder) == load_corpus("wikitext2", folder)


def test_other_documents_have_another_digest(folder: Path) -> None:
    before = load_task("gsm8k", folder)
    _write(folder / "gsm8k" / "test.jsonl", [{"question": "1 + 2?", "answer": "3\n#### 3"}])
    after = load_task("gsm8k", folder)
    assert before is not None
    assert after is not None
    assert before.digest != after.digest


def test_a_name_for_lm_eval_alone_is_left_to_it(folder: Path) -> None:
    assert load_task("arc_easy", folder) is None
    assert load_task("piqa", None) is None


@pytest.mark.parametrize(
    ("file", "content", "task", "complaint"),
    [
        ("piqa/valid.jsonl", "", "piqa", r"valid.jsonl: is empty"),
        ("piqa/valid.jsonl", '{"goal": "g"}\n', "piqa", r"valid.jsonl:1: the field 'sol1' is missing"),
        ("piqa/valid.jsonl", '\n{"goal": \n', "piqa", r"valid.jsonl:2: not valid JSON"),
        ("piqa/valid-labels.lst", "0\n2\n", "piqa", r"valid-labels.lst:2: a label is 0 or 1"),
        ("piqa/valid-labels.lst", "0\n", "piqa", r"1 labels for the 2 questions"),
        ("lambada/test.jsonl", "[1]\n", "lambada", r"test.jsonl:1: expected a JSON object"),
        ("lambada/test.jsonl", '{"text": "alone"}\n', "lambada", "is one word"),
        ("gsm8k/test.jsonl", '{"question": "a", "answer": "b"}\n', "gsm8k", "has no `#### result`"),
    ],
)
def test_a_broken_file_is_named_with_its_line(folder: Path, file: str, content: str, task: str, complaint: str) -> None:
    (folder / file).write_text(content)
    with pytest.raises(TaskError, match=complaint) as raised:
        load_task(task, folder)
    assert "\n" not in str(raised.value)


def test_what_is_not_there_is_said(folder: Path) -> None:
    (folder / "gsm8k" / "test.jsonl").unlink()
    with pytest.raises(TaskError, match=r"gsm8k/test.jsonl: no such file"):
        load_task("gsm8k", folder)
    with pytest.raises(TaskError, match="no such folder"):
        load_task("piqa", folder / "nowhere")
    with pytest.raises(TaskError, match="give --data-dir"):
        load_corpus("wikitext2", None)
    with pytest.raises(TaskError, match=r"unknown corpus 'wikitex'; did you mean wikitext2"):
        load_corpus("wikitex", folder)


def test_a_file_that_is_no_text_is_said(folder: Path) -> None:
    (folder / "wikitext2" / "test.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TaskError, match="not UTF-8"):
        load_corpus("wikitext2", folder)
