"""How MLflow's own pages show a campaign: run names and colours, descriptions, and a saved view of the runs table.

MLflow's runs table starts without metric columns. A saved view (an experiment tag that the UI reads when the address
names it) puts the verdict and the glance metrics there, so that one look says which run is smaller, faster, worse.
"""

from __future__ import annotations

import json

from registry.headline import GLANCE, markdown_table
from registry.variant import CampaignRecord, VariantRecord

VIEW = "quantgate"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"
BASELINE_COLOUR = "#6b7280"
COLOURS = ("#1d4ed8", "#c2410c", "#15803d", "#7e22ce", "#0e7490", "#be185d", "#a16207", "#4338ca")


def run_name(variant: VariantRecord, is_baseline: bool) -> str:
    """The variant with its verdict: the name stands in every table, chart and legend."""
    if is_baseline:
        return variant.name if variant.name == "baseline" else f"{variant.name} (baseline)"
    return f"{variant.name} ({variant.verdict or 'not compared'})"


def run_colour(variant: VariantRecord, campaign: CampaignRecord) -> str:
    """A colour per variant, grey for the baseline; MLflow's own differ by chance."""
    names = [candidate.name for candidate in campaign.candidates]
    return COLOURS[names.index(variant.name) % len(COLOURS)] if variant.name in names else BASELINE_COLOUR


def run_note(variant: VariantRecord, campaign: CampaignRecord) -> str:
    """The run's description: verdict, reasons, and its row beside the baseline's."""
    if variant.name == campaign.baseline.name:
        return f"The baseline that every other run is compared with.\n\n{markdown_table(campaign.variants)}"
    reasons = "\n".join(f"- {reason}" for reason in (variant.comparison or {}).get("reasons") or [])
    table = markdown_table([campaign.baseline, variant])
    return f"Verdict: **{variant.verdict or 'not compared'}**\n\n{reasons}\n\n{table}"


def experiment_tags(campaign: CampaignRecord) -> dict[str, str]:
    """Description, saved view, and the kind of experiment that shows runs and models rather than traces."""
    meaning = "\n".join(f"- `{name}`: {words}" for name, words in GLANCE.items())
    note = (
        f"May a quantized {campaign.model} replace the original? Campaign {campaign.name}. "
        "In brackets: against the baseline, measured in pairs.\n\n"
        f"{markdown_table(campaign.variants)}\n\n{meaning}"
    )
    columns = [
        "tags.`verdict`",
        *(f"metrics.`{name}`" for name in GLANCE),
        "params.`recipe.bits`",
        "tags.`release.state`",
    ]
    state = {"selectedColumns": columns, "orderByKey": "attributes.start_time", "orderByAsc": True}
    return {
        "mlflow.note.content": note,
        "mlflow.experimentKind": "custom_model_development",
        VIEW_TAG: json.dumps(state),
    }
