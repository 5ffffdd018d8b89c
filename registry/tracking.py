"""A campaign in MLflow: one experiment per baseline, one run per variant.

Metric names are flat and stable, so that MLflow's own compare view, parallel coordinates and difference filter work
unaided; the glance metrics come first. Logging is idempotent: a variant is found again by its `variant_key` tag, a
run whose evidence has not changed is left alone, and one whose evidence has is brought up to date in place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import LoggedModelStatus, Metric, Param, RunTag
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from registry import plots
from registry.errors import RegistryError
from registry.headline import glance
from registry.json_files import document_digest, file_digest
from registry.mlflow_view import VIEW, VIEW_TAG, experiment_tags, run_colour, run_name, run_note
from registry.model_versions import CHAMPION, register_variant, version_with_alias
from registry.store import artifact_location, check_store, client, speaking_to_store, store_uri, ui_command
from registry.variant import CampaignRecord, VariantRecord

__all__ = ["check_store", "find_run", "log_campaign", "log_variant", "model_name", "store_uri", "ui_command", "ui_url"]

QUALITY_EVIDENCE = ("samples.parquet", "batches.parquet")
SPEED_EVIDENCE = ("requests.parquet", "steps.parquet", "resources.parquet")
MAX_PARAM_LENGTH = 6000
METRICS_PER_CALL = 500


def log_campaign(campaign: CampaignRecord, report: Path | None = None) -> dict[str, str]:
    """Log every variant, the baseline first; returns variant name -> run id.

    Raises RegistryError, within seconds, if the store does not answer.
    """
    check_store()
    store = client()
    with speaking_to_store():
        experiment_id = _experiment(store, campaign)
    runs: dict[str, str] = {}
    for variant in campaign.variants:
        baseline_run = runs.get(campaign.baseline.name)
        runs[variant.name] = log_variant(variant, campaign, experiment_id, baseline_run_id=baseline_run, report=report)
    with speaking_to_store():
        for name, value in experiment_tags(campaign).items():
            store.set_experiment_tag(experiment_id, name, value)
    return runs


def log_variant(
    variant: VariantRecord,
    campaign: CampaignRecord,
    experiment_id: str,
    *,
    baseline_run_id: str | None = None,
    report: Path | None = None,
) -> str:
    """Log one variant to the experiment; returns its run id. `baseline_run_id` None: this is the baseline."""
    store = client()
    with speaking_to_store():
        run_id = find_run(store, experiment_id, variant.key)
        if run_id is None:
            run_id = store.create_run(experiment_id, run_name=run_name(variant, baseline_run_id is None)).info.run_id
        run = store.get_run(run_id)
        evidence = _evidence_digest(variant)
        if run.data.tags.get("evidence_digest") != evidence:
            _log_evidence(store, run_id, experiment_id, variant, campaign, baseline_run_id or run_id, evidence)
        if report is not None and run.data.tags.get("report_digest") != file_digest(report):
            store.log_artifact(run_id, str(report))
            store.set_tag(run_id, "report_digest", file_digest(report))
        if run.info.status != "FINISHED":
            store.set_terminated(run_id)
    return run_id


def find_run(store: MlflowClient, experiment_id: str, key: str) -> str | None:
    """The run of the variant with this key; the oldest, should there be several."""
    runs = store.search_runs(
        [experiment_id], f"tags.variant_key = '{key}'", order_by=["attributes.start_time ASC"], max_results=1
    )
    return runs[0].info.run_id if runs else None


def ui_url(port: int) -> str:
    """The address, in the UI at `port`, of the saved view on the newest campaign; the front page if there is none."""
    store = client()
    with speaking_to_store():
        experiments = store.search_experiments(order_by=["last_update_time DESC"], max_results=200)
    root = f"http://127.0.0.1:{port}"
    for experiment in experiments:
        if VIEW_TAG in experiment.tags:
            return f"{root}/#/experiments/{experiment.experiment_id}/runs?viewStateShareKey={VIEW}"
    return root


def model_name(campaign: CampaignRecord) -> str:
    """The name of experiment and registered model: the baseline's name, and enough of its key to be its alone."""
    safe = "".join(letter if letter.isalnum() or letter in "-_. " else "-" for letter in campaign.model)
    return f"{safe}-{campaign.baseline.key[:8]}"


def _log_evidence(
    store: MlflowClient,
    run_id: str,
    experiment_id: str,
    variant: VariantRecord,
    campaign: CampaignRecord,
    baseline_run_id: str,
    evidence: str,
) -> None:
    tags = _tags(variant, campaign, baseline_run_id)
    store.log_batch(run_id, params=_new_params(store, run_id, variant), tags=[RunTag(k, v) for k, v in tags.items()])
    is_baseline = baseline_run_id == run_id
    store.update_run(run_id, name=run_name(variant, is_baseline))
    model_id = _logged_model(store, experiment_id, run_id, variant, tags)
    now = int(time.time() * 1000)
    values = glance(variant, is_baseline) | variant.metrics()
    metrics = [Metric(name, value, now, 0, model_id=model_id, run_id=run_id) for name, value in values.items()]
    for start in range(0, len(metrics), METRICS_PER_CALL):
        store.log_batch(run_id, metrics=metrics[start : start + METRICS_PER_CALL])
    _log_tables(store, run_id, variant)
    _log_files(store, run_id, variant)
    for name, figure in (
        ("quality", plots.quality_forest(variant)),
        ("memory", plots.memory_bars(variant)),
        ("speed", plots.speed_ratios(variant)),
    ):
        if figure is not None:
            store.log_figure(run_id, figure, f"plots/{name}.png")
    name = model_name(campaign)
    version = register_variant(store, name, variant, run_id, model_id, tags)
    if is_baseline and version_with_alias(store, name, CHAMPION) is None:
        store.set_registered_model_alias(name, CHAMPION, version.version)
    # Last, so that a run that was cut short is logged again.
    store.set_tag(run_id, "evidence_digest", evidence)


