"""AWQ: moving scales changes nothing before rounding, the search only ever helps, and 0/0 does not occur."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GemmaConfig, GPTNeoXConfig, LlamaConfig, OPTConfig, Phi3Config

from quantize.gram import InputRecorder, output_error
from quantize.layer import quantize_layer
from quantize.methods.awq import clip_and_round, scaled_error, search_scale
from quantize.methods.consumer import Consumer
from quantize.methods.fusion import find_fusions
from quantize.recipe import Recipe
from quantize.scheme import Scheme, dequantize, quantize_rtn

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "attn_implementation": "eager",
}


def model_of(config) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for (
        name,
        parameter,
    ) in model.named_parameters():  # untrained norms and biases are ones and zeros, which hide mistakes
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    return model


def first_layer(model: nn.Module):
    """The first decoder layer, a function that runs it on fixed states, and which linears share an input."""
    caught = {}

    def catch(_module, args, kwargs):
        caught["args"], caught["kwargs"] = args, kwargs

    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    layer = layers[0]
    handle = layer.register_forward_pre_hook(catch, with_kwargs=True)
    ids = torch.randint(0, 96, (1, 24), generator=torch.Generator().manual_seed(1))
    recorder = InputRecorder({name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)})
    with torch.no_grad(), recorder.watching():
        model(ids, use_cache=False)
    handle.remove()

    def run(candidate):
        with torch.no_grad():
            output = candidate(*caught["args"], **caught["kwargs"])
        return output[0] if isinstance(output, tuple) else output

    return layer, run, recorder


LLAMA = LlamaConfig(intermediate_size=128, num_key_value_heads=2, **SMALL)
LLAMA_FULL = LlamaConfig(intermediate_size=128, num_key_value_heads=4, attention_bias=True, mlp_bias=True, **SMALL)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, {"input_layernorm", "self_attn.v_proj", "post_attention_layernorm", "mlp.up_proj"}),
        (LLAMA_FULL, {"input_layernorm", "self_attn.v_proj", "post_attention_layernorm", "mlp.up_proj"}),
        (
            GemmaConfig(intermediate_size=128, num_key_value_heads=4, head_dim=16, **SMALL),
            {"input_layernorm", "self_attn.v_proj", "post_attention_layernorm", "mlp.up_proj"},
        ),
        # One matrix makes gate and up (and q, k and v), so that their rows cannot be scaled apart: the norms alone.
        (
            Phi3Config(intermediate_size=128, num_key_value_heads=4, pad_token_id=0, **SMALL),
            {"input_layernorm", "post_attention_layernorm"},
        ),
        # ReLU lets positive scales through; powers of two do not tell it from a line, and need not.
        (
            OPTConfig(ffn_dim=128, word_embed_proj_dim=64, **SMALL),
            {"self_attn_layer_norm", "self_attn.v_proj", "final_layer_norm", "fc1"},
        ),
        # GELU does not.
        (GPTNeoXConfig(intermediate_size=128, **SMALL), {"input_layernorm", "post_attention_layernorm"}),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_where_scales_can_go_is_found_from_the_layer_itself(config, expected):
    layer, run, recorder = first_layer(model_of(config))
    assert {fusion.source for fusion in find_fusions(layer, run, recorder.leader, seed=0)} == expected


@pytest.mark.parametrize("config", [LLAMA, LLAMA_FULL], ids=["grouped heads", "biases"])
@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_a_fused_layer_computes_what_it_computed(config, spread):
    layer, run, recorder = first_layer(model_of(config))
    before = run(layer)
    fusions = find_fusions(layer, run, recorder.leader, seed=0)
    fused = copy.deepcopy(layer)
    for fusion in fusions:
        generator = torch.Generator().manual_seed(len(fusion.source))
        scale = torch.exp(spread * torch.randn(int(fusion.channel.max()) + 1, generator=generator))
        fusion.apply(fused, scale, lambda name: fused.get_submodule(name).weight.data)
    assert len(fusions) == 4
    torch.testing.assert_close(run(fused), before, rtol=2e-4, atol=2e-4 * before.abs().max().item())


def test_looking_for_fusions_leaves_the_layer_as_it_was():
    layer, run, recorder = first_layer(
        model_of(GemmaConfig(intermediate_size=128, num_key_value_heads=4, head_dim=16, **SMALL))
    )
    before = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    find_fusions(layer, run, recorder.leader, seed=0)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, before[name])


def test_a_bf16_norm_moves_the_ratio_of_its_stored_values():
    """Nothing is lost to the norm's own rounding: what the columns take is what the norm really gave."""
    layer, run, recorder = first_layer(model_of(LLAMA))
    fusion = find_fusions(layer, run, recorder.leader, seed=0)[0]
    norm = layer.get_submodule(fusion.source)
    norm.weight = nn.Parameter(norm.weight.to(torch.bfloat16), requires_grad=False)
    norm.weight.data[5] = 0
    before = norm.weight.float().clone()
    scale = torch.exp(torch.randn(64, generator=torch.Generator().manual_seed(3)))
    moved = fusion.apply(layer, scale, lambda name: layer.get_submodule(name).weight.data)
    torch.testing.assert_close(norm.weight.float() * moved, before, rtol=1e-6, atol=0)
    assert moved[5] == 1


