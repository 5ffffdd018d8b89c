"""A campaign from its file to its verdicts, stage by stage.

    runs/NAME/checkpoints/<variant>     what was quantized
    runs/NAME/variants/<variant>/       quality/, speed/, comparison.json
    runs/NAME/report.html

The one idea: every stage's output carries the digest of its inputs, so a stage looks at what stands in its place and
does nothing when it is the same work. That makes a second run quick and lets a killed one go on, with no state besides
the results. What a variant left behind that the file no longer names stays on disk, unread: nothing of a user's is
deleted. The baseline is measured against itself too: that is the noise floor of the speed ratios.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dashboards.report import write_report
from eval.quality.run import evaluate
from eval.speed.run import measure
from eval.speed.workload import load_workload
from quantgate.campaign import BASELINE, Campaign
from quantgate.errors import FrontDoorError
from quantgate.screen import Screen
from quantgate.source import resolve_checkpoint
from quantize import quantize_checkpoint
from quantize.atomic import take_lock
from quantize.load import check_compute
from registry.compare import compare_variants
from registry.policy import load_policy
from registry.store import check_store, store_uri
from registry.tracking import log_campaign
from registry.variant import CampaignRecord
from tasks.suites import load_suite


@dataclass(frozen=True)
class CampaignOutcome:
    """What a campaign left behind. `runs` maps a variant to its MLflow run id."""

    record: CampaignRecord
    report: Path
    tracking_uri: str
    runs: dict[str, str]


def run_campaign(campaign: Campaign, screen: Screen) -> CampaignOutcome:
    """Run every stage whose inputs have changed since the last run.

    Raises:
        FrontDoorError: another process runs the same campaign.
        QuantizeError, EvalError, RegistryError: a stage's own explained error.
    """
    folder = campaign.folder()
    policy = load_policy(campaign.policy)
    suite = load_suite(campaign.suite)
    workload = load_workload(campaign.workload)
    recipes = {name: campaign.recipe(name) for name in campaign.variants}
    stages = 1 + sum(recipe is not None for recipe in recipes.values()) + 2 * (1 + len(recipes)) + 2
    with only_run_in(folder), screen.staged_progress(stages) as begin:
        check_store()
        progress = begin(f"baseline {campaign.baseline}")
        checkpoints = {BASELINE: resolve_checkpoint(campaign.baseline, progress)}
        for name, recipe in recipes.items():
            if recipe is None:
                checkpoints[name] = checkpoints[BASELINE]
                check_compute(checkpoints[name], campaign.numerics(name).compute)
                continue
            progress = begin(f"quantize {name}")
            checkpoints[name] = folder / "checkpoints" / name
            quantize_checkpoint(
                checkpoints[BASELINE],
                recipe,
                checkpoints[name],
                calibration=campaign.calibration.file,
                replace=True,
                progress=progress,
            )
        for name, checkpoint in checkpoints.items():
            evaluate(
                checkpoint,
                suite=suite,
                tasks=[],
                data_dir=campaign.data_dir,
                limit=campaign.limit,
                out=folder / "variants" / name / "quality",
                engine_options=campaign.numerics(name).engine_options(),
                progress=begin(f"evaluate {name}"),
            )
        for name, checkpoint in checkpoints.items():
            measure(
                checkpoint,
                against=checkpoints[BASELINE],
                workload=workload,
                out=folder / "variants" / name / "speed",
                repeats=campaign.repeats,
                confidence=policy.confidence,
                candidate_options=campaign.numerics(name).engine_options(),
                progress=begin(f"time {name} against the baseline"),
            )
        begin("compare and report")
        measured = CampaignRecord.read(folder, name=campaign.name, baseline=BASELINE, checkpoints=checkpoints)
        for candidate in measured.candidates:
            compare_variants(measured.baseline, candidate, policy, folder / "variants" / candidate.name)
        record = CampaignRecord.read(folder, name=campaign.name, baseline=BASELINE, checkpoints=checkpoints)
        report = write_report(record, folder / "report.html")
        begin("log to MLflow")
        runs = log_campaign(record, report)
    return CampaignOutcome(record, report, store_uri(), runs)


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Holds the campaign's folder for this process; the kernel lets go of it when the process ends, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not take_lock(descriptor):
            raise FrontDoorError(f"{folder}: another quantgate runs this campaign now; wait for it to end")
        yield
    finally:
        os.close(descriptor)