def _experiment(store: MlflowClient, campaign: CampaignRecord) -> str:
    name = model_name(campaign)
    found = store.get_experiment_by_name(name)
    if found is None:
        location = artifact_location(store_uri())
        place = None if location is None else f"{location}/{name.replace(' ', '-')}"
        return store.create_experiment(name, artifact_location=place, tags={"baseline_key": campaign.baseline.key})
    if found.lifecycle_stage == "deleted":
        raise RegistryError(f"MLflow experiment {name} is in the trash; restore it in the UI or delete it for good")
    experiment_id: str = found.experiment_id
    return experiment_id


def _tags(variant: VariantRecord, campaign: CampaignRecord, baseline_run_id: str) -> dict[str, str]:
    tags = {
        "variant": variant.name,
        "variant_key": variant.key,
        "campaign": campaign.name,
        "baseline_run_id": baseline_run_id,
        "verdict": variant.verdict or "baseline",
        "mlflow.note.content": run_note(variant, campaign),
        "mlflow.runColor": run_colour(variant, campaign),
    }
    for name, value in variant.identity.items():
        if isinstance(value, str | int | float):
            tags[name] = str(value)
    manifest = variant.manifest or {}
    if manifest:
        tags["recipe_digest"] = document_digest(manifest.get("recipe") or {})
        tags["source_digest"] = str(manifest.get("source_digest"))
    if variant.comparison_file is not None:
        tags["comparison_digest"] = file_digest(variant.comparison_file)
    if variant.checkpoint is not None:
        tags["checkpoint"] = str(variant.checkpoint.absolute())
    return tags


def _new_params(store: MlflowClient, run_id: str, variant: VariantRecord) -> list[Param]:
    """The flat recipe. A parameter cannot change, and the weights' digest in the run's key fixes the recipe."""
    there = store.get_run(run_id).data.params
    params = {"variant": variant.name, **variant.recipe()}
    for name in ("compute", "dtype", "kv_dtype"):
        if name in variant.identity:
            params[name] = variant.identity[name]
    return [Param(name, str(value)[:MAX_PARAM_LENGTH]) for name, value in params.items() if name not in there]


def _logged_model(
    store: MlflowClient, experiment_id: str, run_id: str, variant: VariantRecord, tags: Mapping[str, str]
) -> str:
    """The id of the variant's LoggedModel: the one made with this run, or a new one."""
    found = store.search_logged_models([experiment_id], f"source_run_id = '{run_id}'", max_results=1)
    if found:
        model_id: str = found[0].model_id
        store.set_logged_model_tags(model_id, dict(tags))
        return model_id
    params = {name: str(value)[:MAX_PARAM_LENGTH] for name, value in variant.recipe().items()}
    made = store.create_logged_model(
        experiment_id,
        name="".join(letter if letter not in "/:.%\"'" else "-" for letter in variant.name),
        source_run_id=run_id,
        tags={**tags, "mlflow.model.isExternal": "true"},
        params=params,
    )
    store.finalize_logged_model(made.model_id, LoggedModelStatus.READY)
    return str(made.model_id)


def _log_tables(store: MlflowClient, run_id: str, variant: VariantRecord) -> None:
    comparison = variant.comparison or {}
    tasks = comparison.get("tasks") or (variant.quality or {}).get("tasks") or []
    for name, rows in (("tasks", tasks), ("flips", comparison.get("flips")), ("checks", comparison.get("checks"))):
        if rows:
            _replace_table(store, run_id, f"tables/{name}.json", rows)


def _replace_table(store: MlflowClient, run_id: str, path: str, rows: list[Mapping[str, Any]]) -> None:
    """Log rows as a table. `log_table` appends to a table that is there, so that one goes first."""
    if any(item.path == path for item in store.list_artifacts(run_id, "tables")):
        get_artifact_repository(store.get_run(run_id).info.artifact_uri).delete_artifacts(path)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    store.log_table(run_id, {name: [row.get(name) for row in rows] for name in columns}, path)


def _log_files(store: MlflowClient, run_id: str, variant: VariantRecord) -> None:
    evidence = [variant.quality_folder / name for name in QUALITY_EVIDENCE]
    evidence += [variant.speed_folder / name for name in SPEED_EVIDENCE]
    documents = [variant.quality_folder / "quality.json", variant.speed_folder / "speed.json", variant.comparison_file]
    if variant.checkpoint is not None:
        documents.append(variant.checkpoint / "quantgate.json")
    for files, folder in ((evidence, "evidence"), (documents, "documents")):
        for file in files:
            if file is not None and file.exists():
                store.log_artifact(run_id, str(file), folder)


def _evidence_digest(variant: VariantRecord) -> str:
    documents = (variant.name, variant.manifest, variant.quality, variant.speed, variant.comparison)
    return document_digest([None if each is None else each for each in documents])
