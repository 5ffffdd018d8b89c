"""The whole step in C++ computes what the module tree does; what it cannot describe runs through the module tree."""

import ctypes
import subprocess
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers.activations import ACT2CLS, ACT2FN

from eval.engine import Engine, EngineConfig, SamplingParams, decoder_step, native_attention
from eval.engine.decoder_plan import ACTIVATIONS, NotDescribed, activation_of, describe, norm_of
from eval.engine.decoder_step import DecoderStep
from eval.engine.probe import probe
from quantize.kernels.native import library
from quantize.linear import QuantizedLinear
from quantize.native_build import load_native, native_compiler
from quantize.scheme import Scheme, quantize_rtn

DESCRIBED = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "ministral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "seed_oss",
)
OTHERS = ("gpt_neox", "opt")
SCHEMES = {
    "int8": Scheme(8),
    "int4": Scheme(4, 32),
    "int4 with zero points": Scheme(4, 16, symmetric=False),
    "int3 per channel": Scheme(3, -1),
    "int8 activations": Scheme(8, activations="int8"),
}
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def _native():
    if library() is None:
        pytest.skip("no AVX2, or no compiler")


@pytest.fixture
def _avx2(monkeypatch):
    monkeypatch.setenv("QUANTGATE_NATIVE", "avx2")
    load_native.cache_clear()
    yield
    load_native.cache_clear()


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def engine_on(model, **options):
    return Engine(model, None, EngineConfig(**({"block_size": 4, "num_blocks": 400} | options)))


def quantized(model, scheme, *, skip=lambda name: False, compute="a16"):
    """The model with every linear of its layers rounded to nearest."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "layers" in name and not skip(name):
            weight = quantize_rtn(module.weight.detach(), scheme, torch.bfloat16)
            parent = model.get_submodule(name.rpartition(".")[0])
            linear = QuantizedLinear(weight, module.bias, torch.device("cpu"), module.weight.dtype, compute=compute)
            setattr(parent, name.rpartition(".")[2], linear)
    return model


def logits_of(engine, prompts):
    """Full-vocabulary logprobs of every prompt's tokens but the first, all prompts in the same steps."""
    found = [[] for _ in prompts]
    for index, _, logprobs in engine.score_stream([(prompt[:1], prompt[1:]) for prompt in prompts]):
        found[index].append(logprobs)
    return [torch.cat(parts) for parts in found]


def distance(found, reference):
    return torch.cat([(a - b).abs().flatten() for a, b in zip(found, reference, strict=True)]).mean()


def both_ways(model, prompts, **options):
    """Logprobs from the native step and from the module tree with the same attention kernel."""
    engine = engine_on(model, **({"max_batched_tokens": 64} | options))
    assert engine.identity()["steps"] == "native"
    native = logits_of(engine, prompts)
    engine._runner.native = None
    engine.pool.forget_all()
    return native, logits_of(engine, prompts)


@pytest.mark.parametrize("architecture", DESCRIBED)
def test_float32_logits_are_the_module_tree_s(architecture, tiny_model, random_prompts):
    native, tree = both_ways(tiny_model(architecture), random_prompts(6))
    for one, other in zip(native, tree, strict=True):
        assert (one - other).abs().max() < 1e-4


def test_sizes_that_fill_no_register(tiny_model, random_prompts):
    sizes = {"hidden_size": 72, "intermediate_size": 101, "vocab_size": 133, "num_hidden_layers": 3}
    native, tree = both_ways(tiny_model("llama", **sizes), random_prompts(6))
    assert max((one - other).abs().max() for one, other in zip(native, tree, strict=True)) < 1e-4
    reference = tree
    native, tree = both_ways(tiny_model("llama", **sizes).bfloat16(), random_prompts(6))
    assert distance(native, reference) <= 1.1 * distance(tree, reference)


@pytest.mark.parametrize("architecture", DESCRIBED)
def test_float32_greedy_tokens_are_transformers_own(architecture, tiny_model, random_prompts, greedy_reference):
    prompts = random_prompts(7)
    expected = greedy_reference(tiny_model(architecture), prompts, 12)
    engine = engine_on(tiny_model(architecture), max_batched_tokens=64)
    assert isinstance(engine._runner.native, DecoderStep)
    assert [completion.token_ids for completion in engine.generate(prompts, PARAMS)] == expected


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16", "int8"])
def test_every_kv_dtype(kv_dtype, tiny_model, random_prompts):
    native, tree = both_ways(tiny_model("llama"), random_prompts(4), kv_dtype=kv_dtype)
    for one, other in zip(native, tree, strict=True):
        # The last bit of a key may round the other way in a narrower cache, once float32 sums differ in their order.
        assert (one - other).abs().max() < (1e-4 if kv_dtype == "float32" else 0.05)


