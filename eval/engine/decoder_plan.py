"""What a decoder is made of, read off its module tree: norms, projections, rotary tables, activation, caps.

The one idea: the names that transformers gives to the parts of a Llama-like decoder say what is where, and what a part
does is found by trying it (a norm on a random row, an activation on a line). What happens between the parts no part
shows, so it is taken from architectures whose forwards were read. Whatever is not understood ends in `NotDescribed`;
whoever uses a plan proves it against the module tree's own logits first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from eval.engine.attention import LayerCall

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "relu": functional.relu,
}
READ = {
    f"transformers.models.{name}.modeling_{name}"
    for name in (
        "gemma",
        "gemma2",
        "gemma3",
        "llama",
        "ministral",
        "mistral",
        "phi3",
        "qwen2",
        "qwen3",
        "seed_oss",
    )
}
"""Whose forwards were read. Others have the same parts and multiply residuals (Granite), leave the rotary embedding out
of some layers (SmolLM3), pair its dimensions in another way (GLM, Helium, Ernie), or scale queries by their position
(Ministral 3), of which eight tokens' logits in bfloat16 may show nothing."""
CHANGING_ROTARY = ("dynamic", "longrope")
"""Rotary kinds whose table depends on how long the text is."""


class NotDescribed(Exception):
    """This decoder has a part that a plan cannot say; the message names it."""


