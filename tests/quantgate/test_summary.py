"""The last lines of a campaign say what is doubtful, and commands that work for each verdict."""

import pytest

from quantgate.pipeline import CampaignOutcome
from quantgate.summary import summary_lines
from registry.compare import compare
from registry.policy import load_policy
from registry.variant import CampaignRecord
from tests.registry.campaign_folder import checkpoints, write_campaign


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = write_campaign(tmp_path_factory.mktemp("campaign"), per_task=200)
    variants = folder / "variants"
    for name in checkpoints(folder):
        if name != "baseline":
            compare(variants / "baseline", variants / name, load_policy("default"), variants / name)
    record = CampaignRecord.read(folder, checkpoints=checkpoints(folder), model="SmolLM2-135M-Instruct")
    assert {variant.name: variant.verdict for variant in record.candidates}["int4"] == "fail"
    return summary_lines(CampaignOutcome(record, folder / "report.html", "sqlite:///mlflow.db", {}))


def test_a_doubt_about_a_speed_is_said(lines):
    assert "doubt about the speed of int8: quiet: warn: 12 % of a core was busy with others" in lines


def test_what_did_not_pass_is_approved_with_a_reason(lines):
    assert 'int4 --override "REASON"' in lines[-1]
    assert '--reason "REASON"' in lines[-1]