@pytest.mark.parametrize("compute", ["a16", "a8"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "phi3"])
def test_quantized_weights(scheme, architecture, compute, tiny_model, random_prompts):
    assert_as_near_as_the_module_tree(scheme, architecture, compute, tiny_model, random_prompts(5))


@pytest.mark.usefixtures("_avx2")
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_avx2(scheme, tiny_model, random_prompts):
    native, tree = both_ways(tiny_model("gemma2"), random_prompts(6))
    assert max((one - other).abs().max() for one, other in zip(native, tree, strict=True)) < 1e-4
    for compute in ("a16", "a8"):
        assert_as_near_as_the_module_tree(scheme, "phi3", compute, tiny_model, random_prompts(5))


def assert_as_near_as_the_module_tree(scheme, architecture, compute, tiny_model, prompts):
    """Both sides round activations to bf16 at other places, so they differ as bf16 does: their mean distance from the
    float32 model with the same weights, and under a8 with inputs rounded alike, is the measure, and the native step
    must not be the farther one."""

    def prepared(model):
        return model if scheme is None else quantized(model, SCHEMES[scheme], compute=compute)

    reference = logits_of(engine_on(prepared(tiny_model(architecture))), prompts)
    native, tree = both_ways(prepared(tiny_model(architecture).bfloat16()), prompts)
    assert distance(native, reference) <= 1.1 * distance(tree, reference)


@pytest.mark.parametrize("scheme", ["int8", "int4", "int4 with zero points", "int3 per channel"])
def test_under_a8_the_step_rounds_inputs_as_the_reference_does(scheme, tiny_model, random_prompts):
    """The step keeps float32 between its linears, and so does the reference: what is left between them is the head,
    which rounds to bf16. That is a fraction of what the rounding of inputs under a8 makes."""
    prompts = random_prompts(5)

    def logits(dtype, compute):
        model = quantized(tiny_model("llama").bfloat16().to(dtype), SCHEMES[scheme], compute=compute)
        engine = engine_on(model, kv_dtype="float32")
        assert engine.identity()["compute"] == compute
        assert engine.identity()["steps"] == "native" or dtype == torch.float32
        return logits_of(engine, prompts)

    rounded = logits(torch.float32, "a8")
    apart = distance(logits(torch.float32, "a16"), rounded)
    assert distance(logits(torch.bfloat16, "a8"), rounded) < apart / 3


def test_mixed_precision_shares_one_set_of_digits(tiny_model, random_prompts):
    model = quantized(tiny_model("llama").bfloat16(), Scheme(4, 16), skip=lambda name: "v_proj" in name or "up" in name)
    model = quantized(model, Scheme(8), skip=lambda name: "up" in name)
    native, tree = both_ways(model, random_prompts(5))
    assert max((a - b).abs().mean() for a, b in zip(native, tree, strict=True)) < 0.05


