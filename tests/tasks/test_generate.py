"""The data that ships is what its generators write, and it is well formed."""

import json
from pathlib import Path

import pytest

from tasks.documents import DATA, load_corpus, load_task, own_task_names
from tasks.generate import GENERATORS, generate
from tasks.generators import held_out
from tasks.generators.draw import Draw


def test_the_generators_reproduce_the_shipped_files_byte_for_byte(tmp_path: Path) -> None:
    written = generate(tmp_path)
    assert len(written) == len(GENERATORS) + held_out.available()
    for path in written:
        assert path.read_bytes() == (DATA / path.name).read_bytes(), path.name


@pytest.mark.parametrize("name", own_task_names())
def test_a_task_has_the_size_chance_and_licence_that_it_states(name: str) -> None:
    task = load_task(name, None)
    assert task is not None
    metadata = task.config["metadata"]
    assert len(task.documents) == metadata["samples"]
    assert "Apache-2.0" in metadata["licence"]
    choices = {len(document["choices"]) for document in task.documents if "choices" in document}
    if choices:
        assert task.chance == pytest.approx(1 / choices.pop(), abs=1e-3)
        assert not choices


@pytest.mark.parametrize("name", own_task_names())
def test_items_differ_and_their_choices_differ(name: str) -> None:
    task = load_task(name, None)
    assert task is not None
    seen = set()
    for document in task.documents:
        seen.add(json.dumps([document.get("context"), sorted(document.get("choices", [])), document.get("target")]))
        if "choices" in document:
            assert len(set(document["choices"])) == len(document["choices"])
            assert 0 <= document["answer"] < len(document["choices"])
    assert len(seen) == len(task.documents)


@pytest.mark.parametrize("name", own_task_names())
def test_the_place_of_the_right_answer_says_nothing(name: str) -> None:
    task = load_task(name, None)
    assert task is not None
    answers = [document["answer"] for document in task.documents if "choices" in document]
    if answers:
        count = len(task.documents[0]["choices"])
        expected = len(answers) / count
        for place in range(count):
            assert abs(answers.count(place) - expected) < 4 * (expected * (1 - 1 / count)) ** 0.5


def test_python_answers_are_what_python_prints(capsys: pytest.CaptureFixture[str]) -> None:
    task = load_task("quantgate_python", None)
    assert task is not None
    for document in task.documents[::7]:
        exec(document["context"], {})
        assert capsys.readouterr().out.strip() == document["choices"][document["answer"]]


def test_retrieval_asks_for_a_value_that_stands_in_the_list() -> None:
    task = load_task("quantgate_retrieval", None)
    assert task is not None
    for document in task.documents:
        key = document["context"].rsplit("The ", 1)[1].removesuffix(" is in the")
        assert f"The {key} is in the{document['target']}.\n" in document["context"]


def test_held_out_text_shares_no_topic_with_calibration() -> None:
    calibration = Path(DATA).parents[1] / "quantize" / "data" / "calibration.jsonl"
    text = load_corpus("held_out_docs", None).text
    for line in calibration.read_text(encoding="utf-8").splitlines():
        assert json.loads(line)["text"].strip()[:300] not in text


def test_draws_are_the_same_on_every_python() -> None:
    draw = Draw(7)
    assert [draw.below(10) for _ in range(6)] == [3, 1, 6, 0, 5, 3]
    assert draw.some("abcd", 4) == ["a", "c", "b", "d"]
