"""A campaign with comparisons, for the pages."""

from pathlib import Path

import pytest

from registry.compare import compare
from registry.policy import load_policy
from registry.variant import CampaignRecord
from tests.registry.campaign_folder import checkpoints, write_campaign


@pytest.fixture(scope="session")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> CampaignRecord:
    folder = write_campaign(tmp_path_factory.mktemp("campaign"), per_task=200)
    policy = load_policy("default")
    for name in checkpoints(folder):
        if name != "baseline":
            compare(folder / "variants" / "baseline", folder / "variants" / name, policy, folder / "variants" / name)
    return CampaignRecord.read(folder, checkpoints=checkpoints(folder), model="SmolLM2-135M-Instruct")


@pytest.fixture
def without_results(tmp_path: Path) -> CampaignRecord:
    """Two variants of which nothing was measured."""
    for name in ("baseline", "int8"):
        (tmp_path / "empty" / "variants" / name).mkdir(parents=True)
    return CampaignRecord.read(tmp_path / "empty")
