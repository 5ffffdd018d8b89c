"""The command line: one line for a mistake, one document with --json, and nothing half-written."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file


@pytest.fixture
def copy_of(tiny_checkpoint: Path, tmp_path: Path):
    """A copy of the tiny checkpoint that a test may spoil."""
    import shutil

    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))


def is_one_line(outcome, *said: str) -> None:
    assert outcome.code == 1, outcome
    assert outcome.out == ""
    lines = [line for line in outcome.err.splitlines() if line.startswith("quantgate: ")]
    assert len(lines) == 1, outcome.err
    assert "Traceback" not in outcome.err
    for part in said:
        assert part in lines[0]


def test_quantize_writes_a_checkpoint_that_inspect_describes(quantgate, tiny_checkpoint: Path) -> None:
    made = quantgate("quantize", tiny_checkpoint, "--method", "int4", "--group-size", "32", "--out", "q", "--json")
    assert made.code == 0, made.err
    document = json.loads(made.out)
    assert document["coverage"] == {"expected": 14, "packed": 14}
    shown = quantgate("inspect", "q", "--json")
    assert json.loads(shown.out)["modules"] == document["modules"]
    assert "14 modules at 4 bits, groups of 32, symmetric" in quantgate("inspect", "q").out


def test_names_in_square_brackets_are_shown_as_they_are(quantgate, tiny_checkpoint: Path, tmp_path: Path) -> None:
    made = quantgate("quantize", tiny_checkpoint, "--method", "int8", "--out", "[/q]")
    assert made.code == 0, made.err
    manifest = tmp_path / "[/q]" / "quantgate.json"
    manifest.write_text(manifest.read_text().replace("model.layers.0.mlp.up_proj", "[/bold] [red]up"))
    assert "[/bold] [red]up" in quantgate("inspect", "[/q]").out


def test_the_same_quantization_again_is_found_done_and_another_one_does_not_replace_it(
    quantgate, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    command = ("quantize", tiny_checkpoint, "--out", "q", "--method")
    assert quantgate(*command, "int8").code == 0
    written = (tmp_path / "q/quantgate.json").stat().st_mtime_ns
    assert quantgate(*command, "int8").code == 0
    assert (tmp_path / "q/quantgate.json").stat().st_mtime_ns == written
    is_one_line(quantgate(*command, "int4", "--group-size", "32"), "exists already")
    assert (tmp_path / "q/quantgate.json").stat().st_mtime_ns == written


def test_convert_writes_another_format_that_inspect_describes(quantgate, tiny_checkpoint: Path, tmp_path: Path) -> None:
    assert quantgate("quantize", tiny_checkpoint, "--method", "int4", "--group-size", "32", "--out", "q").code == 0
    made = quantgate("convert", "q", "--format", "awq", "a", "--json")
    assert made.code == 0, made.err
    assert json.loads(made.out) == {"path": "a", "format": "awq"}
    shown = json.loads(quantgate("inspect", "a", "--json").out)
    assert shown["recipe"]["format"] == "awq"
    assert "converted without loss from compressed-tensors" in shown["notes"][-1]
    is_one_line(quantgate("convert", "q", "--format", "awq", "a"), "exists already")
    is_one_line(quantgate("convert", "q", "--format", "exl2", "b"), "'exl2' cannot be written", "gguf-q4_0")
    is_one_line(quantgate("convert", tiny_checkpoint, "--format", "gptq", "b"), "is not quantized", "quantize it first")
    assert not (tmp_path / "b").exists()


def test_a_path_that_is_not_there(quantgate) -> None:
    is_one_line(quantgate("eval", "nowhere"), "no such checkpoint: nowhere", "smollm2-135m")
    Path("runs").mkdir()
    is_one_line(quantgate("eval", "runs/q"), "no such checkpoint: runs/q: runs has no q here")
    is_one_line(quantgate("eval", "ruin/q"), "no such checkpoint: ruin/q: there is no folder ruin here")


def test_a_folder_that_is_no_checkpoint(quantgate, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    is_one_line(quantgate("quantize", "empty", "--method", "int8", "--out", "q"), "empty")
    is_one_line(quantgate("eval", "empty"), "empty")
    is_one_line(quantgate("speed", "empty"), "empty")
    is_one_line(quantgate("inspect", "empty"), "empty")
    assert not (tmp_path / "q").exists()


def test_truncated_safetensors(quantgate, copy_of: Path, tmp_path: Path) -> None:
    weights = copy_of / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    is_one_line(quantgate("quantize", copy_of, "--method", "int8", "--out", "q"), "model.safetensors")
    is_one_line(quantgate("eval", copy_of, "--suite", "smoke"), "model.safetensors")
    is_one_line(quantgate("speed", copy_of), "model.safetensors")
    assert not (tmp_path / "q").exists()


def test_nan_weights_name_the_tensor(quantgate, copy_of: Path, tmp_path: Path) -> None:
    tensors = load_file(copy_of / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = torch.nan
    save_file(tensors, copy_of / "model.safetensors", {"format": "pt"})
    is_one_line(quantgate("quantize", copy_of, "--method", "int8", "--out", "q"), name)
    assert not (tmp_path / "q").exists()


def test_a_group_size_that_does_not_divide(quantgate, tiny_checkpoint: Path, tmp_path: Path) -> None:
    outcome = quantgate("quantize", tiny_checkpoint, "--method", "int4", "--group-size", "48", "--out", "q")
    is_one_line(outcome, "48", "64")
    assert list(tmp_path.glob("q*")) == []


def test_an_unknown_task_suite_workload_or_policy(quantgate, tiny_checkpoint: Path) -> None:
    is_one_line(quantgate("eval", tiny_checkpoint, "--tasks", "quantgate_gramar"), "quantgate_grammar")
    is_one_line(quantgate("eval", tiny_checkpoint, "--suite", "coer"), "core")
    is_one_line(quantgate("speed", tiny_checkpoint, "--workload", "chta"), "chat")
    is_one_line(quantgate("compare", tiny_checkpoint, tiny_checkpoint, "--policy", "defualt"), "defualt")


def test_an_empty_data_file(quantgate, tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "data/lambada").mkdir(parents=True)
    (tmp_path / "data/lambada/test.jsonl").write_text("")
    (tmp_path / "data/wikitext2").mkdir()
    (tmp_path / "data/wikitext2/test.txt").write_text("")
    is_one_line(quantgate("eval", tiny_checkpoint, "--tasks", "lambada_openai", "--data-dir", "data"), "test.jsonl")
    is_one_line(quantgate("eval", tiny_checkpoint, "--tasks", "wikitext2", "--data-dir", "data"), "test.txt")


def test_an_empty_calibration_file(quantgate, tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("")
    command = ("quantize", tiny_checkpoint, "--method", "gptq", "--group-size", "32", "--out", "q")
    is_one_line(quantgate(*command, "--calibration", "text.jsonl"), "text.jsonl")
    assert list(tmp_path.glob("q*")) == []


def test_a_tracking_server_that_does_not_answer(
    quantgate, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    (tmp_path / "c.yaml").write_text(f"name: c\nbaseline: {tiny_checkpoint}\nvariants: {{int8: {{method: int8}}}}\n")
    is_one_line(quantgate("run", "c.yaml"), "127.0.0.1:9")
    assert list(tmp_path.rglob("quantgate.json")) == []


def test_a_campaign_file_with_a_wrong_key(quantgate, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("name: c\nbaseline: x\nvariantz: {}\n")
    is_one_line(quantgate("run", "c.yaml"), "c.yaml:3", "did you mean 'variants'?")
    is_one_line(quantgate("run", "none.yaml"), "none.yaml")


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("- int8\n", "found list"),
        ("method: int8\nmethod: int4\n", "r.yaml:2: the key 'method' stands twice"),
        ("method: &m [*m]\n", "r.yaml:1: nested too deeply"),
        ("method: 2020-99-99\n", "not valid YAML"),
    ],
)
def test_a_recipe_file_that_is_none(quantgate, tiny_checkpoint: Path, tmp_path: Path, recipe: str, said: str) -> None:
    (tmp_path / "r.yaml").write_text(recipe)
    is_one_line(quantgate("quantize", tiny_checkpoint, "--recipe", "r.yaml", "--out", "q"), "r.yaml", said)
    assert list(tmp_path.glob("q*")) == []


@pytest.mark.parametrize("value", ["x" * 5000, "taken/below", "loop"])
def test_a_campaign_whose_paths_can_be_none(quantgate, tiny_checkpoint: Path, tmp_path: Path, value: str) -> None:
    (tmp_path / "taken").write_text("a file")
    (tmp_path / "loop").symlink_to("loop")
    good = {"name": "c", "baseline": str(tiny_checkpoint), "variants": {"int8": {"method": "int8"}}}
    for key in ("suite", "workload", "policy", "output", "data_dir"):
        (tmp_path / "c.yaml").write_text(json.dumps(good | {key: value}))
        is_one_line(quantgate("run", "c.yaml"), value[:100])
    is_one_line(quantgate("inspect", value), value[:100])
    assert not (tmp_path / "runs").exists()


def test_an_output_folder_that_is_a_file(quantgate, tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    for out in ("taken", "taken/below", "x" * 300):
        is_one_line(quantgate("quantize", tiny_checkpoint, "--method", "int8", "--out", out), out[:100])
        is_one_line(quantgate("eval", tiny_checkpoint, "--suite", "smoke", "--out", out), out[:100])
        is_one_line(quantgate("speed", tiny_checkpoint, "--workload", "demo-closed", "--out", out), out[:100])
    assert (tmp_path / "taken").read_text() == "a file"


def test_a_full_disk(quantgate, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    from quantize import pipeline

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pipeline, "save_file", refuse)
    is_one_line(quantgate("quantize", tiny_checkpoint, "--method", "int8", "--out", "q"), "disk is full")
    assert not (tmp_path / "q").exists()


def test_an_argument_that_is_no_text(quantgate) -> None:
    is_one_line(quantgate("release", "submit", "v", "--name", "\udcff", "--as", "ada"), "'\\udcff'", "not UTF-8")
    is_one_line(quantgate("eval", "\udcff"), "not UTF-8")


def test_an_interrupted_command_says_how_to_go_on(quantgate, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantgate import doctor

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupt)
    outcome = quantgate("doctor")
    assert (outcome.code, outcome.out) == (130, "")
    assert "run the same command again" in outcome.err


def test_usage_errors_leave_with_2(quantgate) -> None:
    assert quantgate("quantize").code == 2
    assert quantgate("nonsense").code == 2


def test_compare_of_a_checkpoint_with_itself_states_a_verdict_and_its_exit_code(
    quantgate, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    policy = "name: p\nrules:\n  - {metric: quality.*.acc, margin: 0.5}\n"
    (tmp_path / "p.yaml").write_text(policy)
    common = ("compare", tiny_checkpoint, tiny_checkpoint, "--tasks", "quantgate_grammar", "--limit", "40", "--json")
    passed = quantgate(*common, "--policy", "p.yaml")
    assert (passed.code, json.loads(passed.out)["verdict"]) == (0, "pass")
    (tmp_path / "p.yaml").write_text(policy.replace("0.5", "0.001"))
    unsure = quantgate(*common, "--policy", "p.yaml")
    assert (unsure.code, json.loads(unsure.out)["verdict"]) == (4, "inconclusive")
    (tmp_path / "p.yaml").write_text("name: p\nrules:\n  - {metric: quality.*.acc, min: 1.01}\n")
    failed = quantgate(*common, "--policy", "p.yaml")
    assert (failed.code, json.loads(failed.out)["verdict"]) == (3, "fail")


def test_two_checkpoints_of_the_same_weights_are_not_taken_for_one(
    quantgate, tiny_checkpoint: Path, copy_of: Path, tmp_path: Path
) -> None:
    config = json.loads((copy_of / "config.json").read_text())
    (copy_of / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1.0}))
    (tmp_path / "p.yaml").write_text("rules:\n  - {metric: quality.perplexity.*, max_ratio: 1.5}\n")
    (tmp_path / "s.yaml").write_text("perplexity:\n  - {corpus: held_out_docs, window: 64, windows: 4}\n")
    compared = quantgate("compare", tiny_checkpoint, copy_of, "--suite", "s.yaml", "--policy", "p.yaml", "--json")
    (task,) = json.loads(compared.out)["tasks"]
    assert task["delta"] != 0


def test_a_kv_dtype_is_a_variant_of_its_own(quantgate, tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("rules:\n  - {metric: quality.perplexity.*, max_ratio: 1.5}\n")
    (tmp_path / "s.yaml").write_text("perplexity:\n  - {corpus: held_out_docs, window: 64, windows: 4}\n")
    common = ("--suite", "s.yaml", "--kv-dtype", "int8", "--json")
    compared = json.loads(quantgate("compare", tiny_checkpoint, tiny_checkpoint, *common, "--policy", "p.yaml").out)
    assert [compared[side]["identity"]["kv_dtype"] for side in ("baseline", "candidate")] == ["bfloat16", "int8"]
    assert compared["candidate"]["name"].endswith("with int8 KV")
    assert 0 < abs(compared["tasks"][0]["delta"]) < 0.01
    scored = json.loads(quantgate("eval", tiny_checkpoint, *common).out)
    assert scored["identity"] == compared["candidate"]["identity"]
    for command in (("eval", tiny_checkpoint, "--suite", "s.yaml"), ("speed", tiny_checkpoint)):
        is_one_line(quantgate(*command, "--kv-dtype", "int3"), "kv_dtype 'int3' is unknown: use auto, float32")


def test_a8_is_a_variant_of_its_own_where_weights_are_quantized(
    quantgate, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "p.yaml").write_text("rules:\n  - {metric: quality.perplexity.*, max_ratio: 1.5}\n")
    (tmp_path / "s.yaml").write_text("perplexity:\n  - {corpus: held_out_docs, window: 64, windows: 4}\n")
    for out, *more in (("q8",), ("w8a8", "--activations", "int8")):
        made = quantgate("quantize", tiny_checkpoint, "--method", "int8", *more, "--out", out)
        assert made.code == 0, made.err
    common = ("--suite", "s.yaml", "--compute", "a8", "--json")
    compared = json.loads(quantgate("compare", "q8", "q8", *common, "--policy", "p.yaml").out)
    assert [compared[side]["identity"]["compute"] for side in ("baseline", "candidate")] == ["a16", "a8"]
    assert compared["candidate"]["name"] == "q8 with a8"
    assert 0 < abs(compared["tasks"][0]["delta"]) < 0.01
    scored = json.loads(quantgate("eval", "q8", *common).out)
    assert scored["identity"] == compared["candidate"]["identity"]
    unrounded = json.loads(quantgate("eval", "q8", "--suite", "s.yaml", "--json").out)
    assert unrounded["identity"] == compared["baseline"]["identity"]
    assert Path(unrounded["path"]).parent != Path(scored["path"]).parent
    for command in (("eval", "--suite", "s.yaml"), ("speed",), ("serve",)):
        is_one_line(quantgate(*command, tiny_checkpoint, "--compute", "a8"), "it has none; quantize it first")
        is_one_line(quantgate(*command, "w8a8", "--compute", "a16"), "it was quantized for int8 activations")
        is_one_line(quantgate(*command, "q8", "--compute", "a4"), "compute 'a4' is unknown: use auto, a16, a8")


def test_results_say_their_own_kv_dtype(quantgate, tmp_path: Path) -> None:
    for side in ("a", "b"):
        (tmp_path / side / "quality").mkdir(parents=True)
        (tmp_path / side / "quality/quality.json").write_text("{}")
    is_one_line(quantgate("compare", "a", "b", "--kv-dtype", "int8"), "leave out --kv-dtype")


def test_a_tokenizer_that_does_not_load_is_one_line(quantgate, copy_of: Path) -> None:
    (copy_of / "tokenizer.json").write_text("{")
    is_one_line(quantgate("eval", copy_of, "--suite", "smoke"), "tokenizer does not load")
    is_one_line(quantgate("speed", copy_of, "--workload", "demo-open"), "tokenizer does not load")


def test_releases_are_approved_rejected_and_written_down(quantgate, tmp_path: Path) -> None:
    comparison = {
        "verdict": "fail",
        "reasons": ["too slow"],
        "baseline": {"name": "baseline", "identity": {"weights_digest": "def"}},
        "candidate": {"name": "int8", "identity": {"weights_digest": "abc"}},
    }
    (tmp_path / "v").mkdir()
    (tmp_path / "v/comparison.json").write_text(json.dumps(comparison))
    assert quantgate("release", "submit", "v", "--name", "mine", "--as", "ada").code == 0
    is_one_line(quantgate("release", "approve", "mine", "--as", "ada"), "--override")
    approved = quantgate("release", "approve", "mine", "--as", "ada", "--override", "internal only", "--json")
    assert json.loads(approved.out)["state"] == "approved"
    assert quantgate("release", "reject", "mine", "--as", "eve", "--reason", "no").code == 0
    acts = json.loads(quantgate("release", "history", "mine", "--json").out)["history"]
    assert [act["actor"] for act in acts][-2:] == ["ada", "eve"]
    assert "mine" in quantgate("release", "list").out
    assert quantgate("release", "verify").code == 0
    is_one_line(quantgate("release", "show", "other"), "other")


def test_sensitivity_prints_a_recipe_that_quantize_reads(quantgate, tiny_checkpoint: Path, tmp_path: Path) -> None:
    short = ("--samples", "2", "--sequence-length", "16")
    command = ("sensitivity", tiny_checkpoint, *short, "--method", "int4")
    made = quantgate(*command, "--target-bits", "6", "--plot", "losses.png")
    assert made.code == 0, made.err
    assert made.out.startswith("# predicted: ")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "mixed.yaml").write_text(made.out)
    quantized = quantgate("quantize", tiny_checkpoint, "--recipe", "mixed.yaml", "--out", "q", "--json")
    document = json.loads(quantized.out)
    assert {module["bits"] for module in document["modules"]} == {4, 8}
    assert document["bits_per_weight"] <= 6
    told = json.loads(quantgate(*command, "--target-bits", "6", "--json").out)
    assert told["recipe"]["overrides"] == document["recipe"]["overrides"]
    assert told["predicted"]["bits_per_weight"] == pytest.approx(document["bits_per_weight"])
    assert {module["kind"] for module in told["modules"]} == set(told["kinds"])
    assert "self_attn.q_proj" in quantgate(*command).out


def test_quantize_auto_records_the_mixture_that_it_chose(quantgate, tiny_checkpoint: Path) -> None:
    command = ("quantize", tiny_checkpoint, "--method", "int4", "--auto", "--target-bits", "6", "--out", "q", "--json")
    made = quantgate(*command)
    assert made.code == 0, made.err
    recipe = json.loads(made.out)["recipe"]
    assert recipe["overrides"]
    assert json.loads(quantgate("inspect", "q", "--json").out)["recipe"] == recipe
    assert quantgate(*command).code == 0


def test_quantize_auto_looks_at_the_place_before_it_measures(quantgate, tiny_checkpoint: Path, monkeypatch) -> None:
    monkeypatch.setattr("quantize.sensitivity.measure_sensitivity", lambda *_args, **_kwargs: pytest.fail("measured"))
    Path("taken").write_text("in the way")
    is_one_line(quantgate("quantize", tiny_checkpoint, "--auto", "--out", "taken"), "taken: exists already")
    is_one_line(quantgate("quantize", tiny_checkpoint, "--auto", "--out", "taken/q"), "taken/q: Not a directory")


def test_what_no_mixture_can_follow(quantgate, tiny_checkpoint: Path, tmp_path: Path) -> None:
    auto = ("quantize", tiny_checkpoint, "--out", "q", "--method")
    is_one_line(quantgate(*auto, "int4", "--target-bits", "5"), "add --auto")
    is_one_line(quantgate(*auto, "int8", "--auto"), "method: int8", "gptq")
    is_one_line(quantgate(*auto, "int4", "--auto", "--target-bits", "5", "--target-kl", "1"), "keep one of them")
    is_one_line(quantgate(*auto, "int4", "--auto", "--target-bits", "17"), "target_bits: 17", "16")
    is_one_line(quantgate(*auto, "int4", "--auto", "--target-bits", "2"), "target_bits: 2", "3 bits everywhere")
    assert not (tmp_path / "q").exists()


def test_inspect_draws_the_layers(quantgate, tiny_checkpoint: Path, tmp_path: Path) -> None:
    quantgate("quantize", tiny_checkpoint, "--method", "int4", "--group-size", "32", "--out", "q")
    drawn = quantgate("inspect", "q", "--plot", "q.png")
    assert drawn.code == 0, drawn.err
    assert (tmp_path / "q.png").read_bytes().startswith(b"\x89PNG")
    is_one_line(quantgate("inspect", "q", "--plot", "q.gif"), "q.gif", ".png, .svg, .pdf")
    is_one_line(quantgate("inspect", "q", "--plot", "nowhere/q.png"), "nowhere")
    is_one_line(quantgate("inspect", tiny_checkpoint, "--plot", "t.png"), "quantgate.json")
    assert not (tmp_path / "t.png").exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda manifest: manifest["modules"][0].update(relative_error=float("nan")),
        lambda manifest: manifest["modules"][0].update(relative_error=float("inf")),
        lambda manifest: manifest["modules"][0].update(bits="4"),
        lambda manifest: manifest["modules"][0].pop("name"),
        lambda manifest: manifest.update(modules=[]),
        lambda manifest: manifest.update(modules="none"),
        lambda manifest: manifest.update(recipe={}),
        lambda manifest: manifest.update(coverage={}),
        lambda manifest: manifest.update(calibration={}),
        lambda manifest: manifest.update(calibration=[1]),
        lambda manifest: manifest.update(bits_per_weight=float("nan")),
        lambda manifest: manifest.update(schema=2),
        lambda manifest: manifest.update(notes=None),
    ],
)
def test_inspect_of_a_damaged_manifest(quantgate, tiny_checkpoint: Path, tmp_path: Path, spoil) -> None:
    quantgate("quantize", tiny_checkpoint, "--method", "int4", "--group-size", "32", "--out", "q")
    manifest = json.loads((tmp_path / "q/quantgate.json").read_text())
    spoil(manifest)
    (tmp_path / "q/quantgate.json").write_text(json.dumps(manifest))
    is_one_line(quantgate("inspect", "q", "--plot", "q.png"), "quantgate.json")
    is_one_line(quantgate("inspect", "q", "--json"), "quantgate.json")
    assert not (tmp_path / "q.png").exists()


def test_external_quantizers_are_listed_and_their_absence_is_one_line(quantgate, tiny_checkpoint: Path) -> None:
    listed = json.loads(quantgate("external", "list", "--json").out)["external"]
    assert {entry["name"]: entry["installed"] for entry in listed} == dict.fromkeys(
        ("autoawq", "autogptq", "gptqmodel", "llmcompressor"), False
    )
    is_one_line(quantgate("external", "install", "autoround"), "'autoround' is unknown", "gptqmodel")
    made = quantgate("quantize", tiny_checkpoint, "--method", "external:llmcompressor", "--out", "q")
    is_one_line(made, "quantgate external install llmcompressor")
