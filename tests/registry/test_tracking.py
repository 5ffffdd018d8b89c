"""A campaign's round trip through a real MLflow store on SQLite, and what happens when the store is not there."""

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from registry import release, tracking
from registry.errors import RegistryError
from registry.headline import GLANCE, glance, headline
from registry.mirror import Picture, show
from registry.model_versions import find_version
from registry.store import check_store, ui_command
from registry.variant import CampaignRecord, VariantRecord


@pytest.fixture
def small(campaign: CampaignRecord) -> CampaignRecord:
    """The baseline and two of its candidates: enough to claim things about, and quick."""
    kept = tuple(variant for variant in campaign.candidates if variant.name in ("int8", "int4"))
    return replace(campaign, candidates=kept)


def experiment(store: MlflowClient, campaign: CampaignRecord) -> str:
    return str(store.get_experiment_by_name(tracking.model_name(campaign)).experiment_id)


def named(campaign: CampaignRecord, name: str) -> VariantRecord:
    return next(variant for variant in campaign.variants if variant.name == name)


def test_a_campaign_is_one_experiment_with_one_run_per_variant(
    store: MlflowClient, small: CampaignRecord, tmp_path: Path
) -> None:
    report = tmp_path / "report.html"
    report.write_text("<html>")
    runs = tracking.log_campaign(small, report)
    assert set(runs) == {"baseline", "int4", "int8"}
    assert len(store.search_runs([experiment(store, small)])) == 3
    int8 = store.get_run(runs["int8"])
    assert int8.info.run_name == "int8 (pass)"
    assert int8.data.params["recipe.bits"] == "8"
    assert int8.data.tags["verdict"] == "pass"
    assert int8.data.tags["baseline_run_id"] == runs["baseline"]
    assert int8.data.tags["weights_digest"] == named(small, "int8").identity["weights_digest"]
    assert int8.info.status == "FINISHED"
    artifacts = {
        item.path
        for folder in ("", "evidence", "plots", "tables")
        for item in store.list_artifacts(int8.info.run_id, folder)
    }
    assert {
        "report.html",
        "evidence/samples.parquet",
        "evidence/batches.parquet",
        "evidence/requests.parquet",
        "evidence/steps.parquet",
        "evidence/resources.parquet",
        "plots/quality.png",
        "plots/memory.png",
        "plots/speed.png",
        "tables/tasks.json",
        "tables/flips.json",
        "tables/checks.json",
    } <= artifacts


def test_metric_names_are_the_designs_and_the_glance_sorts_first(store: MlflowClient, small: CampaignRecord) -> None:
    runs = tracking.log_campaign(small)
    metrics = store.get_run(runs["int4"]).data.metrics
    for name in (
        "quality.grammar.acc",
        "quality.grammar.acc.delta",
        "quality.grammar.acc.delta.low",
        "speed.chat.ttft_ms.p95",
        "speed.chat.ttft_ms.p95.ratio",
        "memory.weights_bytes",
        "quantize.fallbacks",
    ):
        assert name in metrics
    assert sorted(metrics)[: len(GLANCE)] == list(GLANCE)
    assert metrics["1_size_x"] == pytest.approx(metrics["memory.weights_bytes.ratio"], abs=1e-3)
    baseline = store.get_run(runs["baseline"]).data.metrics
    assert set(GLANCE) <= set(baseline), "the baseline must stand beside the others in every glance chart"


def test_logging_again_changes_nothing(store: MlflowClient, small: CampaignRecord) -> None:
    first = tracking.log_campaign(small)
    history = store.get_metric_history(first["int8"], "memory.weights_bytes")
    assert tracking.log_campaign(small) == first
    assert store.get_metric_history(first["int8"], "memory.weights_bytes") == history
    assert len(store.search_model_versions(f"name = '{tracking.model_name(small)}'")) == 3


def test_new_evidence_updates_the_same_run(store: MlflowClient, small: CampaignRecord) -> None:
    first = tracking.log_campaign(small)
    int4 = named(small, "int4")
    comparison = {**int4.comparison, "verdict": "inconclusive", "tasks": int4.comparison["tasks"][:2]}
    changed = replace(small, candidates=(named(small, "int8"), replace(int4, comparison=comparison)))
    assert tracking.log_campaign(changed) == first
    run = store.get_run(first["int4"])
    assert run.data.tags["verdict"] == "inconclusive"
    assert run.info.run_name == "int4 (inconclusive)"
    table = store.load_table(run.info.experiment_id, "tables/tasks.json", [run.info.run_id])
    assert len(table) == 2, "a table logged again replaces the old one"


