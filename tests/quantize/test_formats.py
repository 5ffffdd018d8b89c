"""A recipe's format changes where the numbers lie and never what they are; what it cannot hold is said at once."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

import quantize.pipeline as pipeline
from quantize import Manifest, Recipe, load_model, quantize_checkpoint
from quantize.convert import convert_checkpoint
from quantize.errors import QuantizeError
from quantize.formats.half import raise_small_scales
from quantize.gram import relative_weight_error
from quantize.linear import QuantizedLinear
from quantize.scheme import Scheme, dequantize, quantize_rtn

IDS = torch.randint(1, 90, (2, 24), generator=torch.Generator().manual_seed(0))


def recipe_of(method: str, **fields) -> Recipe:
    return Recipe(method, samples=4, sequence_length=48, **{"group_size": 32, **fields})


def logits(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.inference_mode():
        return load_model(folder, dtype=dtype)(IDS).logits


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.name != "quantgate.json"}


@pytest.mark.parametrize(
    ("form", "method", "fields"),
    [
        ("gptq", "int4", {}),
        ("gptq", "gptq", {}),
        ("gptq", "gptq", {"bits": 3}),
        ("gptq", "int8", {"group_size": -1}),
        ("awq", "awq", {"symmetric": False}),
        ("awq", "int4", {"group_size": 64}),
        ("awq", "gptq", {"symmetric": False}),
    ],
)
def test_a_format_holds_the_very_weights_of_the_default_one(
    spelling_llama, spelled_text, tmp_path, form, method, fields
):
    for name in ("compressed-tensors", form):
        recipe = recipe_of(method, format=name, **fields)
        quantize_checkpoint(spelling_llama, recipe, tmp_path / name, calibration=spelled_text)
    assert torch.equal(logits(tmp_path / form), logits(tmp_path / "compressed-tensors"))
    manifest = Manifest.read(tmp_path / form)
    assert manifest.coverage == {"expected": 21, "packed": 21}
    assert manifest.recipe["format"] == form
    linears = [module for module in load_model(tmp_path / form).modules() if isinstance(module, QuantizedLinear)]
    assert len(linears) == 21
    assert json.loads((tmp_path / form / "config.json").read_text())["quantization_config"]["quant_method"] == form


@pytest.mark.parametrize(("form", "method"), [("gptq", "gptq"), ("awq", "awq+gptq")])
def test_an_interrupted_run_ends_with_the_same_bytes(spelling_llama, spelled_text, tmp_path, monkeypatch, form, method):
    recipe = recipe_of(method, format=form)
    quantize_checkpoint(spelling_llama, recipe, tmp_path / "whole", calibration=spelled_text)

    def give_up(work, index):
        raise KeyboardInterrupt if index == 1 else None

    finish_layer = pipeline.finish_layer
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "finish_layer", lambda work, i: give_up(work, i) if i else finish_layer(work, i))
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(spelling_llama, recipe, tmp_path / "resumed", calibration=spelled_text)
    assert (tmp_path / "resumed.partial").is_dir()
    quantize_checkpoint(spelling_llama, recipe, tmp_path / "resumed", calibration=spelled_text)
    assert contents(tmp_path / "resumed") == contents(tmp_path / "whole")


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_float32_sources_get_scales_that_fp16_holds(spelling_llama, spelled_text, tmp_path, form):
    source = shutil.copytree(spelling_llama, tmp_path / "source")
    tensors = {name: tensor.float() * 1.0001 for name, tensor in load_file(source / "model.safetensors").items()}
    tensors["model.layers.1.self_attn.q_proj.weight"][3] *= 1e-6
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text((source / "config.json").read_text().replace("bfloat16", "float32"))
    quantize_checkpoint(source, recipe_of("gptq", format=form), tmp_path / "out", calibration=spelled_text)
    written = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        written.update(load_file(file))
    assert written["model.layers.0.mlp.up_proj.scales"].dtype == torch.float16
    quantize_checkpoint(source, recipe_of("gptq"), tmp_path / "default", calibration=spelled_text)
    ours, default = ((logits(tmp_path / name) - logits(source)).abs().mean() for name in ("out", "default"))
    assert ours < 1.1 * default


def test_bf16_weights_too_small_for_fp16_scales_do_not_stop_the_work(spelling_llama, spelled_text, tmp_path):
    source = shutil.copytree(spelling_llama, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][:3] *= 1e-6
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    quantize_checkpoint(source, recipe_of("gptq", format="gptq"), tmp_path / "out", calibration=spelled_text)
    scales = load_file(tmp_path / "out" / "model-00003-of-00004.safetensors")["model.layers.2.mlp.up_proj.scales"]
    assert (scales[:, :3] == 2.0**-17).all()
    assert (scales[:, 3:] > 2.0**-17).all()


def test_the_recorded_error_counts_what_small_scales_cost(spelling_llama, tmp_path):
    source = shutil.copytree(spelling_llama, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"] *= 5e-5
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    manifest = quantize_checkpoint(source, recipe_of("int4", format="gptq"), tmp_path / "out")
    recorded = next(module for module in manifest.modules if module.name == "model.layers.2.mlp.up_proj")
    exact = tensors[f"{recorded.name}.weight"].float()
    with torch.inference_mode():
        stored = load_model(tmp_path / "out", dtype=torch.float32).get_submodule(recorded.name)(torch.eye(64)).T
    assert recorded.relative_error == pytest.approx(relative_weight_error(exact, stored), rel=1e-3)
    assert recorded.relative_error > 0.04


def test_raised_scales_keep_the_range_of_groups_with_zero_points():
    """Weights of one sign use all codes on one side of zero; half of them would be cut off around a zero point of 0."""
    weight = torch.rand(8, 64, generator=torch.Generator().manual_seed(0)) * 1e-4
    small = quantize_rtn(weight, Scheme(4, 32, symmetric=False), torch.bfloat16)
    raised = raise_small_scales(small)
    assert (raised.scale == 2.0**-17).all()
    assert (dequantize(raised, torch.float32) - weight).abs().max() <= 2.0**-17


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"method": "int4", "format": "gptq", "symmetric": False}, "symmetric only"),
        ({"method": "int8", "format": "awq"}, "AWQ holds 4 bits, not 8"),
        ({"method": "int3", "format": "awq"}, "AWQ holds 4 bits, not 3"),
        ({"method": "int8", "activations": "int8", "group_size": -1, "format": "gptq"}, "activations"),
        ({"method": "int4", "format": "gptq", "ignore": ()}, "lm_head"),
        ({"method": "gptq", "format": "gptq", "overrides": {"*down_proj": {"bits": 8}}}, "one scheme"),
        ({"method": "awq", "format": "awq", "overrides": {"*down_proj": {"group_size": 64}}}, "one scheme"),
    ],
)
def test_what_a_format_cannot_hold_is_said_before_any_work(spelling_llama, tmp_path, fields, words):
    recipe = Recipe.from_mapping({"group_size": 32, **fields})
    with pytest.raises(QuantizeError, match=words) as caught:
        quantize_checkpoint(spelling_llama, recipe, tmp_path / "out", calibration=tmp_path / "never read")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_modules_that_are_left_alone_stay_as_they_were(spelling_llama, tmp_path, form):
    recipe = Recipe.from_mapping(
        {"method": "int4", "group_size": 32, "format": form, "overrides": {"*layers.1.mlp*": {"skip": True}}}
    )
    quantize_checkpoint(spelling_llama, recipe, tmp_path / "out")
    model = load_model(tmp_path / "out")
    assert isinstance(model.model.layers[1].mlp.up_proj, torch.nn.Linear)
    assert isinstance(model.model.layers[0].mlp.up_proj, QuantizedLinear)


@pytest.fixture
def gptq_folder(spelling_llama, tmp_path) -> Path:
    quantize_checkpoint(spelling_llama, recipe_of("int4", format="gptq"), tmp_path / "gptq")
    return tmp_path / "gptq"


def alter(folder: Path, change) -> None:
    """`change` sees all the tensors of a shard and alters them in place."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})


