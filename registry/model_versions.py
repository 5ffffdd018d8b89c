"""Registered models: one per baseline, one version per variant, and the aliases that say who serves.

A version points at the checkpoint where it lies; weights are never copied into the store. Which version a variant is,
is told by its `variant_key` tag, so registering again finds the version there.
"""

from __future__ import annotations

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from registry.store import is_server, store_uri
from registry.variant import VariantRecord

CHAMPION, CANDIDATE, PREVIOUS = "champion", "candidate", "previous"


def find_version(store: MlflowClient, key: str, model: str | None = None) -> ModelVersion | None:
    """The newest version of the variant with this key, in any registered model unless `model` is given."""
    where = f"tags.variant_key = '{key}'" + (f" and name = '{model}'" if model else "")
    versions = store.search_model_versions(where)
    return max(versions, key=lambda version: int(version.version), default=None)


def register_variant(
    store: MlflowClient, model: str, variant: VariantRecord, run_id: str, model_id: str, tags: dict[str, str]
) -> ModelVersion:
    """The variant's version in the registered model `model`; made if it is not there, its tags brought up to date."""
    try:
        store.get_registered_model(model)
    except MlflowException:
        store.create_registered_model(model, description="A baseline and its quantized variants, logged by quantgate.")
    version = find_version(store, variant.key, model)
    if version is None:
        version = store.create_model_version(
            model, source=_source(variant, run_id, model_id), run_id=run_id, model_id=model_id, tags=tags
        )
    else:
        for name, value in tags.items():
            store.set_model_version_tag(model, version.version, name, value)
    return version


def version_with_alias(store: MlflowClient, model: str, alias: str) -> ModelVersion | None:
    """The version that `alias` names, or None."""
    try:
        return store.get_model_version_by_alias(model, alias)
    except MlflowException:
        return None


def _source(variant: VariantRecord, run_id: str, model_id: str) -> str:
    """Where the version's bytes are. A server refuses sources on a client's disk: there, the logged model stands in."""
    if variant.checkpoint is None:
        return f"runs:/{run_id}"
    return f"models:/{model_id}" if is_server(store_uri()) else variant.checkpoint.absolute().as_uri()
