"""The campaign file: checked whole before anything runs."""

from pathlib import Path

import pytest

from quantgate.campaign import load_campaign
from quantgate.errors import FrontDoorError
from quantgate.numerics import Numerics

GOOD = """\
name: trial
baseline: smollm2-135m
calibration: {samples: 8, sequence_length: 128}
variants:
  int8: {method: int8}
  gptq: {method: gptq, sequence_length: 64}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "campaign.yaml"
    path.write_text(text)
    return path


def test_shared_calibration_reaches_every_recipe_that_gives_none_of_its_own(tmp_path: Path) -> None:
    campaign = load_campaign(written(tmp_path, GOOD))
    assert (campaign.recipe("int8").samples, campaign.recipe("int8").sequence_length) == (8, 128)
    assert (campaign.recipe("gptq").samples, campaign.recipe("gptq").sequence_length) == (8, 64)
    assert campaign.folder() == Path("runs/trial")


def test_a_variant_may_be_the_baseline_with_other_numerics(tmp_path: Path) -> None:
    text = GOOD + "  kv: {kv_dtype: int8}\n  a8: {compute: a8}\n  both: {method: int8, kv_dtype: int8, compute: a8}\n"
    campaign = load_campaign(written(tmp_path, text))
    assert campaign.recipe("kv") is campaign.recipe("a8") is None
    assert campaign.recipe("both") == campaign.recipe("int8")
    assert campaign.numerics("baseline") == campaign.numerics("int8") == Numerics()
    assert campaign.numerics("kv") == Numerics(kv_dtype="int8")
    assert campaign.numerics("a8") == Numerics(compute="a8")
    assert campaign.numerics("both") == Numerics("int8", "a8")


def test_every_numerics_has_options_a_folder_and_a_name_of_its_own() -> None:
    each = [Numerics(kv, compute) for kv in ("auto", "int8", "float16") for compute in ("auto", "a16", "a8")]
    assert len({numerics.folder_suffix() for numerics in each}) == len(each)
    assert len({numerics.said() for numerics in each}) == len(each)
    assert len({str(numerics.engine_options()) for numerics in each}) == len(each)
    assert Numerics().folder_suffix() == Numerics().said() == ""
    assert Numerics("int8", "a8").said() == " with a8 and int8 KV"


@pytest.mark.parametrize(
    ("wrong", "line", "said"),
    [
        (GOOD + "polcy: strict\n", 7, "did you mean 'policy'?"),
        (GOOD.replace("{method: int8}", "{method: int8, bitz: 4}"), 5, "bitz"),
        (GOOD.replace("{method: int8}", "{method: int9}"), 5, "int9"),
        (GOOD.replace("{method: int8}", "{bits: 8}"), 5, "method: missing"),
        (GOOD.replace("{method: int8}", "{method: int8, kv_dtype: int3}"), 5, "kv_dtype 'int3' is unknown: use auto"),
        (
            GOOD.replace("{method: int8}", "{method: int8, compute: a4}"),
            5,
            "compute 'a4' is unknown: use auto, a16, a8",
        ),
        (
            GOOD.replace("{method: int8}", "{method: int8, activations: int8, compute: a16}"),
            5,
            "activations: int8 is compute a8",
        ),
        (GOOD.replace("{method: int8}", "{method: bnb-nf4, compute: a8}"), 5, "bnb-nf4 rounds activations as its"),
        (GOOD.replace("{method: int8}", "{compute: a16}"), 5, "compute a16 of its own weights is the baseline"),
        (GOOD.replace("{method: int8}", "{kv_dtype: auto}"), 5, "method: missing"),
        (GOOD.replace("{method: int8}", "{compute: auto}"), 5, "method: missing"),
        (GOOD.replace("{method: int8}", "{kv_dtype: int8, bits: 8}"), 5, "method: missing"),
        (GOOD.replace("samples: 8", "sample: 8"), 3, "did you mean 'samples'?"),
        (GOOD.replace("name: trial", "name: ../trial"), 1, "should match pattern"),
        (GOOD.replace("  int8:", "  baseline:"), 5, "and not 'baseline'"),
        (GOOD.replace("  int8:", "  ../x:"), 5, "is letters"),
        (GOOD.replace("baseline: smollm2-135m", 'baseline: ""'), 2, "at least 1 character"),
        (GOOD + "limit: true\n", 7, "limit"),
        (GOOD + "data_dir: nowhere\n", 7, "data_dir: no folder"),
        (GOOD.replace("samples: 8", "file: nowhere.jsonl"), 3, "calibration.file: no file"),
        (GOOD.replace("samples: 8", "file: ."), 3, "calibration.file: no file"),
    ],
)
def test_a_wrong_key_is_named_with_its_line(tmp_path: Path, wrong: str, line: int, said: str) -> None:
    path = written(tmp_path, wrong)
    with pytest.raises(FrontDoorError) as caught:
        load_campaign(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_paths_are_relative_to_the_campaign_file_and_names_stay_names(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine\n")
    path = written(tmp_path, GOOD + "policy: mine.yaml\nsuite: core\n")
    campaign = load_campaign(path)
    assert campaign.policy == str(tmp_path / "mine.yaml")
    assert campaign.suite == "core"
