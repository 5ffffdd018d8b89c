"""Releases: a candidate's way from judged evidence to a decision.

An act reads the release, checks that it is legal and that the evidence is still the one that was submitted, and writes
the new state and one ledger line in a single transaction. Two people at once: the second's update names a version that
is no longer there, and it is told who was first. MLflow shows the state, but never holds up an act.
"""

from __future__ import annotations

import getpass
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from registry import ledger
from registry.errors import Conflict, IllegalTransition, RegistryError
from registry.json_files import file_digest, read_json
from registry.ledger import LedgerLine, LedgerRow, ReleaseRow, ledger_session
from registry.transitions import DRAFT, FINAL, next_state
from registry.variant import variant_key

if TYPE_CHECKING:
    from registry.mirror import Picture

PENDING = "pending"


@dataclass(frozen=True)
class Release:
    """A release as it stands. `mirror`: what MLflow shows, or why it does not show it yet (None where not asked)."""

    id: str
    state: str
    version: int
    candidate: str
    variant_key: str
    verdict: str
    reasons: tuple[str, ...]
    evidence: Path
    evidence_digest: str
    evidence_intact: bool
    mirror: str | None = None

    def to_mapping(self) -> dict[str, Any]:
        return {**asdict(self), "evidence": str(self.evidence), "reasons": list(self.reasons)}


@dataclass(frozen=True)
class Verification:
    """The result of `verify`: how many lines were checked, what is wrong with them, and what MLflow does not show."""

    lines: int
    head: str
    problems: tuple[str, ...]
    mirror_problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def submit(comparison: Path, name: str | None = None, actor: str | None = None) -> Release:
    """Hand in a judged candidate: a variant's folder or its comparison.json.

    A release with this name that is not decided yet is evaluated anew on the evidence given. An inconclusive verdict
    puts it on hold. name: `<campaign>-<variant>` from the folder's path unless given.
    """
    path = (comparison / "comparison.json" if comparison.is_dir() else comparison).absolute()
    document = read_json(path)
    _check_comparison(path, document)
    who, digest = _actor(actor), file_digest(path)
    release_id = name or _default_name(path)
    with ledger_session() as session:
        row = session.get(ReleaseRow, release_id)
        if row is None:
            row = ReleaseRow(id=release_id, state=DRAFT, version=1, **_evidence(path, digest, document))
            session.add(row)
            ledger.append(session, row, at=_now(), actor=who, action="submit", from_state="", reason=f"evidence {path}")
        elif row.evidence_digest == digest and row.state not in (DRAFT, *FINAL):
            raise Conflict(
                f"release {release_id}: already submitted on this evidence, and {row.state}; nothing changed"
            )
        _step(session, row, "evaluate", who, f"verdict {document['verdict']}", **_evidence(path, digest, document))
        if document["verdict"] == "inconclusive":
            _step(session, row, "hold", who, "inconclusive evidence needs more samples, or an override")
    return _mirrored(release_id)


def approve(
    release_id: str, actor: str | None = None, override: str | None = None, expected_version: int | None = None
) -> Release:
    """Approve. Needs a passing verdict, or `override` with a reason. The evidence must be what was submitted.

    expected_version: the version that the person saw (a web page's); a release that moved on since is a Conflict.
    """
    seen = show(release_id)
    _same_version(seen, expected_version)
    next_state(seen.state, "approve")
    if not seen.evidence_intact:
        raise RegistryError(
            f"release {release_id}: {seen.evidence} is missing or was changed after it was submitted; submit it again"
        )
    reason = (override or "").strip()
    if seen.verdict != "pass" and not reason:
        raise RegistryError(
            f"release {release_id}: its verdict is {seen.verdict}, so approving it needs --override with a reason"
        )
    if seen.verdict != "pass":
        reason = f"override of verdict {seen.verdict}: {reason}"
    return act(release_id, "approve", actor, reason or "verdict pass", expected_version=seen.version)


def reject(release_id: str, actor: str | None = None, reason: str = "", expected_version: int | None = None) -> Release:
    """Reject, with a reason."""
    if not reason.strip():
        raise RegistryError(f"release {release_id}: rejecting it needs a reason")
    return act(release_id, "reject", actor, reason.strip(), expected_version=expected_version)


def act(release_id: str, action: str, actor: str | None, reason: str, expected_version: int | None = None) -> Release:
    """Any other act of the transition table (shadow, canary, promote, rollback). Approving goes through `approve`."""
    seen = show(release_id)
    _same_version(seen, expected_version)
    who = _actor(actor)
    with ledger_session() as session:
        row = _row(session, release_id)
        if row.version != seen.version:
            raise _too_late(session, row)
        _step(session, row, action, who, reason)
    return _mirrored(release_id)


def show(release_id: str) -> Release:
    """The release as it stands, without asking MLflow."""
    with ledger_session() as session:
        return _release(_row(session, release_id))


def list_releases() -> list[Release]:
    """All releases, by name."""
    with ledger_session() as session:
        return [_release(row) for row in session.scalars(select(ReleaseRow).order_by(ReleaseRow.id))]


def history(release_id: str) -> list[LedgerLine]:
    """Every act on the release, in order."""
    with ledger_session() as session:
        _row(session, release_id)
        return ledger.lines(session, release_id)