def test_settings_in_autogptq_s_own_file_count(gptq_folder):
    expected = logits(gptq_folder)
    config = json.loads((gptq_folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    (gptq_folder / "config.json").write_text(json.dumps(config))
    del settings["quant_method"], settings["checkpoint_format"]
    (gptq_folder / "quantize_config.json").write_text(json.dumps(settings))
    assert torch.equal(logits(gptq_folder), expected)


def test_a_version_2_checkpoint_with_the_wrong_label_is_read_right(gptq_folder):
    expected = logits(gptq_folder)

    def to_version_2(tensors):
        for name in tensors:
            if name.endswith(".qzeros"):
                tensors[name] += 0x11111111

    alter(gptq_folder, to_version_2)
    assert torch.equal(logits(gptq_folder), expected)


def test_groups_in_act_order_multiply_the_inputs_they_belong_to(spelling_llama, gptq_folder):
    """Columns are shuffled, rounded in groups and put back, as GPTQ with desc_act stores them."""
    shuffle = torch.randperm(128, generator=torch.Generator().manual_seed(5))
    name = "model.layers.1.mlp.down_proj"
    weight = load_file(spelling_llama / "model.safetensors")[f"{name}.weight"]
    shuffled = quantize_rtn(weight[:, shuffle], Scheme(4, 32))
    back = torch.argsort(shuffle)
    expected = (shuffled.codes.float() * shuffled.scale.float().repeat_interleave(32, 1))[:, back]

    def in_act_order(tensors):
        if f"{name}.qweight" in tensors:
            from quantize.formats.compressed_tensors import pack_codes

            tensors[f"{name}.qweight"] = pack_codes(shuffled.codes[:, back].contiguous(), 4).T.contiguous()
            tensors[f"{name}.scales"] = shuffled.scale.T.contiguous().half()
            tensors[f"{name}.g_idx"] = (torch.arange(128, dtype=torch.int32) // 32)[back]

    alter(gptq_folder, in_act_order)
    linear = load_model(gptq_folder, dtype=torch.float32).get_submodule(name)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(linear(x), x @ expected.T, atol=1e-4)


def test_a_g_idx_that_fits_no_groups_is_refused_by_name(gptq_folder):
    def spoil(tensors):
        for name in tensors:
            if name.endswith("layers.0.mlp.up_proj.g_idx"):
                tensors[name][0] = 1

    alter(gptq_folder, spoil)
    with pytest.raises(QuantizeError, match=r"layers\.0\.mlp\.up_proj.*g_idx does not give each of 2 groups 32 inputs"):
        load_model(gptq_folder)


def test_a_gptq_checkpoint_is_not_quantized_again(gptq_folder, tmp_path):
    with pytest.raises(QuantizeError, match=r"is quantized already \(gptq\)"):
        quantize_checkpoint(gptq_folder, recipe_of("int4"), tmp_path / "out")


def test_a_missing_tensor_is_named(gptq_folder):
    def lose(tensors):
        tensors.pop("model.layers.0.mlp.up_proj.scales", None)

    (gptq_folder / "model.safetensors.index.json").unlink()
    alter(gptq_folder, lose)
    with pytest.raises(QuantizeError, match=r"missing from the checkpoint: model\.layers\.0\.mlp\.up_proj\.scales"):
        load_model(gptq_folder)


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_experts_are_written_and_read_under_their_stored_names(tmp_path, form):
    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=96,
        num_local_experts=2,
        max_position_embeddings=64,
    )
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    for name in ("compressed-tensors", form):
        manifest = quantize_checkpoint(tmp_path / "source", recipe_of("int4", format=name), tmp_path / name)
    assert torch.equal(logits(tmp_path / form), logits(tmp_path / "compressed-tensors"))
    assert f"transformers 5.17 does not load experts in {form}; vLLM and quantgate do" in manifest.notes
    convert_checkpoint(tmp_path / form, "compressed-tensors", tmp_path / "back")
    assert torch.equal(logits(tmp_path / "back"), logits(tmp_path / form))