@pytest.mark.parametrize("count", [1, 3])
def test_linears_of_one_digit_of_two_and_of_none_share_an_input(count, tiny_model, random_prompts, threads):
    """Query 4-bit under a8, key int8 under a16, value dense; and gate and up likewise: each gets its own form."""

    def model(dtype):
        mixed = tiny_model("llama").to(dtype)
        mixed = quantized(
            mixed, Scheme(4, 32), skip=lambda name: not name.endswith(("q_proj", "gate_proj")), compute="a8"
        )
        mixed = quantized(mixed, Scheme(8), skip=lambda name: not name.endswith(("k_proj", "up_proj")))
        return quantized(mixed, Scheme(8), skip=lambda name: not name.endswith("o_proj"), compute="a8")

    threads(count)
    prompts = random_prompts(5)
    reference = logits_of(engine_on(model(torch.float32)), prompts)
    native, tree = both_ways(model(torch.bfloat16), prompts)
    assert distance(native, reference) <= 1.1 * distance(tree, reference)
    alone = engine_on(model(torch.bfloat16), max_prefill_chunk=1, max_num_seqs=1, prefix_caching=False)
    assert alone.identity()["steps"] == "native"
    assert distance(logits_of(alone, prompts), reference) <= 1.1 * distance(tree, reference)


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 72, "intermediate_size": 104, "vocab_size": 133}])
@pytest.mark.parametrize("scheme", [None, "int8", "int4 with zero points", "int8 activations", "mixed", "a8"])
def test_many_tokens_of_which_each_thread_takes_its_own(scheme, sizes, tiny_model, random_prompts, threads):
    def model(dtype):
        dense = tiny_model("llama", **sizes).to(dtype)
        if scheme == "mixed":
            return quantized(dense, Scheme(8), skip=lambda name: "v_proj" in name or "up" in name)
        if scheme is None:
            return dense
        if scheme == "a8":
            return quantized(dense, Scheme(4, -1 if sizes else 32), compute="a8")
        return quantized(dense, replace(SCHEMES[scheme], group_size=-1) if sizes else SCHEMES[scheme])

    prompts = [prompt for prompt in random_prompts(20) if len(prompt) > 1]
    assert sum(map(len, prompts)) > 400
    reference = logits_of(engine_on(model(torch.float32)), prompts)
    found = []
    for count in (1, 2, 3):
        threads(count)
        native, tree = both_ways(model(torch.bfloat16), prompts, max_batched_tokens=512, prefix_caching=False)
        assert distance(native, reference) <= 1.1 * distance(tree, reference)
        found.append(torch.cat(native))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_thread_takes_its_own_tokens_only_where_they_are_enough_to_add_alike(tiny_model, random_prompts, threads):
    """250 tokens are fewer than 24 for each of 16 threads."""
    prompts = [prompt for prompt in random_prompts(20) if len(prompt) > 1]
    model = tiny_model("llama", hidden_size=256, intermediate_size=512).bfloat16()
    found = []
    for count in (1, 16):
        threads(count)
        engine = engine_on(model, max_batched_tokens=250, prefix_caching=False)
        assert engine.identity()["steps"] == "native"
        found.append(torch.cat(logits_of(engine, prompts)))
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("compute", ["a16", "a8"])
@pytest.mark.parametrize("scheme", [None, "int8", "int4 with zero points", "int8 activations"])
def test_neither_threads_nor_companions_change_a_bit(scheme, compute, tiny_model, random_prompts, threads):
    model = tiny_model("qwen3").bfloat16()
    model = model if scheme is None else quantized(model, SCHEMES[scheme], compute=compute)
    prompts = random_prompts(9)
    # One token of each, below 24 in all, as in decode: more meet dense weights, or keys, in another order of summation.
    engine = engine_on(model, max_prefill_chunk=1, max_batched_tokens=23, max_num_seqs=8, prefix_caching=False)
    assert engine.identity()["steps"] == "native"
    threads(1)
    expected = logits_of(engine, prompts)
    for count in (2, 3, 5):
        threads(count)
        assert all(torch.equal(a, b) for a, b in zip(logits_of(engine, prompts), expected, strict=True))
    assert all(torch.equal(logits_of(engine, [p])[0], e) for p, e in zip(prompts, expected, strict=True))


@pytest.mark.parametrize("architecture", OTHERS)
def test_what_a_plan_cannot_say_runs_through_the_module_tree(architecture, tiny_model):
    identity = engine_on(tiny_model(architecture)).identity()
    assert identity["steps"].startswith("module tree: ")


@pytest.mark.parametrize("architecture", ["granite", "smollm3", "glm", "helium", "ernie4_5", "ministral3"])
def test_parts_with_a_llama_s_names_say_nothing_of_what_is_between_them(architecture, tiny_model):
    model = tiny_model(architecture, num_key_value_heads=2, head_dim=16)
    with pytest.raises(NotDescribed, match="ForCausalLM, whose forward was not read"):
        describe(model, probe(model).calls, 64)


def test_a_plan_that_computes_something_else_is_found_out(tiny_model, monkeypatch):
    """Layers with one more operation in their forward have the same parts; only their logits tell."""
    model = tiny_model("llama")
    kind = type(model.model.layers[1].mlp)
    plain = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: 0.5 * plain(self, x))
    identity = engine_on(model).identity()
    assert identity["steps"] == "module tree: its logits are not those of the module tree"


def test_a_hook_runs_with_the_module_that_it_hangs_on(tiny_model):
    model = tiny_model("llama")
    model.model.layers[1].mlp.down_proj.register_forward_hook(lambda module, args, output: 1.001 * output)
    assert engine_on(model).identity()["steps"] == "module tree: a hook on model.layers.1.mlp.down_proj"
    model = tiny_model("llama")
    layer = model.model.layers[0]
    layer.forward = layer.forward
    assert engine_on(model).identity()["steps"] == "module tree: a hook on model.layers.0"


def test_an_unknown_part_is_named(tiny_model):
    model = tiny_model("llama")
    model.model.layers[0].mlp.router = nn.Linear(4, 4)
    with pytest.raises(NotDescribed, match="LlamaMLP has router"):
        describe(model, probe(model).calls, 64)
    model = tiny_model("llama")
    model.model.layers[0].self_attn.register_buffer("sinks", torch.zeros(4))
    with pytest.raises(NotDescribed, match="LlamaAttention has sinks"):
        describe(model, probe(model).calls, 64)


