"""Suites load by name or path; what is wrong in one is said with its line."""

from pathlib import Path

import pytest

from tasks.documents import load_task, own_task_names
from tasks.errors import TaskError
from tasks.suites import PerplexityRun, load_suite, suite_names


def test_the_shipped_suites_load() -> None:
    assert {"core", "smoke", "standard"} <= set(suite_names())
    core = load_suite("core")
    assert set(core.tasks) == set(own_task_names())
    assert core.limit is None
    assert core.perplexity == (PerplexityRun("held_out_docs", 1024, 20),)
    assert core.perplexity[0].name == "perplexity.held_out_docs.w1024.s1024.nobos"
    assert load_suite("smoke").limit == 8
    assert load_suite("standard").perplexity[0].windows is None


def test_every_task_of_core_ships() -> None:
    assert all(load_task(name, None) is not None for name in load_suite("core").tasks)


def test_an_unknown_suite_is_answered_with_the_nearest() -> None:
    with pytest.raises(TaskError, match="unknown suite 'cor'; did you mean core"):
        load_suite("cor")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("name: mine\ntask: [piqa]\n", r"mine.yaml:2: unknown key 'task'; did you mean 'tasks'"),
        ("tasks: [piqa]\nlimit: none\n", r"mine.yaml:2: limit must be a whole number"),
        ("tasks: [piqa]\nlimit: 0\n", r"mine.yaml:2: limit must be"),
        ("tasks: piqa\n", r"mine.yaml:1: tasks must be a list"),
        ("tasks: []\n", "names neither tasks nor perplexity"),
        ("perplexity:\n  - {window: 5}\n", r"mine.yaml:1: perplexity each entry needs a corpus"),
        ("perplexity:\n  - {corpus: a, windw: 5}\n", r"mine.yaml:2: unknown key 'windw'"),
        ("perplexity:\n  - {corpus: a, window: 1}\n", r"mine.yaml:2: window must be"),
        ("tasks: [\n", r"mine.yaml:2: not valid YAML"),
        ("just text\n", "expected `key: value` lines"),
    ],
)
def test_a_mistake_in_a_suite_is_one_line_with_its_place(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(TaskError, match=complaint) as raised:
        load_suite(path)
    assert "\n" not in str(raised.value)


def test_a_suite_of_the_users_loads_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("tasks: [piqa, piqa]\nperplexity:\n  - corpus: wikitext2\n    windows: 60\n")
    suite = load_suite(str(path))
    assert suite.name == "mine"
    assert suite.tasks == ("piqa",)
    assert suite.perplexity == (PerplexityRun("wikitext2", 1024, 60),)


def test_a_suite_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="cannot be read"):
        load_suite(tmp_path / "none.yaml")
