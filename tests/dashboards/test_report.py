"""report.html: what it must say, in which order, and that nothing from a model can become part of the page."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dashboards.report import FLIPS_SHOWN, render_report, write_report
from registry.variant import CampaignRecord, VariantRecord


class Page(HTMLParser):
    """The page's tags, attributes and text."""

    VOID = frozenset({"meta", "br", "line", "circle", "rect", "img", "link", "input", "hr"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def html(campaign: CampaignRecord) -> str:
    return render_report(campaign)


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_the_page_is_well_formed(page: Page) -> None:
    assert page.open == []


def test_the_verdict_comes_first(html: str) -> None:
    places = [
        html.index(f'id="{section}"')
        for section in ("verdict", "quality", "speed", "memory", "flips", "evidence", "again")
    ]
    assert places == sorted(places)


def test_every_variant_stands_there_with_its_verdict_and_reasons(page: Page, campaign: CampaignRecord) -> None:
    for variant in campaign.candidates:
        assert f"{variant.name} {variant.verdict}" in page.text
        for reason in variant.comparison["reasons"]:
            assert reason in page.text


def test_paired_numbers_intervals_and_power_are_there(page: Page, campaign: CampaignRecord) -> None:
    int4 = next(variant for variant in campaign.candidates if variant.name == "int4")
    for task in int4.comparison["tasks"]:
        assert f"{100 * task['low']:+.1f} to {100 * task['high']:+.1f}" in page.text
        assert f"{task['lost']} / {task['gained']}" in page.text
    for word in ("detectable", "McNemar", "noise floor"):
        assert word in page.text


def test_protocol_identity_integrity_validity_and_recipe_are_there(page: Page, campaign: CampaignRecord) -> None:
    assert campaign.baseline.identity["weights_digest"] in page.text
    for words in (
        "lm_eval 0.4.13",
        "position_ids pass",
        "12 % of a core was busy",
        "recipe.method gptq",
        "read_bytes_per_second",
    ):
        assert words in page.text
    assert "quantgate run CAMPAIGN.yaml" in page.text


def test_a_doubt_about_a_speed_stands_beside_the_verdict(page: Page) -> None:
    verdict = page.text.partition("Every candidate answered")[0]
    assert "Doubt about its speed: quiet: warn: 12 % of a core was busy" in verdict


def test_the_policy_s_limits_are_there(page: Page) -> None:
    assert "quality.*.acc margin 0.03 critical" in page.text


@pytest.mark.parametrize(
    ("numerics", "said"),
    [
        ({"kv_dtype": "int8"}, "KV int8"),
        ({"compute": "a8"}, "a8"),
        ({"compute": "a8", "kv_dtype": "int8"}, "a8, KV int8"),
    ],
)
def test_numerics_that_are_not_the_model_s_own_stand_beside_the_name(
    campaign: CampaignRecord, numerics: dict[str, str], said: str
) -> None:
    first, *others = campaign.candidates
    quality = dict(first.quality or {}) | {"identity": {**first.identity, **numerics}}
    changed = replace(campaign, candidates=(replace(first, quality=quality), *others))
    assert f"{first.name} {said}" in Page(render_report(changed)).text
    assert f"{first.name} {said}" not in Page(render_report(campaign)).text


def test_the_page_needs_nothing_beside_it(page: Page) -> None:
    assert "script" not in page.tags
    assert not [value for name, value in page.attributes if name == "src"]
    assert all((value or "").startswith("#") for name, value in page.attributes if name == "href")
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_it_follows_light_and_dark_and_prints(html: str) -> None:
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html


def test_a_page_does_not_depend_on_when_it_is_written(campaign: CampaignRecord, html: str) -> None:
    assert render_report(campaign) == html


ATTACK = (
    "<script>alert('x')</script><img src=x onerror=alert(1)>"
    '"\' onmouseover="alert(2)" {{ 7 * 7 }} </svg></title></style>'
)


def attacked(value: Any) -> Any:
    """The document with every string in it turned into markup."""
    if isinstance(value, dict):
        return {
            name: attacked(each) if name not in ("kind", "verdict", "direction", "confidence") else each
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [attacked(each) for each in value]
    return ATTACK if isinstance(value, str) else value


def test_text_from_models_data_and_files_stays_text(campaign: CampaignRecord, page: Page) -> None:
    def broken(variant: VariantRecord) -> VariantRecord:
        documents = {name: attacked(getattr(variant, name)) for name in ("manifest", "quality", "comparison")}
        return replace(variant, name=f"{variant.name}{ATTACK}", **documents)

    hostile = replace(
        campaign,
        name=ATTACK,
        model=ATTACK,
        baseline=broken(campaign.baseline),
        candidates=tuple(broken(variant) for variant in campaign.candidates),
    )
    result = Page(render_report(hostile))
    assert set(result.tags) <= set(page.tags), "no tag that the page itself does not use"
    assert not [name for name, _ in result.attributes if name.startswith("on") or name == "src"]
    assert "{{ 7 * 7 }}" in result.text, "templates in the data are not run"
    assert result.open == []


def test_flips_are_shown_with_their_texts_losses_first_and_counted(
    page: Page, html: str, campaign: CampaignRecord
) -> None:
    int4 = next(variant for variant in campaign.candidates if variant.name == "int4")
    grammar = [flip for flip in int4.comparison["flips"] if flip["task"] == "grammar"]
    assert len(grammar) > FLIPS_SHOWN
    assert f"grammar acc: {len(grammar)} changed" in page.text
    assert grammar[0]["prompt"] in page.text


def test_a_campaign_of_which_nothing_was_measured_says_so(without_results: CampaignRecord) -> None:
    text = Page(render_report(without_results)).text
    for words in ("not measured", "No comparison was made", "No quality was compared", "No speed was measured"):
        assert words in text


def test_the_report_is_written_whole(campaign: CampaignRecord, tmp_path: Path) -> None:
    path = write_report(campaign, tmp_path / "report.html")
    assert path.read_text().rstrip().endswith("</html>")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_no_number_is_shown_as_nan_or_none(page: Page) -> None:
    assert not re.search(r"\b(nan|None|inf)\b", page.text.replace("limit None", ""))