class Halved(nn.Linear):
    def forward(self, input):
        return super().forward(input) / 2


def test_a_linear_of_a_class_of_its_own_stays_where_it_is(tiny_model):
    model = tiny_model("llama")
    model.lm_head.__class__ = Halved
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert engine_on(model).identity()["steps"] == "module tree: linears of type Halved"
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_is_what_it_does(dtype, tiny_model):
    llama = type(tiny_model("llama").model.norm)(4096, eps=1e-6).to(dtype)
    gemma = type(tiny_model("gemma").model.norm)(4096, eps=1e-6).to(dtype)
    for size in (0.5, 20.0, 80.0):
        for norm, excess in ((llama, 0.0), (gemma, 1.0)):
            norm.weight.data = (torch.randn(4096) + size).to(dtype)
            assert torch.equal(norm_of(norm).weight, norm.weight.float() + excess)
    with pytest.raises(NotDescribed, match="LayerNorm is not a root-mean-square norm"):
        norm_of(nn.LayerNorm(4096, bias=False).to(dtype))


def test_an_activation_is_recognised_by_all_that_it_does():
    x, recognised = torch.linspace(-100, 100, 4001), set()
    for name in ACT2CLS:
        try:
            found = activation_of(ACT2FN[name])
        except NotDescribed:
            continue
        recognised.add(found)
        assert torch.allclose(ACT2FN[name](x), ACTIVATIONS[found](x), atol=1e-5), name
    assert recognised == set(ACTIVATIONS)


def test_relu_does_not_swallow_what_is_not_a_number(tiny_model):
    model = tiny_model("llama", hidden_act="relu")
    engine = engine_on(model)
    assert engine.identity()["steps"] == "native"
    model.model.layers[1].mlp.gate_proj.weight.data[3] = torch.nan
    [completion] = engine.generate([[1, 2, 3]], PARAMS)
    assert completion.finish_reason == "error"


def test_steps_beyond_the_native_ones_are_named(tiny_model):
    assert engine_on(tiny_model("llama"), max_batched_tokens=4096).identity()["steps"].startswith("native up to 2048")


@pytest.mark.parametrize("options", [{"max_model_len": 3}, {"num_blocks": 1, "block_size": 2}])
def test_a_context_shorter_than_the_probe(options, tiny_model):
    engine = engine_on(tiny_model("llama"), **options)
    assert engine.identity()["steps"] == "native"
    assert len(engine.generate([[1]], SamplingParams(max_tokens=1))[0].token_ids) == 1


def test_two_engines_on_one_model(tiny_model, random_prompts):
    """The second moves the weights once more; the first keeps what it points to."""
    model, prompts = tiny_model("llama"), random_prompts(5)
    first = engine_on(model)
    expected = first.generate(prompts, PARAMS)
    second = engine_on(model)
    for engine in (first, second):
        assert [c.token_ids for c in engine.generate(prompts, PARAMS)] == [c.token_ids for c in expected]


def test_structs_lie_as_they_do_in_cpp(tmp_path):
    """A field added, moved or widened on one side only would be read from its neighbour."""
    twins = {
        "paged::Step": native_attention.Tables,
        "paged::Shape": native_attention.Shape,
        "paged::Cache": native_attention.Cache,
        "step::Linear": decoder_step._Linear,
        "step::Norm": decoder_step._Norm,
        "step::Layer": decoder_step._Layer,
        "step::Model": decoder_step._Model,
    }
    lines = [f'#include "{decoder_step.SOURCE}"', "#include <cstddef>"]
    for name, twin in twins.items():
        lines.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(twin)});")
        for field, *_ in twin._fields_:
            place = getattr(twin, field)
            lines.append(f"static_assert(offsetof({name}, {field}) == {place.offset});")
            lines.append(f"static_assert(sizeof({name}::{field}) == {place.size});")
    source = tmp_path / "layout.cpp"
    source.write_text("\n".join(lines) + "\n")
    command = [native_compiler(), "-fsyntax-only", "-std=c++17", "-fopenmp", "-march=native", "-w", str(source)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not found.returncode, found.stderr


def test_weights_are_held_once(tiny_model):
    model = tiny_model("llama")
    engine = engine_on(model)
    kept = {tensor.data_ptr() for tensor in engine._runner.native._kept}
    assert {p.data_ptr() for n, p in model.named_parameters() if "proj" in n} <= kept
