"""From checkpoint to quantized checkpoint: same bytes every time, also after kills; every bad input named and
nothing left behind."""

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, GptOssConfig, LlamaConfig

import quantize.pipeline as pipeline
from quantize import Manifest, Recipe, quantize_checkpoint
from quantize.atomic import atomic_directory
from quantize.causal_attention import FasterCausalAttention
from quantize.checkpoint import Checkpoint
from quantize.decoder import load_module, open_decoder
from quantize.errors import QuantizeError
from quantize.load import load_model
from quantize.method import METHODS
from quantize.pipeline import refuse_wrong_out
from quantize.walk import Walk


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """A forked process must not wait for the worker threads that only its parent has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def recipe_of(method: str, **fields) -> Recipe:
    return Recipe(method, samples=6, sequence_length=48, **fields)


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the manifest, which is compared without its times."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.name != "quantgate.json"}


def timeless(folder: Path) -> dict:
    manifest = json.loads((folder / "quantgate.json").read_text())
    manifest.pop("seconds")
    for module in manifest["modules"]:
        module.pop("seconds")
    return manifest


@pytest.fixture(scope="session")
def results(spelling_llama, spelled_text, tmp_path_factory) -> dict[str, Path]:
    """One quantized checkpoint per method."""
    folder = tmp_path_factory.mktemp("results")
    for method in METHODS:
        quantize_checkpoint(spelling_llama, recipe_of(method), folder / method, calibration=spelled_text)
    return {method: folder / method for method in METHODS}


@pytest.fixture
def copied(spelling_llama, tmp_path) -> Path:
    return shutil.copytree(spelling_llama, tmp_path / "copy")


def alter(checkpoint: Path, change) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("method", METHODS)
def test_every_result_loads_in_transformers_and_stays_close_to_the_original(results, spelling_llama, method):
    ids = torch.randint(1, 96, (2, 32), generator=torch.Generator().manual_seed(5))
    original = AutoModelForCausalLM.from_pretrained(spelling_llama, dtype=torch.float32)
    quantized = AutoModelForCausalLM.from_pretrained(results[method], dtype=torch.float32)
    with torch.no_grad():
        expected, got = original(ids).logits, quantized(ids).logits
    manifest = Manifest.read(results[method])
    assert (got - expected).norm() < (0.06 if manifest.recipe["bits"] == 8 else 1.2) * expected.norm()


def test_calibrated_methods_measure_their_output_error(results):
    for method in ("awq", "gptq"):
        modules = Manifest.read(results[method]).modules
        assert all(0 < module.relative_error < 0.05 and module.error_of == "outputs" for module in modules)


def test_token_importance_changes_what_gptq_compensates(results, spelling_llama, spelled_text, tmp_path):
    recipe = recipe_of("gptq", token_importance="rarity")
    quantize_checkpoint(spelling_llama, recipe, tmp_path / "out", calibration=spelled_text)
    shard = "model-00001-of-00004.safetensors"
    assert contents(tmp_path / "out")[shard] != contents(results["gptq"])[shard]
    assert all(0 < module.relative_error < 0.05 for module in Manifest.read(tmp_path / "out").modules)


def test_the_manifest_accounts_for_every_module_and_byte(results, spelling_llama):
    for method, folder in results.items():
        manifest = Manifest.read(folder)
        names = [module.name for module in manifest.modules]
        assert len(names) == len(set(names)) == 21
        assert manifest.coverage == {"expected": 21, "packed": 21}
        assert manifest.bytes_after == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        assert manifest.bytes_before == (spelling_llama / "model.safetensors").stat().st_size
        assert manifest.source_digest == Checkpoint.open(spelling_llama).weights_digest()
        assert Recipe.from_mapping(manifest.recipe) == recipe_of(method)
        assert (manifest.calibration is None) == (method in ("int8", "int4", "int3"))
        assert all(module.fallback is None for module in manifest.modules)
    assert 8 < Manifest.read(results["int8"]).bits_per_weight < 8.6
    assert "group size 64" in Manifest.read(results["int4"]).notes[0]


def test_embeddings_stay_tied_and_companions_come_along(results, spelling_llama):
    for folder in results.values():
        assert "lm_head.weight" not in Checkpoint.open(folder).files
        config = json.loads((folder / "config.json").read_text())
        assert config["tie_word_embeddings"] is True
        assert config["quantization_config"]["ignore"] == ["lm_head"]
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            assert (folder / name).read_bytes() == (spelling_llama / name).read_bytes()


def test_untouched_tensors_are_the_originals_bytes(results, spelling_llama):
    original = Checkpoint.open(spelling_llama)
    for method in ("int8", "int4", "gptq"):
        copy = Checkpoint.open(results[method])
        for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.1.input_layernorm.weight"):
            assert torch.equal(copy.tensor(name), original.tensor(name))


@pytest.mark.parametrize("method", METHODS)
def test_the_same_input_gives_the_same_bytes(results, spelling_llama, spelled_text, tmp_path, method):
    quantize_checkpoint(spelling_llama, recipe_of(method), tmp_path / "again", calibration=spelled_text)
    assert contents(tmp_path / "again") == contents(results[method])
    assert timeless(tmp_path / "again") == timeless(results[method])


def run_until_killed(source: Path, out: Path, text: Path, method: str, step: int, where: str) -> None:
    """Quantizes in a process that kills itself between two layers, or while it writes the shard of `step`."""
    torch.set_num_threads(1)

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def progress(_what: str, done: int, _total: int) -> None:
        if where == "between" and done == step:
            kill()

    saved = pipeline.save_file

    def save_half(tensors, path, details):
        saved(tensors, path, details)
        if where == "within" and f"-{step + 1:05d}-" in str(path):
            os.truncate(path, os.path.getsize(path) // 2)
            kill()

    pipeline.save_file = save_half
    quantize_checkpoint(source, recipe_of(method), out, calibration=text, progress=progress)


@pytest.mark.parametrize(
    ("method", "where"),
    [
        ("gptq", "between"),
        ("gptq", "within"),
        ("awq", "between"),
        ("int4", "within"),
        ("awq+gptq", "between"),
        ("smoothquant+gptq", "between"),
    ],
)
def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(
    results, spelling_llama, spelled_text, tmp_path, method, where
):
    out = tmp_path / "out"
    step = random.Random(f"{method} {where}").randint(1, 3)
    arguments = (spelling_llama, out, spelled_text, method, step, where)
    process = multiprocessing.get_context("fork").Process(target=run_until_killed, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not out.exists()
    finished = {file.name for file in (tmp_path / "out.partial").glob("model-*.safetensors")}
    assert len(finished) == step
    stamps = {name: (tmp_path / "out.partial" / name).stat().st_mtime_ns for name in finished}
    quantize_checkpoint(spelling_llama, recipe_of(method), out, calibration=spelled_text)
    assert {name: (out / name).stat().st_mtime_ns for name in finished} == stamps
    assert contents(out) == contents(results[method])
    assert timeless(out) == timeless(results[method])
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def interrupted(source: Path, recipe: Recipe, out: Path, text: Path, step: int) -> None:
    """A run that an exception ends before `step`, as Ctrl-C does."""

    def progress(_what, done, _total):
        if done == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, recipe, out, calibration=text, progress=progress)


def test_leftovers_of_another_recipe_are_not_continued(results, spelling_llama, spelled_text, tmp_path):
    interrupted(spelling_llama, recipe_of("gptq", damp=0.5), tmp_path / "out", spelled_text, 2)
    assert (tmp_path / "out.partial" / "journal.jsonl").is_file()
    quantize_checkpoint(spelling_llama, recipe_of("gptq"), tmp_path / "out", calibration=spelled_text)
    assert contents(tmp_path / "out") == contents(results["gptq"])


def test_a_damaged_shard_or_journal_is_done_again(results, spelling_llama, spelled_text, tmp_path):
    interrupted(spelling_llama, recipe_of("gptq"), tmp_path / "out", spelled_text, 3)
    partial = tmp_path / "out.partial"
    damaged = sorted(partial.glob("model-*"))[1]
    damaged.write_bytes(damaged.read_bytes()[:-8] + b"\0" * 8)
    with (partial / "journal.jsonl").open("a") as journal:
        journal.write('{"file": "model-0')
    quantize_checkpoint(spelling_llama, recipe_of("gptq"), tmp_path / "out", calibration=spelled_text)
    assert contents(tmp_path / "out") == contents(results["gptq"])


def test_the_walk_gives_each_layer_what_the_model_gives_it(spelling_llama, spelled_text):
    """Walking all layers and taking the final norm equals the model's own hidden states."""
    checkpoint = Checkpoint.open(spelling_llama)
    decoder = open_decoder(checkpoint)
    ids = torch.randint(1, 96, (3, 40), generator=torch.Generator().manual_seed(2))
    walk = Walk(decoder, checkpoint, ids, torch.device("cpu"))
    for index, layer in enumerate(decoder.layers):
        load_module(decoder, layer, decoder.layer_prefix(index), checkpoint, torch.device("cpu"))
        walk.advance(index, layer)
        layer.to("meta")
        assert all(parameter.is_meta for parameter in decoder.model.parameters())
    model = AutoModelForCausalLM.from_pretrained(spelling_llama)
    with torch.no_grad(), FasterCausalAttention():
        assert torch.equal(model.model.norm(torch.cat(walk.states)), model.model(ids).last_hidden_state)


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text", "qwen3", "gpt_neox", "opt", "phi3"])
def test_other_decoders_walk_too(tmp_path, family, monkeypatch):
    """Sliding windows with masks of their own per layer, inputs of each layer that depend on the tokens, learned
    positions, layers that return tuples; in more than one batch."""
    monkeypatch.setattr("quantize.walk.BATCH_TOKENS", 24)
    small = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96, "pad_token_id": 0}
    more = {
        "gemma3_text": {"intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8,
                        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "gemma4_text": {"intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16,
                        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96, "sliding_window": 8,
                        "num_kv_shared_layers": 0, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
        "qwen3": {"intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16},
        "gpt_neox": {"intermediate_size": 128},
        "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
        "phi3": {"intermediate_size": 128, "num_key_value_heads": 4},
    }  # fmt: skip
    from transformers import AutoConfig

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **small, **more[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "model")
    checkpoint = Checkpoint.open(tmp_path / "model")
    decoder = open_decoder(checkpoint)
    ids = torch.randint(1, 96, (2, 24), generator=torch.Generator().manual_seed(2))
    walk = Walk(decoder, checkpoint, ids, torch.device("cpu"))
    caught = []
    layers = model.get_submodule(decoder.prefix)
    layers[-1].register_forward_hook(lambda _module, _args, output: caught.append(output))
    with torch.no_grad():
        model(ids, use_cache=False)
    expected = caught[0][0] if isinstance(caught[0], tuple) else caught[0]
    for index, layer in enumerate(decoder.layers):
        load_module(decoder, layer, decoder.layer_prefix(index), checkpoint, torch.device("cpu"))
        walk.advance(index, layer)
    torch.testing.assert_close(torch.cat(walk.states), expected, rtol=1e-5, atol=1e-5)


def test_a_model_that_cannot_be_walked_says_what_its_forward_said(spelling_llama):
    checkpoint = Checkpoint.open(spelling_llama)
    decoder = open_decoder(checkpoint)

    def fail(*_args, **_kwargs):
        raise ValueError("no rotary table for this length")

    decoder.model.base_model.norm.forward = fail
    ids = torch.arange(1, 25)[None]
    with pytest.raises(
        QuantizeError, match=r"layer to layer \(ValueError: no rotary table for this length\)"
    ) as caught:
        Walk(decoder, checkpoint, ids, torch.device("cpu"))
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_targeted_head_is_untied_and_the_cost_is_said(spelling_llama, tmp_path):
    manifest = quantize_checkpoint(spelling_llama, recipe_of("int8", ignore=()), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        original = AutoModelForCausalLM.from_pretrained(spelling_llama, dtype=torch.float32)(ids).logits
        assert (model(ids).logits - original).norm() < 0.06 * original.norm()
    assert manifest.modules[-1].name == "lm_head"
    assert "6144 bytes more" in manifest.notes[0]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_an_override_by_its_name_takes_the_head_out_of_ignore(spelling_llama, tmp_path):
    recipe = Recipe.from_mapping({"method": "int4", "group_size": 32, "overrides": {"lm_head": {"bits": 8}}})
    manifest = quantize_checkpoint(spelling_llama, recipe, tmp_path / "out")
    head = manifest.modules[-1]
    assert (head.name, head.bits, head.group_size) == ("lm_head", 8, 32)
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)(ids).logits
        ours = load_model(tmp_path / "out", dtype=torch.float32)(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_pattern_that_matches_the_head_leaves_it_ignored(spelling_llama, tmp_path):
    recipe = Recipe.from_mapping({"method": "int8", "overrides": {"*": {"bits": 8}}})
    assert "lm_head" not in {
        record.name for record in quantize_checkpoint(spelling_llama, recipe, tmp_path / "o").modules
    }


def test_embeddings_are_refused_by_name(spelling_llama, tmp_path):
    recipe = Recipe.from_mapping({"method": "int8", "overrides": {"model.embed_tokens": {"bits": 8}}})
    assert "model.embed_tokens: embeddings keep their weights" in refused(spelling_llama, recipe, tmp_path)


def test_overrides_give_modules_their_own_bits_or_leave_them(spelling_llama, spelled_text, tmp_path):
    recipe = Recipe.from_mapping(
        {
            "method": "gptq",
            "samples": 4,
            "sequence_length": 32,
            "overrides": {"*.0.*": {"bits": 8}, "*.down_proj": {"skip": True}, "*v_proj": {"group_size": 32}},
        }
    )
    manifest = quantize_checkpoint(spelling_llama, recipe, tmp_path / "out", calibration=spelled_text)
    modules = {module.name.removeprefix("model.layers."): module for module in manifest.modules}
    assert modules["0.mlp.down_proj"].bits == 8
    assert "1.mlp.down_proj" not in modules
    assert modules["1.self_attn.v_proj"].group_size == 32
    assert modules["1.self_attn.q_proj"].group_size == 64
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_int8_activations_are_written_into_the_config(spelling_llama, tmp_path):
    quantize_checkpoint(spelling_llama, recipe_of("int8", activations="int8"), tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["config_groups"]["group_0"]["input_activations"]["strategy"] == "token"


def refused(source: Path, recipe: Recipe, folder: Path, text: Path | None = None) -> str:
    """What a refusal says, after checking that it is one line and leaves nothing behind."""
    before = sorted(folder.iterdir())
    with pytest.raises(QuantizeError) as caught:
        quantize_checkpoint(source, recipe, folder / "out", calibration=text)
    assert "\n" not in str(caught.value)
    assert sorted(folder.iterdir()) == before
    return str(caught.value)


@pytest.mark.parametrize("method", METHODS)
def test_nan_weights_are_named_before_anything_is_written(copied, spelled_text, tmp_path, method):
    alter(copied, lambda tensors: tensors["model.layers.2.mlp.down_proj.weight"][3, 3].fill_(float("nan")))
    said = refused(copied, recipe_of(method), tmp_path, spelled_text)
    assert "model.layers.2.mlp.down_proj.weight holds NaN" in said


@pytest.mark.parametrize("form", ["gptq", "awq"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_too_large_for_a_half_precision_scale_is_named_before_calibration(
    copied, spelled_text, tmp_path, form, dtype
):
    def enlarge(tensors):
        for name in tensors:
            tensors[name] = tensors[name].to(dtype)
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = -(2.0**20)

    alter(copied, enlarge)
    recipe = recipe_of("gptq", format=form, group_size=64)
    message = refused(copied, recipe, tmp_path, spelled_text)
    assert "model.layers.1.mlp.up_proj.weight: a weight of 1.049e+06 needs a scale above 65504" in message
    assert "use format compressed-tensors" in message
    quantize_checkpoint(copied, recipe_of("int4", group_size=64), tmp_path / "other")


def test_an_unwritable_place_is_found_without_leaving_anything(results, spelling_llama, tmp_path):
    refuse_wrong_out(tmp_path / "new")
    refuse_wrong_out(results["int4"])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("in the way")
    for out, reason in ((tmp_path / "file", "exists already"), (tmp_path / "file" / "below", "Not a directory")):
        with pytest.raises(QuantizeError, match=reason):
            refuse_wrong_out(out)
    (tmp_path / "kept.partial").mkdir()
    (tmp_path / "kept.partial" / "journal.json").write_text("{}")
    refuse_wrong_out(tmp_path / "kept")
    assert (tmp_path / "kept.partial" / "journal.json").is_file()


def test_a_group_that_does_not_divide_is_found_before_calibration(spelling_llama, tmp_path):
    said = refused(spelling_llama, recipe_of("gptq", group_size=48), tmp_path, Path("/no such calibration"))
    assert "48 does not divide the 64 inputs of model.layers.0.self_attn.q_proj (and of 20 more modules)" in said
    assert "use 64 or 32" in said


def test_automatic_groups_that_fit_nowhere_say_what_to_do(tmp_path):
    config = LlamaConfig(
        hidden_size=48, intermediate_size=96, num_attention_heads=4, num_hidden_layers=1, vocab_size=96
    )
    save_model(config, tmp_path / "model")
    assert "none of 128, 64 and 32 divides the 48 inputs" in refused(tmp_path / "model", recipe_of("int4"), tmp_path)


def save_model(config, folder: Path) -> None:
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def test_transposed_linears_are_refused_by_name(tmp_path):
    GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96)).save_pretrained(tmp_path / "gpt2")
    assert "attn.c_attn is a Conv1D" in refused(tmp_path / "gpt2", recipe_of("int8"), tmp_path)


def test_experts_stored_as_one_tensor_are_refused_by_name(tmp_path):
    config = GptOssConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                          num_key_value_heads=4, head_dim=16, num_local_experts=4, vocab_size=96)  # fmt: skip
    save_model(config, tmp_path / "gpt_oss")
    said = refused(tmp_path / "gpt_oss", recipe_of("int8"), tmp_path)
    assert "mlp.experts.gate_up_proj (4, 64, 128) is stored as one tensor for all experts" in said


def test_nothing_left_to_quantize_is_an_error(spelling_llama, tmp_path):
    assert "nothing to quantize" in refused(spelling_llama, recipe_of("int8", ignore=("*",)), tmp_path)


def test_an_override_that_decides_nothing_is_an_error(spelling_llama, tmp_path):
    recipe = Recipe.from_mapping({"method": "int8", "overrides": {"*.w1": {"skip": True}}})
    assert "*.w1" in refused(spelling_llama, recipe, tmp_path)


def test_an_ignore_pattern_that_matches_nothing_is_an_error(spelling_llama, tmp_path):
    recipe = recipe_of("int8", ignore=("lm_head", "*.w2"))
    assert "ignore: *.w2: matches no linear" in refused(spelling_llama, recipe, tmp_path)


def test_a_model_that_transformers_does_not_know(copied, tmp_path):
    config = json.loads((copied / "config.json").read_text()) | {"model_type": "unheard_of"}
    (copied / "config.json").write_text(json.dumps(config))
    assert "unheard_of" in refused(copied, recipe_of("int8"), tmp_path)


def test_tensors_that_do_not_fit_the_config_are_named(copied, tmp_path):
    config = json.loads((copied / "config.json").read_text()) | {"intermediate_size": 256}
    (copied / "config.json").write_text(json.dumps(config))
    assert "gate_proj.weight is (128, 64)" in refused(copied, recipe_of("int8"), tmp_path)
    (copied / "config.json").write_text(json.dumps(config | {"intermediate_size": 128, "num_hidden_layers": 4}))
    assert "has no tensor model.layers.3." in refused(copied, recipe_of("int8"), tmp_path)


def test_a_quantized_source_and_a_missing_source_are_refused(results, tmp_path):
    assert "quantized already" in refused(results["int8"], recipe_of("int8"), tmp_path)
    assert "no such path" in refused(tmp_path / "nowhere", recipe_of("int8"), tmp_path)


def test_a_missing_tokenizer_matters_only_to_methods_that_read_text(copied, spelled_text, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copied / name).unlink()
    assert "tokenizer does not load" in refused(copied, recipe_of("gptq"), tmp_path, spelled_text)
    quantize_checkpoint(copied, recipe_of("int8"), tmp_path / "out")


def test_the_same_work_is_not_done_twice_and_other_work_does_not_overwrite_it(results, spelling_llama, tmp_path):
    out = shutil.copytree(results["int8"], tmp_path / "out")
    before = contents(out)
    assert quantize_checkpoint(spelling_llama, recipe_of("int8"), out) == Manifest.read(results["int8"])
    with pytest.raises(QuantizeError, match="exists already"):
        quantize_checkpoint(spelling_llama, recipe_of("int4"), out)
    assert contents(out) == before
    quantize_checkpoint(spelling_llama, recipe_of("int4"), out, replace=True)
    assert contents(out) == contents(results["int4"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_result_that_lost_a_shard_is_made_again(results, spelling_llama, tmp_path):
    out = shutil.copytree(results["int8"], tmp_path / "out")
    next(out.glob("model-*.safetensors")).unlink()
    quantize_checkpoint(spelling_llama, recipe_of("int8"), out, replace=True)
    assert contents(out) == contents(results["int8"])


def test_what_is_no_result_is_never_replaced(spelling_llama, tmp_path):
    own = shutil.copytree(spelling_llama, tmp_path / "out")
    with pytest.raises(QuantizeError, match="exists already"):
        quantize_checkpoint(spelling_llama, recipe_of("int8"), own, replace=True)
    assert contents(own) == contents(spelling_llama)


def test_another_process_at_work_on_the_same_result_is_respected(spelling_llama, tmp_path):
    with atomic_directory(tmp_path / "out"), pytest.raises(QuantizeError, match="another process is writing it"):
        quantize_checkpoint(spelling_llama, recipe_of("int8"), tmp_path / "out")


def test_a_full_disk_is_one_line_and_the_same_command_goes_on_later(
    results, spelling_llama, spelled_text, tmp_path, monkeypatch
):
    saved = pipeline.save_file

    def full(tensors, path, details):
        if "-00003-" in str(path):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        saved(tensors, path, details)

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "save_file", full)
        with pytest.raises(QuantizeError, match="disk is full") as caught:
            quantize_checkpoint(spelling_llama, recipe_of("gptq"), tmp_path / "out", calibration=spelled_text)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "out.partial").glob("*.partial"))
    quantize_checkpoint(spelling_llama, recipe_of("gptq"), tmp_path / "out", calibration=spelled_text)
    assert contents(tmp_path / "out") == contents(results["gptq"])


def test_weights_that_overflow_on_the_calibration_text_are_reported(copied, spelled_text, tmp_path):
    alter(copied, lambda tensors: tensors["model.layers.1.mlp.down_proj.weight"].fill_(3e38))
    assert "model.layers.1" in refused_after_work(copied, recipe_of("awq"), tmp_path, spelled_text)


def refused_after_work(source: Path, recipe: Recipe, folder: Path, text: Path) -> str:
    """A refusal that comes too late to leave no finished layers; no OUT, though."""
    with pytest.raises(QuantizeError) as caught:
        quantize_checkpoint(source, recipe, folder / "out", calibration=text)
    assert not (folder / "out").exists()
    return str(caught.value)
