"""Fixtures of the registry's tests: a campaign folder, and an MLflow store and database of their own."""

import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from registry.compare import compare
from registry.policy import load_policy
from registry.variant import CampaignRecord
from tests.registry.campaign_folder import checkpoints, write_campaign


@pytest.fixture
def campaign(tmp_path: Path) -> CampaignRecord:
    """A whole campaign with its comparisons under the default policy."""
    folder = write_campaign(tmp_path, per_task=200)
    policy = load_policy("default")
    for name in checkpoints(folder):
        if name != "baseline":
            compare(folder / "variants" / "baseline", folder / "variants" / name, policy, folder / "variants" / name)
    return CampaignRecord.read(folder, checkpoints=checkpoints(folder), model="SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its tables and nothing in them: making one takes seconds, copying one does not."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(tmp_path: Path, empty_store: Path, own_stores: None) -> MlflowClient:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")


@pytest.fixture(autouse=True)
def own_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("QUANTGATE_DATABASE_URL", f"sqlite:///{tmp_path / 'quantgate.db'}")