def example(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    activations = torch.randn(500, 64, generator=generator)
    activations[:, ::9] *= 12
    weights = [torch.randn(rows, 64, generator=generator) for rows in (48, 16)]
    return weights, activations.T @ activations / 500


@pytest.mark.parametrize("seed", range(3))
def test_scale_and_clip_each_lower_the_output_error(seed):
    weights, gram = example(seed)
    scheme, channel = Scheme(4, 32), torch.arange(64)
    consumers = [Consumer(weight, scheme) for weight in weights]
    scale = search_scale(consumers, gram, gram.diagonal().sqrt(), channel, torch.float32)
    plain = scaled_error(consumers, torch.ones(64), gram, channel, torch.float32)
    scaled = scaled_error(consumers, scale, gram, channel, torch.float32)
    assert scaled < 0.8 * plain
    both = 0.0
    for weight in weights:
        found, _ = clip_and_round(weight * scale, gram / torch.outer(scale, scale), scheme, torch.float32)
        both += output_error(weight - dequantize(found.quantized) / scale, gram).sum().item()
    assert both < scaled


def test_channels_that_never_fire_and_weights_of_zero_give_no_nan():
    weights, gram = example()
    gram[:, :20] = gram[:20, :] = 0
    weights[0][:, 20:40] = weights[1][:, 20:40] = 0
    scheme, channel = Scheme(4, 32), torch.arange(64)
    consumers = [Consumer(weight, scheme) for weight in weights]
    for moments in (gram, torch.zeros_like(gram)):
        scale = search_scale(consumers, moments, moments.diagonal().sqrt(), channel, torch.bfloat16)
        assert torch.isfinite(scale).all()
        assert (scale > 0).all()
        assert (scale[:20] == 1).all()


def test_a_layer_is_quantized_with_less_output_error_than_rounding():
    layer, run, recorder = first_layer(model_of(LLAMA))
    reference = run(layer)
    schemes = {name: Scheme(4, 32) for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    fusions = find_fusions(layer, run, recorder.leader, seed=0)
    rounded, treated = copy.deepcopy(layer), copy.deepcopy(layer)
    results, changed = quantize_layer(treated, schemes, recorder.grams(), {}, recorder.tokens(), fusions, Recipe("awq"))
    for name in schemes:
        rounded.get_submodule(name).weight.data = dequantize(
            quantize_rtn(rounded.get_submodule(name).weight.data, Scheme(4, 32))
        )
        treated.get_submodule(name).weight = nn.Parameter(dequantize(results[name].quantized))
    assert set(changed) == {"input_layernorm.weight", "post_attention_layernorm.weight"}
    assert (run(treated) - reference).square().sum() < (run(rounded) - reference).square().sum()


def test_a_linear_that_keeps_its_weights_is_not_scaled():
    layer, run, recorder = first_layer(model_of(LLAMA))
    fusions = find_fusions(layer, run, recorder.leader, seed=0)
    schemes = {"self_attn.q_proj": Scheme(4, 32), "mlp.down_proj": Scheme(4, 32)}
    results, changed = quantize_layer(layer, schemes, recorder.grams(), {}, recorder.tokens(), fusions, Recipe("awq"))
    assert set(results) == set(schemes)
    assert changed == {}
