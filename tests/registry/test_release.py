"""Releases and their ledger: who may do what, what is written, and what tampering shows."""

import json
import multiprocessing
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from registry import release
from registry.errors import Conflict, IllegalTransition, RegistryError
from registry.ledger import FIRST_PREVIOUS_HASH


def write_comparison(folder: Path, verdict: str = "pass", weights: str = "a" * 64) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    identity = {"weights_digest": weights, "tokenizer_digest": "t", "compute": "a16", "dtype": "bfloat16"}
    document = {
        "baseline": {"name": "baseline", "identity": {**identity, "weights_digest": "0" * 64}},
        "verdict": verdict,
        "reasons": [f"because it is a {verdict}"],
        "candidate": {"name": folder.name, "identity": identity},
    }
    (folder / "comparison.json").write_text(json.dumps(document))
    return folder


@pytest.fixture(autouse=True)
def no_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mirror has its own tests; here it would only cost time."""
    monkeypatch.setattr("registry.mirror.show", lambda _: "pending: not asked")
    monkeypatch.setattr("registry.mirror.difference", lambda _: None)


@pytest.fixture
def int8(tmp_path: Path) -> Path:
    return write_comparison(tmp_path / "runs" / "demo" / "variants" / "int8")


def test_a_passing_candidate_is_submitted_and_approved(int8: Path) -> None:
    submitted = release.submit(int8, actor="anna")
    assert (submitted.id, submitted.state, submitted.verdict) == ("demo-int8", "evaluated", "pass")
    approved = release.approve("demo-int8", actor="berta")
    assert approved.state == "approved"
    lines = release.history("demo-int8")
    assert [(line.actor, line.action, line.from_state, line.to_state) for line in lines] == [
        ("anna", "submit", "", "draft"),
        ("anna", "evaluate", "draft", "evaluated"),
        ("berta", "approve", "evaluated", "approved"),
    ]
    assert all(line.at.endswith("+00:00") for line in lines)
    assert {line.evidence_digest for line in lines} == {submitted.evidence_digest}


@pytest.mark.parametrize(("verdict", "state"), [("fail", "evaluated"), ("inconclusive", "held")])
def test_without_a_pass_approval_needs_a_reason(tmp_path: Path, verdict: str, state: str) -> None:
    folder = write_comparison(tmp_path / "int4", verdict)
    assert release.submit(folder, "r", actor="anna").state == state
    with pytest.raises(RegistryError, match=f"its verdict is {verdict}.*--override"):
        release.approve("r", actor="anna")
    with pytest.raises(RegistryError, match="--override"):
        release.approve("r", actor="anna", override="  ")
    assert release.approve("r", actor="anna", override="internal only").state == "approved"
    assert release.history("r")[-1].reason == f"override of verdict {verdict}: internal only"


def test_changed_evidence_cannot_be_approved(int8: Path) -> None:
    release.submit(int8, "r", actor="anna")
    path = int8 / "comparison.json"
    path.write_text(path.read_text().replace("because", "although"))
    assert not release.show("r").evidence_intact
    with pytest.raises(RegistryError, match="changed after it was submitted"):
        release.approve("r", actor="anna")
    path.unlink()
    with pytest.raises(RegistryError, match="missing or was changed"):
        release.approve("r", actor="anna")
    assert release.show("r").state == "evaluated"


def test_new_evidence_is_a_new_evaluation(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "int8", "inconclusive")
    release.submit(folder, "r", actor="anna")
    with pytest.raises(Conflict, match="already submitted"):
        release.submit(folder, "r", actor="anna")
    write_comparison(folder, "pass")
    assert release.submit(folder, "r", actor="anna").state == "evaluated"
    assert release.approve("r", actor="anna").state == "approved"


def test_a_rejection_needs_a_reason_and_is_final(int8: Path) -> None:
    release.submit(int8, "r", actor="anna")
    with pytest.raises(RegistryError, match="needs a reason"):
        release.reject("r", actor="anna", reason=" ")
    assert release.reject("r", actor="anna", reason="too slow").state == "rejected"
    with pytest.raises(IllegalTransition, match=r"not possible from rejected.*reject by anna"):
        release.act("r", "approve", "berta", "?")


def test_an_unknown_release_is_told_with_those_there_are(int8: Path) -> None:
    with pytest.raises(RegistryError, match="there is none yet"):
        release.show("nope")
    release.submit(int8, actor="anna")
    with pytest.raises(RegistryError, match="demo-int8"):
        release.show("nope")


def test_what_is_no_comparison_is_refused(tmp_path: Path) -> None:
    (tmp_path / "comparison.json").write_text("{}")
    with pytest.raises(RegistryError, match="no 'verdict'"):
        release.submit(tmp_path, actor="anna")
    with pytest.raises(RegistryError, match="no such file"):
        release.submit(tmp_path / "nothing", actor="anna")
    assert release.list_releases() == []


def test_all_the_way_to_traffic_and_back(int8: Path) -> None:
    release.submit(int8, "r", actor="anna")
    release.approve("r", actor="anna")
    for action in ("shadow", "canary", "canary", "promote", "rollback"):
        release.act("r", action, "anna", f"to {action}")
    assert release.show("r").state == "rolled_back"
    assert release.verify().ok


def test_the_second_of_two_is_told_who_was_first(int8: Path) -> None:
    seen = release.submit(int8, "r", actor="anna")
    release.approve("r", actor="berta", expected_version=seen.version)
    with pytest.raises(Conflict, match=r"it is approved now \(approve by berta"):
        release.reject("r", actor="carla", reason="slow", expected_version=seen.version)


def test_of_two_threads_that_read_together_one_wins(int8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release.submit(int8, "r", actor="anna")
    both_have_read = threading.Barrier(2)
    real_act = release.act

    def act_when_both_have_read(*args: object, **named: object) -> release.Release:
        both_have_read.wait()
        return real_act(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(release, "act", act_when_both_have_read)
    outcomes: list[object] = []

    def approve(actor: str) -> None:
        try:
            outcomes.append(release.approve("r", actor=actor))
        except RegistryError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=approve, args=(name,)) for name in ("berta", "carla")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Conflict", "Release"]
    assert [line.action for line in release.history("r")].count("approve") == 1


def _approve_in_process(
    name: str, start: "multiprocessing.synchronize.Event", results: "multiprocessing.Queue[str]"
) -> None:
    from registry import mirror

    mirror.show = lambda _: "pending: not asked"
    start.wait()
    try:
        results.put(release.approve("r", actor=name).state)
    except RegistryError as error:
        results.put(type(error).__name__)


def test_of_four_processes_one_wins(int8: Path) -> None:
    release.submit(int8, "r", actor="anna")
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    workers = [context.Process(target=_approve_in_process, args=(f"p{i}", start, results)) for i in range(4)]
    for worker in workers:
        worker.start()
    start.set()
    outcomes = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert outcomes.count("approved") == 1
    assert set(outcomes) <= {"approved", "Conflict", "IllegalTransition"}
    assert release.verify().ok


def tampered(tmp_path: Path, statement: str) -> None:
    connection = sqlite3.connect(tmp_path / "quantgate.db")
    for trigger in ("ledger_no_update", "ledger_no_delete"):
        connection.execute(f"DROP TRIGGER {trigger}")
    connection.execute(statement)
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("UPDATE ledger SET reason = 'all is well' WHERE sequence = 3", "line 3: its content was changed"),
        ("UPDATE ledger SET actor = 'mallory' WHERE sequence = 1", "line 1: its content was changed"),
        ("DELETE FROM ledger WHERE sequence = 2", "line 2: missing"),
        ("DELETE FROM ledger WHERE sequence = 3", "release r: is approved at step 3"),
        (
            "UPDATE releases SET state = 'promoted'",
            "release r: is promoted at step 3, but its last line (3) says approved",
        ),
        ("UPDATE ledger SET hash = 'f' WHERE sequence = 1", "line 2: does not follow"),
    ],
)
def test_tampering_shows(int8: Path, tmp_path: Path, statement: str, problem: str) -> None:
    release.submit(int8, "r", actor="anna")
    release.approve("r", actor="anna")
    assert release.verify().ok
    tampered(tmp_path, statement)
    verification = release.verify()
    assert not verification.ok
    assert any(problem in line for line in verification.problems), verification.problems


@pytest.mark.parametrize("statement", ["UPDATE ledger SET reason = ''", "DELETE FROM ledger"])
def test_the_database_itself_refuses_to_change_the_ledger(int8: Path, tmp_path: Path, statement: str) -> None:
    release.submit(int8, "r", actor="anna")
    with (
        sqlite3.connect(tmp_path / "quantgate.db") as connection,
        pytest.raises(sqlite3.IntegrityError, match="append-only"),
    ):
        connection.execute(statement)


def test_the_chain_starts_at_zeros_and_spans_all_releases(int8: Path, tmp_path: Path) -> None:
    release.submit(int8, "a", actor="anna")
    release.submit(write_comparison(tmp_path / "gptq", weights="b" * 64), "b", actor="anna")
    first, second = release.history("a")[0], release.history("b")[0]
    assert first.previous_hash == FIRST_PREVIOUS_HASH
    assert second.previous_hash == release.history("a")[-1].hash


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (lambda tmp: f"sqlite:///{tmp}/no/such/folder/q.db", "folder does not exist"),
        (lambda tmp: "nosuch://x", "release database"),
        (lambda tmp: f"sqlite:///{tmp}/garbage.db", "not a database"),
    ],
)
def test_a_database_that_does_not_answer_is_one_line(
    int8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: Callable[[Path], str], words: str
) -> None:
    (tmp_path / "garbage.db").write_text("this is no database at all, only words" * 100)
    monkeypatch.setenv("QUANTGATE_DATABASE_URL", url(tmp_path))
    with pytest.raises(RegistryError, match=words) as caught:
        release.submit(int8, "r", actor="anna")
    assert "\n" not in str(caught.value)