def verify() -> Verification:
    """Recompute the whole chain, compare MLflow with it and bring that up to date; says what was wrong with either."""
    # Here and below, because importing MLflow takes seconds that `show` and `history` need not spend.
    from registry import mirror

    with ledger_session() as session:
        problems = ledger.check_integrity(session)
        ledger_lines = ledger.lines(session)
        # Of several releases of one variant, MLflow shows the one that was acted on last.
        rows = {row.id: row for row in session.scalars(select(ReleaseRow))}
        latest = {
            rows[line.release_id].variant_key: line.release_id for line in ledger_lines if line.release_id in rows
        }
        # A mirror of a broken ledger would spread the damage.
        pictures = [] if problems else [_picture(session, rows[release_id]) for release_id in latest.values()]
    told = [mirror.difference(picture) for picture in pictures]
    told += [line for line in map(mirror.show, pictures) if line.startswith(PENDING)]
    head = ledger_lines[-1].hash if ledger_lines else ledger.FIRST_PREVIOUS_HASH
    return Verification(len(ledger_lines), head, tuple(problems), tuple(line for line in told if line))


def _step(session: Session, row: ReleaseRow, action: str, actor: str, reason: str, **evidence: str) -> None:
    """Move the row along the table and append the line. The update names the version that was read: optimistic lock."""
    before, version = row.state, row.version
    try:
        after = next_state(before, action)
    except IllegalTransition as error:
        raise IllegalTransition(f"release {row.id}: {error}{_who_was_last(session, row.id)}") from None
    changes = {"state": after, "version": version + 1, **evidence}
    session.flush()
    result = session.execute(
        update(ReleaseRow)
        .where(ReleaseRow.id == row.id, ReleaseRow.version == version)
        .values(**changes)
        .execution_options(synchronize_session=False)
    )
    if result.rowcount != 1:  # type: ignore[attr-defined]
        raise _too_late(session, row)
    session.refresh(row)
    ledger.append(session, row, at=_now(), actor=actor, action=action, from_state=before, reason=reason)


def _check_comparison(path: Path, document: dict[str, Any]) -> None:
    needed = {"verdict": document.get("verdict")}
    needed |= {f"{side}.identity": (document.get(side) or {}).get("identity") for side in ("candidate", "baseline")}
    for field, value in needed.items():
        if not value:
            raise RegistryError(f"{path}: no '{field}', so it is not a comparison; run quantgate compare again")


def _evidence(path: Path, digest: str, document: dict[str, Any]) -> dict[str, str]:
    candidate = document["candidate"]
    return {
        "candidate": str(candidate.get("name") or path.parent.name),
        "variant_key": variant_key(candidate["identity"]),
        "baseline_key": variant_key(document["baseline"]["identity"]),
        "verdict": str(document["verdict"]),
        "evidence_path": str(path),
        "evidence_digest": digest,
    }


def _mirrored(release_id: str) -> Release:
    """The release, after showing its state in MLflow."""
    from registry import mirror

    with ledger_session() as session:
        row = _row(session, release_id)
        release, picture = _release(row), _picture(session, row)
    return replace(release, mirror=mirror.show(picture))


def _picture(session: Session, row: ReleaseRow) -> Picture:
    """What MLflow ought to show of this release."""
    from registry.mirror import Picture

    acts = session.execute(
        select(ReleaseRow.variant_key, LedgerRow.to_state)
        .join(LedgerRow, LedgerRow.release_id == ReleaseRow.id)
        .where(ReleaseRow.baseline_key == row.baseline_key)
        .order_by(LedgerRow.sequence)
    )
    return Picture(
        release_id=row.id,
        variant_key=row.variant_key,
        baseline_key=row.baseline_key,
        state=row.state,
        ledger_hash=ledger.lines(session, row.id)[-1].hash,
        acts=tuple((key, state) for key, state in acts),
    )


def _row(session: Session, release_id: str) -> ReleaseRow:
    row = session.get(ReleaseRow, release_id)
    if row is None:
        known = ", ".join(session.scalars(select(ReleaseRow.id).order_by(ReleaseRow.id).limit(10)))
        raise RegistryError(f"no release '{release_id}'; there {'are ' + known if known else 'is none yet'}")
    return row


def _release(row: ReleaseRow) -> Release:
    path = Path(row.evidence_path)
    intact = path.is_file() and file_digest(path) == row.evidence_digest
    return Release(
        id=row.id,
        state=row.state,
        version=row.version,
        candidate=row.candidate,
        variant_key=row.variant_key,
        verdict=row.verdict,
        reasons=tuple(read_json(path).get("reasons") or ()) if intact else (),
        evidence=path,
        evidence_digest=row.evidence_digest,
        evidence_intact=intact,
    )


def _same_version(seen: Release, expected: int | None) -> None:
    if expected is not None and seen.version != expected:
        with ledger_session() as session:
            raise _too_late(session, _row(session, seen.id))


def _too_late(session: Session, row: ReleaseRow) -> Conflict:
    session.refresh(row)
    return Conflict(f"release {row.id}: it is {row.state} now{_who_was_last(session, row.id)}; nothing was written")


def _who_was_last(session: Session, release_id: str) -> str:
    last = session.scalars(
        select(LedgerRow).where(LedgerRow.release_id == release_id).order_by(LedgerRow.step.desc()).limit(1)
    ).first()
    return "" if last is None else f" ({last.action} by {last.actor} at {last.at})"


def _default_name(path: Path) -> str:
    """runs/demo/variants/int8/comparison.json -> demo-int8."""
    variant = path.parent
    inside_campaign = variant.parent.name == "variants" and variant.parent.parent.name
    return f"{variant.parent.parent.name}-{variant.name}" if inside_campaign else variant.name


def _actor(actor: str | None) -> str:
    """Who acts: the name given, else the login name."""
    if actor is None:
        try:
            actor = getpass.getuser()
        except (OSError, KeyError):
            actor = ""
    if not actor.strip():
        raise RegistryError("who acts is not known; name an actor (--as NAME)")
    return actor.strip()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
