"""A release's state as MLflow shows it: a tag on the model version and its run, and the aliases.

The ledger is the truth; this is a picture of it. So a mirror never fails an act: it says that it is pending and why,
and the next act, or `verify`, brings it up to date. Showing the same state again changes nothing.
"""

from __future__ import annotations

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

from registry.errors import RegistryError
from registry.model_versions import CANDIDATE, CHAMPION, PREVIOUS, find_version, version_with_alias
from registry.store import check_store, client, speaking_to_store
from registry.transitions import APPROVED, CANARY, DRAFT, EVALUATED, FINAL, HELD, PROMOTED, ROLLED_BACK, SHADOW

_UNDER_WAY = (DRAFT, EVALUATED, HELD, APPROVED, SHADOW, CANARY)


def show_state(variant_key: str, release_id: str, state: str, ledger_hash: str) -> str:
    """Bring MLflow up to date with one release; tells what it shows, or `pending: ` and why not."""
    try:
        check_store()
        store = client()
        with speaking_to_store():
            version = find_version(store, variant_key)
            if version is None:
                return "pending: the variant is not in MLflow yet; `quantgate run` logs it"
            tags = {"release.state": state, "release.id": release_id, "release.ledger_hash": ledger_hash}
            for name, value in tags.items():
                store.set_model_version_tag(version.name, version.version, name, value)
                if version.run_id:
                    store.set_tag(version.run_id, name, value)
            _aliases(store, version, state)
            return f"MLflow shows it: {version.name} version {version.version}, {state}"
    except RegistryError as error:
        return f"pending: {error}"


def _aliases(store: MlflowClient, version: ModelVersion, state: str) -> None:
    """`candidate`: on its way. `champion`: serves. `previous`: served before, and is what a rollback returns to."""
    model, number = version.name, version.version
    champion = version_with_alias(store, model, CHAMPION)
    candidate = version_with_alias(store, model, CANDIDATE)
    is_candidate = candidate is not None and str(candidate.version) == str(number)
    is_champion = champion is not None and str(champion.version) == str(number)
    if state in _UNDER_WAY and not is_candidate:
        store.set_registered_model_alias(model, CANDIDATE, number)
    if state in (PROMOTED, *FINAL) and is_candidate:
        store.delete_registered_model_alias(model, CANDIDATE)
    if state == PROMOTED and not is_champion:
        if champion is not None:
            store.set_registered_model_alias(model, PREVIOUS, champion.version)
        store.set_registered_model_alias(model, CHAMPION, number)
    if state == ROLLED_BACK and is_champion:
        previous = version_with_alias(store, model, PREVIOUS)
        if previous is not None:
            store.set_registered_model_alias(model, CHAMPION, previous.version)