@dataclass(frozen=True)
class Norm:
    """x / sqrt(mean(x^2) + eps) * weight, weight float32."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class LayerPlan:
    """One layer. `qkv` and `gate_up`: one linear or several, whose outputs lie side by side in that order. `cos` and
    `sin` float32 [positions, rotary / 2]."""

    qkv: list[nn.Module]
    output: nn.Module
    gate_up: list[nn.Module]
    down: nn.Module
    activation: str
    before_attention: Norm
    after_attention: Norm | None
    before_mlp: Norm
    after_mlp: Norm | None
    query_norm: Norm | None
    key_norm: Norm | None
    cos: torch.Tensor
    sin: torch.Tensor
    heads: int
    call: LayerCall


@dataclass(frozen=True)
class DecoderPlan:
    layers: list[LayerPlan]
    final_norm: Norm
    head: nn.Module
    softcap: float

    @property
    def linears(self) -> list[nn.Module]:
        """In the order in which a step reads them."""
        return [m for one in self.layers for m in (*one.qkv, one.output, *one.gate_up, one.down)] + [self.head]


def describe(model: PreTrainedModel, calls: Sequence[LayerCall], positions: int) -> DecoderPlan:
    """The plan of a model whose attention layers asked for `calls`; rotary tables for `positions` positions. Raises
    NotDescribed."""
    for name, module in model.named_modules():
        if does_more_than_its_class(module):
            raise NotDescribed(f"a hook on {name or type(model).__name__}")
    config = model.config.get_text_config()
    base = model.base_model
    layers, final, head = getattr(base, "layers", None), getattr(base, "norm", None), model.get_output_embeddings()
    if not isinstance(layers, nn.ModuleList) or final is None or head is None:
        raise NotDescribed(f"{type(base).__name__} is not embeddings, layers, norm and head")
    only(model, {"model", "lm_head"})
    only(base, {"embed_tokens", "layers", "norm", "rotary_emb"})
    kinds = getattr(config, "layer_types", None) or [None] * len(layers)
    tables = {kind: rotary_table(base, kind, positions) for kind in set(kinds)}
    by_layer = {call.layer: call for call in calls}
    plans = [
        describe_layer(layer, by_layer[index], tables[kinds[index]], config.num_attention_heads)
        for index, layer in enumerate(layers)
    ]
    return DecoderPlan(plans, norm_of(final), head, float(getattr(config, "final_logit_softcapping", None) or 0.0))


def describe_layer(
    layer: nn.Module, call: LayerCall, table: tuple[torch.Tensor, torch.Tensor], heads: int
) -> LayerPlan:
    attention, mlp = part(layer, "self_attn"), part(layer, "mlp")
    only(attention, {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm"})
    only(mlp, {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn", "activation_fn"})
    # Gemma 2 and 3 norm both sides of attention and MLP, one under the name that elsewhere is the norm before the MLP.
    on_both_sides = hasattr(layer, "pre_feedforward_layernorm")
    names = ["input_layernorm", "post_attention_layernorm"]
    if on_both_sides:
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    norms = [norm_of(part(layer, name)) for name in names]
    only(layer, {"self_attn", "mlp", *names})
    fused = hasattr(attention, "qkv_proj")
    qkv = [part(attention, name) for name in (("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj"))]
    gates = ("gate_up_proj",) if hasattr(mlp, "gate_up_proj") else ("gate_proj", "up_proj")
    cos, sin = table
    return LayerPlan(
        qkv=qkv,
        output=part(attention, "o_proj"),
        gate_up=[part(mlp, name) for name in gates],
        down=part(mlp, "down_proj"),
        activation=activation_of(part(mlp, "act_fn" if hasattr(mlp, "act_fn") else "activation_fn")),
        before_attention=norms[0],
        after_attention=norms[1] if on_both_sides else None,
        before_mlp=norms[2] if on_both_sides else norms[1],
        after_mlp=norms[3] if on_both_sides else None,
        query_norm=head_norm(attention, "q_norm", call.head_dim),
        key_norm=head_norm(attention, "k_norm", call.head_dim),
        cos=cos,
        sin=sin,
        heads=heads,
        call=call,
    )


def does_more_than_its_class(module: nn.Module) -> bool:
    """Whether somebody hung a hook on this module, or gave it a forward of its own."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def only(module: nn.Module, known: set[str]) -> None:
    """The module's forward was read, and there is nothing in it that is not known, dropout and the like left out."""
    unknown = [
        name
        for name, child in module.named_children()
        if name not in known and not isinstance(child, nn.Dropout | nn.Identity)
    ]
    unknown += [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
    if unknown:
        raise NotDescribed(f"{type(module).__name__} has {', '.join(unknown)}")
    if type(module).__module__ not in READ:
        raise NotDescribed(f"{type(module).__name__}, whose forward was not read")


def part(module: nn.Module, name: str) -> nn.Module:
    found = getattr(module, name, None)
    if not isinstance(found, nn.Module):
        raise NotDescribed(f"{type(module).__name__} has no {name}")
    return found


def norm_of(module: nn.Module) -> Norm:
    """The root-mean-square norm that a module is, its weight as it is or with one added (Gemma)."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or not isinstance(eps, float) or getattr(module, "bias", None) is not None:
        raise NotDescribed(f"{type(module).__name__} is not a root-mean-square norm")
    # Around 1, since a norm that takes the mean off changes a long row around 0 by next to nothing.
    row = 1 + torch.randn(weight.shape[0], generator=torch.Generator().manual_seed(0))
    given = row.to(weight.dtype)
    with torch.inference_mode():
        found = module(given[None])[0].float()
    plain = given.float() * torch.rsqrt(given.float().square().mean() + eps)
    # Of large weights both are within the bound: the nearer one is meant.
    error, factor = min(
        (((found - plain * factor).norm().item(), factor) for factor in (weight.float(), weight.float() + 1)),
        key=lambda pair: pair[0],
    )
    if not error <= 0.02 * found.norm().item() or not found.any():
        raise NotDescribed(f"{type(module).__name__} is not a root-mean-square norm")
    return Norm(factor.contiguous(), eps)


def head_norm(attention: nn.Module, name: str, head_dim: int) -> Norm | None:
    if not hasattr(attention, name) or isinstance(getattr(attention, name), nn.Identity):
        return None
    norm = norm_of(part(attention, name))
    if norm.weight.shape[0] != head_dim:
        raise NotDescribed(f"{type(attention).__name__}.{name} does not norm head by head")
    return norm


def activation_of(module: nn.Module) -> str:
    # Long enough for those that are cut off somewhere (relu6, gelu_10).
    line = torch.linspace(-24, 24, 385)
    with torch.inference_mode():
        found = module(line)
    for name, function in ACTIVATIONS.items():
        if torch.allclose(found, function(line), atol=1e-6):
            return name
    raise NotDescribed(f"the activation {type(module).__name__}")


def rotary_table(base: nn.Module, kind: str | None, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [positions, rotary / 2], for layers of one kind."""
    rotary = part(base, "rotary_emb")
    types = getattr(rotary, "rope_type", "default")
    if set(types.values() if isinstance(types, dict) else [types]) & set(CHANGING_ROTARY):
        raise NotDescribed(f"rotary embeddings of type {types}")
    ids = torch.arange(positions)[None]
    row = torch.zeros(1, 1, 1)
    with torch.inference_mode():
        cos, sin = rotary(row, ids, kind) if isinstance(types, dict) else rotary(row, ids)
    half = cos.shape[-1] // 2
    if not torch.equal(cos[..., :half], cos[..., half:]) or not torch.equal(sin[..., :half], sin[..., half:]):
        raise NotDescribed("rotary embeddings whose halves differ")
    return cos[0, :, :half].float().contiguous(), sin[0, :, :half].float().contiguous()
