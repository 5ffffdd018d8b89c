"""The ledger: an append-only, hash-chained record of every act on every release.

Each line holds the hash of the line before it and of its own content, so changing, removing or reordering a line breaks
every hash after it. The invariant, checked by `check_integrity`: sequence numbers have no gap, every hash is that
of its line, every line names its predecessor, and each release's row says what its last line says.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import DDL, Connection, Engine, ForeignKey, String, Text, UniqueConstraint, create_engine, event, select
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from registry.errors import Conflict, RegistryError

FIRST_PREVIOUS_HASH = "0" * 64
BUSY_SECONDS = 10


class Base(DeclarativeBase):
    """The tables of the release database."""


class ReleaseRow(Base):
    """One release as it stands. `version` counts its ledger lines: an update must name the version it read."""

    __tablename__ = "releases"

    id: Mapped[str] = mapped_column(String(200), primary_key=True)
    state: Mapped[str] = mapped_column(String(20))
    version: Mapped[int]
    candidate: Mapped[str] = mapped_column(String(200))
    variant_key: Mapped[str] = mapped_column(String(64))
    baseline_key: Mapped[str] = mapped_column(String(64))
    verdict: Mapped[str] = mapped_column(String(20))
    evidence_path: Mapped[str] = mapped_column(Text)
    evidence_digest: Mapped[str] = mapped_column(String(64))


class LedgerRow(Base):
    """One line. `sequence` counts all lines from 1, `step` those of one release from 1."""

    __tablename__ = "ledger"
    __table_args__ = (UniqueConstraint("release_id", "step"),)

    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    release_id: Mapped[str] = mapped_column(ForeignKey("releases.id"))
    step: Mapped[int]
    at: Mapped[str] = mapped_column(String(40))
    actor: Mapped[str] = mapped_column(String(200))
    action: Mapped[str] = mapped_column(String(20))
    from_state: Mapped[str] = mapped_column(String(20))
    to_state: Mapped[str] = mapped_column(String(20))
    reason: Mapped[str] = mapped_column(Text)
    evidence_digest: Mapped[str] = mapped_column(String(64))
    previous_hash: Mapped[str] = mapped_column(String(64))
    hash: Mapped[str] = mapped_column(String(64), unique=True)


for _operation in ("UPDATE", "DELETE"):
    event.listen(
        LedgerRow.__table__,
        "after_create",
        DDL(
            f"CREATE TRIGGER ledger_no_{_operation.lower()} BEFORE {_operation} ON ledger "
            "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"
        ).execute_if(dialect="sqlite"),
    )


@dataclass(frozen=True)
class LedgerLine:
    """One act: who did what to which release, when (UTC, ISO 8601), why, on which evidence."""

    sequence: int
    release_id: str
    step: int
    at: str
    actor: str
    action: str
    from_state: str
    to_state: str
    reason: str
    evidence_digest: str
    previous_hash: str
    hash: str

    def to_mapping(self) -> dict[str, str | int]:
        return asdict(self)

    def computed_hash(self) -> str:
        """sha256 of the line's canonical JSON, its own hash left out."""
        content = {name: value for name, value in asdict(self).items() if name != "hash"}
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode("utf-8")).hexdigest()


def database_url() -> str:
    """QUANTGATE_DATABASE_URL, or quantgate.db in the working directory."""
    return os.environ.get("QUANTGATE_DATABASE_URL") or "sqlite:///quantgate.db"