def test_a_run_that_was_cut_short_is_logged_again(
    store: MlflowClient, small: CampaignRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(tracking, "_log_files", full_disk)
        with pytest.raises(RegistryError, match="No space left"):
            tracking.log_campaign(small)
    runs = tracking.log_campaign(small)
    assert len(store.search_runs([experiment(store, small)])) == 3
    assert store.list_artifacts(runs["int8"], "evidence")


def test_every_variant_is_a_version_that_points_at_its_checkpoint(store: MlflowClient, small: CampaignRecord) -> None:
    runs = tracking.log_campaign(small)
    model = tracking.model_name(small)
    for variant in small.variants:
        version = find_version(store, variant.key)
        assert version.name == model
        assert version.source == variant.checkpoint.as_uri()
        assert version.run_id == runs[variant.name]
    assert store.get_model_version_by_alias(model, "champion").run_id == runs["baseline"]
    (logged,) = store.search_logged_models([experiment(store, small)], f"source_run_id = '{runs['int8']}'")
    assert {metric.key for metric in logged.metrics} >= {"1_size_x", "quality.grammar.acc"}


def test_the_saved_view_shows_the_glance_columns(store: MlflowClient, small: CampaignRecord) -> None:
    tracking.log_campaign(small)
    experiment_id = experiment(store, small)
    tags = store.get_experiment(experiment_id).tags
    assert "metrics.`2_speed_x`" in json.loads(tags["mlflow.sharedViewState.quantgate"])["selectedColumns"]
    assert "| int8 | **pass** |" in tags["mlflow.note.content"]
    assert (
        tracking.ui_url(5000) == f"http://127.0.0.1:5000/#/experiments/{experiment_id}/runs?viewStateShareKey=quantgate"
    )


def test_the_mirror_follows_a_release_to_promotion_and_back(store: MlflowClient, small: CampaignRecord) -> None:
    tracking.log_campaign(small)
    model = tracking.model_name(small)
    submitted = release.submit(named(small, "int8").comparison_file, actor="anna")
    assert submitted.mirror.startswith("MLflow shows it")
    version = find_version(store, submitted.variant_key).version

    def aliases() -> dict[str, str]:
        return {name: str(number) for name, number in store.get_registered_model(model).aliases.items()}

    baseline = aliases()["champion"]
    assert aliases() == {"champion": baseline, "candidate": str(version)}
    release.approve(submitted.id, actor="anna")
    assert store.get_model_version(model, version).tags["release.state"] == "approved"
    for action in ("shadow", "canary", "promote"):
        release.act(submitted.id, action, "anna", "step")
    assert aliases() == {"champion": str(version), "previous": baseline}
    release.act(submitted.id, "rollback", "anna", "errors")
    assert aliases() == {"champion": baseline}
    assert release.verify().mirror_problems == ()


def test_verify_finds_and_mends_a_mirror_that_somebody_moved(store: MlflowClient, small: CampaignRecord) -> None:
    tracking.log_campaign(small)
    model = tracking.model_name(small)
    submitted = release.submit(named(small, "int8").comparison_file, actor="anna")
    version = find_version(store, submitted.variant_key).version
    store.set_model_version_tag(model, version, "release.state", "promoted")
    (problem,) = release.verify().mirror_problems
    assert "MLflow showed release.state promoted, the ledger says evaluated" in problem
    store.set_registered_model_alias(model, "champion", version)
    (problem,) = release.verify().mirror_problems
    assert "alias champion" in problem
    assert release.verify().mirror_problems == ()


def test_a_release_goes_on_while_mlflow_is_down_and_says_so(
    small: CampaignRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    submitted = release.submit(named(small, "int8").comparison_file, actor="anna")
    assert submitted.state == "evaluated"
    assert submitted.mirror == f"pending: {release.verify().mirror_problems[0].removeprefix('pending: ')}"
    assert "does not answer" in submitted.mirror


def test_a_release_of_a_variant_that_was_not_logged_is_pending(store: MlflowClient) -> None:
    picture = Picture("r", "0" * 64, "1" * 64, "evaluated", "h", (("0" * 64, "evaluated"),))
    assert show(picture).startswith("pending: the variant is not in MLflow")


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Accepts connections and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(5)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_store_whose_making_was_interrupted_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{path}")

    def interrupted(self: MlflowClient, **_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full_disk:
        full_disk.setattr(MlflowClient, "search_experiments", interrupted)
        with pytest.raises(RegistryError, match="No space left"):
            check_store()
    assert list(tmp_path.iterdir()) == []
    check_store()
    assert list(tmp_path.iterdir()) == [path]


def test_a_server_that_does_not_answer_is_one_line_within_seconds(
    silent_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for uri in (silent_server, "http://127.0.0.1:9"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        started = time.monotonic()
        with pytest.raises(RegistryError, match=f"MLflow server at {uri} does not answer") as caught:
            check_store()
        assert time.monotonic() - started < 10
        assert "\n" not in str(caught.value)


def test_the_ui_opens_on_the_store_with_few_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command, environment = ui_command(5001)
    assert command[1:4] == ["-m", "mlflow", "ui"]
    assert f"sqlite:///{tmp_path / 'mlflow.db'}" in command
    assert command[command.index("--workers") + 1] == "1"
    assert environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example")
    with pytest.raises(RegistryError, match=r"its UI is at http://mlflow\.example"):
        ui_command(5001)


def test_the_headline_says_smaller_faster_worse(campaign: CampaignRecord) -> None:
    numbers = headline(named(campaign, "int4"))
    assert numbers.size_ratio < 0.4
    assert numbers.decode_ratio > 1.4
    assert numbers.perplexity_ratio > 1.2
    assert numbers.worst_task_delta <= numbers.accuracy_delta < 0
    assert glance(campaign.baseline, is_baseline=True)["4_ppl_x"] == 1.0


def test_an_unmeasured_variant_has_no_glance_numbers(tmp_path: Path) -> None:
    assert glance(VariantRecord("bare", tmp_path, tmp_path), is_baseline=False) == {}
