"""The MLflow store: where it is, whether it answers, and how to open MLflow's own UI on it.

The store is `sqlite:///mlflow.db` in the working directory, or what MLFLOW_TRACKING_URI says. A client gets the store's
address explicitly, so nothing here changes MLflow's global state. A store that does not answer is one RegistryError
within a few seconds, never a minute of retries.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

# MLflow reads these when it is imported: no usage reports, no banners, no hints about Git.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from registry.errors import RegistryError

for _noisy in ("mlflow", "alembic"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)

# What a user may override: a slow network needs more than we think a server should take.
PING_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "4",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
}
LOGGING_ENVIRONMENT = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "60", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}


def store_uri() -> str:
    """The tracking store's URI; a SQLite file's path in it is absolute."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    path = _sqlite_path(uri)
    return uri if path is None else f"sqlite:///{path}"


def is_server(uri: str) -> bool:
    """Does an MLflow server stand between us and the store?"""
    return urlsplit(uri).scheme in ("http", "https")


def artifact_location(uri: str) -> str | None:
    """Where new experiments keep artifacts: beside a SQLite file, wherever we run; None lets the store decide."""
    path = _sqlite_path(uri)
    return None if path is None else (path.parent / "mlruns").as_uri()


def client() -> MlflowClient:
    """A client of the store. Calls on it belong inside `speaking_to_store`."""
    uri = store_uri()
    path = _sqlite_path(uri)
    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RegistryError(f"MLflow store {uri}: cannot be written; run elsewhere or set MLFLOW_TRACKING_URI")
    with speaking_to_store():
        if path is not None and not path.exists():
            _create_whole(path)
        return MlflowClient(tracking_uri=uri, registry_uri=os.environ.get("MLFLOW_REGISTRY_URI") or uri)


def _create_whole(path: Path) -> None:
    """Make the SQLite store beside its place, then link it there: MLflow never finishes a store that a full disk or a
    kill left half made. Of two processes at once, one's store stays."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        made = Path(scratch) / path.name
        MlflowClient(tracking_uri=f"sqlite:///{made}").search_experiments(max_results=1)
        with contextlib.suppress(FileExistsError):
            os.link(made, path)


def check_store() -> None:
    """RegistryError, within a few seconds, unless the store answers."""
    with _environment(PING_ENVIRONMENT):
        store = client()
        with speaking_to_store():
            store.search_experiments(max_results=1)


@contextmanager
def speaking_to_store() -> Iterator[None]:
    """Turns MLflow's own errors into one RegistryError line, and bounds how long a request to a server may take."""
    try:
        with _environment(LOGGING_ENVIRONMENT):
            yield
    except MlflowException as error:
        raise RegistryError(_one_line(str(error))) from None
    except (OSError, ImportError) as error:
        raise RegistryError(_one_line(f"{type(error).__name__}: {error}")) from None
    except Exception as error:
        # SQLAlchemy's errors reach us unwrapped when the database file itself is broken.
        if type(error).__module__.startswith("sqlalchemy"):
            raise RegistryError(_one_line(str(error))) from None
        raise


def ui_command(port: int) -> tuple[list[str], dict[str, str]]:
    """The command line and environment that serve MLflow's UI on the store at 127.0.0.1:`port`, with two processes.

    RegistryError if the store is a server: that has its own UI.
    """
    uri = store_uri()
    if is_server(uri):
        raise RegistryError(f"MLFLOW_TRACKING_URI is a server; its UI is at {uri}")
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri]
    location = artifact_location(uri)
    if location is not None:
        command += ["--default-artifact-root", location]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    return command, {**os.environ, **quiet}


def _sqlite_path(uri: str) -> Path | None:
    """The absolute path of a SQLite store's file."""
    if not uri.startswith("sqlite:///"):
        return None
    return Path(uri.removeprefix("sqlite:///")).absolute()


@contextmanager
def _environment(defaults: dict[str, str]) -> Iterator[None]:
    """Set the variables that are not set, and unset them afterwards."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _one_line(message: str) -> str:
    line = " ".join(message.split())
    if "Max retries exceeded" in line or "Connection refused" in line or "timed out" in line:
        return (
            f"MLflow server at {store_uri()} does not answer; start it, or unset MLFLOW_TRACKING_URI to use ./mlflow.db"
        )
    return f"MLflow store {store_uri()}: {line[:300]}"