@contextmanager
def ledger_session() -> Iterator[Session]:
    """A session in one transaction: committed if the block ends well, rolled back if it raises.

    On SQLite the transaction takes the write lock at once, so two writers wait for each other and none fails half-way.
    Raises Conflict if another writer took the same place in the ledger, RegistryError if the database does not answer.
    """
    url = database_url()
    engine: Engine | None = None
    try:
        engine = _engine(url)
        Base.metadata.create_all(engine)
        with Session(engine) as session, session.begin():
            yield session
    except IntegrityError:
        raise Conflict(
            "somebody else acted at the same moment; look at the release again and repeat if it still holds"
        ) from None
    except OperationalError as error:
        raise RegistryError(f"release database {_without_password(url)}: {str(error.orig).splitlines()[0]}") from None
    except SQLAlchemyError as error:
        raise RegistryError(f"release database {_without_password(url)}: {str(error).splitlines()[0]}") from None
    except ModuleNotFoundError as error:
        raise RegistryError(
            f"release database {_without_password(url)}: its driver is missing ({error.name}); pip install it"
        ) from None
    finally:
        if engine is not None:
            engine.dispose()


def append(
    session: Session,
    release: ReleaseRow,
    *,
    at: str,
    actor: str,
    action: str,
    from_state: str,
    reason: str,
) -> LedgerLine:
    """Write the act that brought `release` to its present state as the ledger's next line."""
    last = session.scalars(select(LedgerRow).order_by(LedgerRow.sequence.desc()).limit(1)).first()
    line = LedgerLine(
        sequence=1 if last is None else last.sequence + 1,
        release_id=release.id,
        step=release.version,
        at=at,
        actor=actor,
        action=action,
        from_state=from_state,
        to_state=release.state,
        reason=reason,
        evidence_digest=release.evidence_digest,
        previous_hash=FIRST_PREVIOUS_HASH if last is None else last.hash,
        hash="",
    )
    line = LedgerLine(**{**asdict(line), "hash": line.computed_hash()})
    session.add(LedgerRow(**asdict(line)))
    session.flush()
    return line


def lines(session: Session, release_id: str | None = None) -> list[LedgerLine]:
    """The ledger's lines in order, of one release or of all."""
    query = select(LedgerRow).order_by(LedgerRow.sequence)
    if release_id is not None:
        query = query.where(LedgerRow.release_id == release_id)
    names = LedgerLine.__dataclass_fields__
    return [LedgerLine(**{name: getattr(row, name) for name in names}) for row in session.scalars(query)]


def check_integrity(session: Session) -> list[str]:
    """What is wrong with the ledger, one line each; empty if the chain and the releases hold together."""
    ledger = lines(session)
    problems = chain_problems(ledger)
    last = {line.release_id: line for line in ledger}
    for row in session.scalars(select(ReleaseRow).order_by(ReleaseRow.id)):
        line = last.get(row.id)
        if line is None:
            problems.append(f"release {row.id}: no line in the ledger")
        elif (line.to_state, line.step, line.evidence_digest) != (row.state, row.version, row.evidence_digest):
            problems.append(
                f"release {row.id}: is {row.state} at step {row.version}, but its last line ({line.sequence}) says "
                f"{line.to_state} at step {line.step}"
            )
    return problems


def chain_problems(ledger: Sequence[LedgerLine]) -> list[str]:
    """What is wrong with the chain itself. Pure."""
    problems, previous = [], FIRST_PREVIOUS_HASH
    for expected, line in enumerate(ledger, start=1):
        if line.sequence != expected:
            problems.append(f"line {expected}: missing; the next one there is {line.sequence}")
            break
        if line.previous_hash != previous:
            problems.append(f"line {line.sequence}: does not follow from the line before it")
        if line.hash != line.computed_hash():
            problems.append(f"line {line.sequence}: its content was changed after it was written")
        previous = line.hash
    return problems


def _engine(url: str) -> Engine:
    engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS} if url.startswith("sqlite") else {})
    if engine.dialect.name == "sqlite":
        path = engine.url.database
        if path and path != ":memory:" and not Path(path).absolute().parent.is_dir():
            raise RegistryError(
                f"release database {url}: its folder does not exist; make it, or set QUANTGATE_DATABASE_URL"
            )
        event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
        event.listen(engine, "begin", _begin_immediate)
    return engine


def _begin_immediate(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
