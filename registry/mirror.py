"""A release's state as MLflow shows it: tags on the model version and its run, and the aliases.

The ledger is the truth; this is a picture of it. So a mirror never fails an act: it says that it is pending and why,
and the next act, or `verify`, brings it up to date. The aliases are computed from all acts on the baseline's releases,
not moved from where they happen to be, so that showing an old release again cannot move a newer one's alias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlflow import MlflowClient

from registry.errors import RegistryError
from registry.model_versions import CANDIDATE, CHAMPION, PREVIOUS, find_version, version_with_alias
from registry.store import check_store, client, speaking_to_store
from registry.transitions import FINAL, PROMOTED, ROLLED_BACK


@dataclass(frozen=True)
class Picture:
    """What MLflow ought to show. `acts`: (variant key, state after) of every act on its baseline, in order."""

    release_id: str
    variant_key: str
    baseline_key: str
    state: str
    ledger_hash: str
    acts: tuple[tuple[str, str], ...]

    def tags(self) -> dict[str, str]:
        return {
            "release.id": self.release_id,
            "release.state": self.state,
            "release.ledger_hash": self.ledger_hash,
        }


def aliases_after(baseline_key: str, acts: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Alias -> variant key. `champion` serves, `previous` is what a rollback returns to, `candidate` is on its way.

    Pure. Promotions are a stack on the baseline: a rollback takes its variant off it, wherever in it that lies.
    """
    serving, candidate = [baseline_key], None
    for key, state in acts:
        if state == PROMOTED:
            serving = [each for each in serving if each != key] + [key]
        elif state == ROLLED_BACK and key != baseline_key:
            serving = [each for each in serving if each != key]
        if state not in (PROMOTED, *FINAL):
            candidate = key
        elif candidate == key:
            candidate = None
    found = {CHAMPION: serving[-1]}
    if len(serving) > 1:
        found[PREVIOUS] = serving[-2]
    if candidate is not None:
        found[CANDIDATE] = candidate
    return found


def show(picture: Picture) -> str:
    """Bring MLflow up to date; tells what it shows, or `pending: ` and why not."""
    try:
        check_store()
        store = client()
        with speaking_to_store():
            version = find_version(store, picture.variant_key)
            if version is None:
                return "pending: the variant is not in MLflow yet; `quantgate run` logs it"
            for name, value in picture.tags().items():
                store.set_model_version_tag(version.name, version.version, name, value)
                if version.run_id:
                    store.set_tag(version.run_id, name, value)
            _set_aliases(store, version.name, aliases_after(picture.baseline_key, picture.acts))
            return f"MLflow shows it: {version.name} version {version.version}, {picture.state}"
    except RegistryError as error:
        return f"pending: {error}"


def difference(picture: Picture) -> str | None:
    """How MLflow differs from the picture, in words; None if it does not, or cannot be asked."""
    try:
        check_store()
        store = client()
        with speaking_to_store():
            version = find_version(store, picture.variant_key)
            if version is None:
                return None
            for name, value in picture.tags().items():
                shown = version.tags.get(name)
                if shown != value:
                    return f"release {picture.release_id}: MLflow showed {name} {shown}, the ledger says {value}"
            for alias, key in aliases_after(picture.baseline_key, picture.acts).items():
                shown_version = version_with_alias(store, version.name, alias)
                if shown_version is None or shown_version.tags.get("variant_key") != key:
                    number = "none" if shown_version is None else f"version {shown_version.version}"
                    return f"release {picture.release_id}: MLflow's alias {alias} was on {number}, the ledger differs"
    except RegistryError:
        pass
    return None


def _set_aliases(store: MlflowClient, model: str, keys: dict[str, str]) -> None:
    for alias in (CHAMPION, PREVIOUS, CANDIDATE):
        wanted = find_version(store, keys[alias], model) if alias in keys else None
        shown = version_with_alias(store, model, alias)
        if wanted is not None and (shown is None or str(shown.version) != str(wanted.version)):
            store.set_registered_model_alias(model, alias, wanted.version)
        elif alias not in keys and shown is not None:
            store.delete_registered_model_alias(model, alias)
