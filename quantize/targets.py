"""Which linears are quantized, and how each: decided and checked against every shape before any calibration.

A group size that does not divide some target's inputs is an error here, seconds into the run, and never a padded or
skipped module found out later.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn

from quantize.checkpoint import Checkpoint
from quantize.decoder import Decoder
from quantize.errors import QuantizeError
from quantize.formats.choose import refuse_misfits
from quantize.formats.compressed_tensors import METHOD
from quantize.recipe import AUTO_GROUP_SIZES, Recipe
from quantize.scheme import Scheme


@dataclass(frozen=True)
class Targets:
    """`schemes` by full module name, in module order; `ignored` are the linears that keep their weights. unties: the
    head is quantized though it was the embedding's own tensor, named by `tied_to`."""

    schemes: Mapping[str, Scheme]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]
    unties: bool
    tied_to: str

    def in_layer(self, prefix: str) -> dict[str, Scheme]:
        return {name: scheme for name, scheme in self.schemes.items() if name.startswith(prefix)}

    def outside_layers(self, layers_prefix: str) -> dict[str, Scheme]:
        return {name: scheme for name, scheme in self.schemes.items() if not name.startswith(layers_prefix + ".")}


def choose_targets(decoder: Decoder, recipe: Recipe, checkpoint: Checkpoint) -> Targets:
    """Raises QuantizeError when a group size does not divide, when nothing is left to quantize, and when an override or
    an ignore pattern that the user wrote matches nothing."""
    linears: dict[str, nn.Linear] = {}
    for index in range(len(decoder.layers)):
        linears.update(decoder.layer_linears(index))
    head = {name: module for name, module in decoder.outer_linears().items() if is_head(module, decoder)}
    others = [name for name in decoder.outer_linears() if name not in head]
    for index in range(len(decoder.layers)):
        others += decoder.layer_gates(index)
    linears.update(head)
    refuse_embedding_overrides(recipe, decoder)
    refuse_idle_overrides(recipe, linears)
    refuse_idle_ignores(recipe, [*linears, *others])
    chosen = {name: module for name, module in linears.items() if not recipe.skips(name)}
    if not chosen:
        raise QuantizeError(f"{checkpoint.path}: the recipe's ignore and overrides leave nothing to quantize")
    auto, note = auto_group_size({name: module.in_features for name, module in chosen.items()}, recipe)
    schemes = {name: recipe.scheme_of(name, auto) for name in chosen}
    expert_notes = (
        fit_experts(decoder, schemes) if recipe.format == METHOD else who_loads_experts(decoder, schemes, recipe.format)
    )
    refuse_odd_groups({name: module.in_features for name, module in chosen.items()}, schemes)
    shapes = {name: (module.out_features, module.in_features) for name, module in chosen.items()}
    refuse_misfits(schemes, shapes, head, recipe.format)
    for name in head:
        if name in schemes and f"{name}.weight" not in checkpoint.files and not decoder.head_is_tied():
            raise QuantizeError(f"{checkpoint.path}: has no tensor {name}.weight to quantize; put {name} into ignore")
    unties = decoder.head_is_tied() and any(name in schemes for name in head)
    notes = [*([note] if note else []), *expert_notes]
    embedding = embedding_name(decoder)
    if unties:
        shape = checkpoint.shape(embedding)
        bits = next(schemes[name].bits for name in head if name in schemes)
        cost = shape[0] * shape[1] * bits // 8
        notes.append(f"the head was tied to {embedding} and is stored beside it now: about {cost} bytes more")
    ignored = (*(name for name in linears if name not in schemes), *others)
    return Targets(schemes, ignored, tuple(notes), unties, embedding)


def who_loads_experts(decoder: Decoder, schemes: Mapping[str, Scheme], form: str) -> list[str]:
    mixtures = tuple(f"{path}." for index in range(len(decoder.layers)) for path in decoder.layer_experts(index))
    chosen = any(name.startswith(mixtures) for name in schemes)
    return [f"transformers 5.17 does not load experts in {form}; vLLM and quantgate do"] if chosen else []


def fit_experts(decoder: Decoder, schemes: dict[str, Scheme]) -> list[str]:
    """Brings the experts' schemes into what can be run elsewhere, and says what cannot be.

    transformers and vLLM run a layer's experts as one fused tensor. transformers 5.17 dequantizes them while it loads
    (`DecompressExperts`): it knows packed symmetric weights of a single scheme for the whole model, and neither zero
    points nor quantized inputs. So zero points are refused, inputs stay as they are, and other mixtures are noted.
    """
    mixtures = [path for index in range(len(decoder.layers)) for path in decoder.layer_experts(index)]
    inside = tuple(f"{path}." for path in mixtures)
    experts = [
        name for index in range(len(decoder.layers)) for name in decoder.layer_linears(index) if name.startswith(inside)
    ]
    chosen = [name for name in experts if name in schemes]
    notes = []
    odd = next((name for name in chosen if not schemes[name].symmetric), None)
    if odd is not None:
        raise QuantizeError(
            f"symmetric: {odd}: transformers and vLLM take experts without zero points only; "
            "use symmetric: true, or an override with it for the experts"
        )
    if any(schemes[name].activations for name in chosen):
        for name in chosen:
            schemes[name] = replace(schemes[name], activations=None)
        notes.append(
            "experts take their inputs unrounded: transformers runs them as one tensor, without int8 activations"
        )
    if experts and (len(chosen) < len(experts) or len({schemes[name] for name in chosen}) > 1):
        notes.append(
            "the experts are not all in one scheme: transformers 5.17 does not load that, "
            "and vLLM only where every layer's experts are; quantgate does"
        )
    return notes


def is_head(module: nn.Module, decoder: Decoder) -> bool:
    return module is decoder.model.get_output_embeddings()


def embedding_name(decoder: Decoder) -> str:
    embedding = decoder.model.get_input_embeddings()
    return next(f"{name}.weight" for name, module in decoder.model.named_modules() if module is embedding)


def refuse_embedding_overrides(recipe: Recipe, decoder: Decoder) -> None:
    """compressed-tensors 0.19 can say a quantized embedding, but what loads it is not there: transformers 5.17 fails on
    packed ones (its `_init_weights` reads their absent `weight`), and plain int8 ones break a tied head."""
    name = embedding_name(decoder).removesuffix(".weight")
    if any(override.pattern == name and not override.skip for override in recipe.overrides):
        raise QuantizeError(
            f"overrides: {name}: embeddings keep their weights, since transformers does not load packed ones; "
            "only linears can be quantized, the head (lm_head) among them"
        )


def refuse_idle_overrides(recipe: Recipe, linears: Mapping[str, nn.Linear]) -> None:
    for override in recipe.overrides:
        if not any(recipe.override_of(name) is override for name in linears):
            raise QuantizeError(
                f"overrides: {override.pattern}: decides for no linear; linears are named as {next(iter(linears))}"
            )


def refuse_idle_ignores(recipe: Recipe, names: Sequence[str]) -> None:
    """The default may match nothing: not every head has its name."""
    for pattern in recipe.ignore:
        if pattern not in Recipe.ignore and not any(fnmatchcase(name, pattern) for name in names):
            raise QuantizeError(f"ignore: {pattern}: matches no linear; linears are named as {names[0]}")


def auto_group_size(inputs: Mapping[str, int], recipe: Recipe) -> tuple[int, str | None]:
    """The largest of 128, 64 and 32 that divides the inputs of every target without a group of its own; and, where it
    is in use, a sentence that says which and why."""
    waiting = {name: width for name, width in inputs.items() if needs_group(name, recipe)}
    if not waiting:
        return AUTO_GROUP_SIZES[0], None
    for size in AUTO_GROUP_SIZES:
        odd = next((name for name, width in waiting.items() if width % size), None)
        if odd is None:
            larger = AUTO_GROUP_SIZES[AUTO_GROUP_SIZES.index(size) - 1]
            blocker = next((name for name, width in waiting.items() if width % larger), None)
            if size == AUTO_GROUP_SIZES[0] or blocker is None:
                return size, f"group size {size}: it divides every target"
            return size, f"group size {size}: {larger} does not divide the {waiting[blocker]} inputs of {blocker}"
    raise QuantizeError(
        f"group_size: none of 128, 64 and 32 divides the {waiting[odd]} inputs of {odd}; "  # type: ignore[index]
        "use -1 (per channel), another group_size, or an override for it"
    )


def needs_group(name: str, recipe: Recipe) -> bool:
    # Whatever stands in for the missing size comes back as it is only where none was named.
    return recipe.scheme_of(name, 7).group_size == 7 and recipe.scheme_of(name, 9).group_size == 9


def refuse_odd_groups(inputs: Mapping[str, int], schemes: Mapping[str, Scheme]) -> None:
    odd = [name for name, scheme in schemes.items() if not scheme.divides(inputs[name])]
    if not odd:
        return
    first = odd[0]
    size = schemes[first].group_size
    fitting = [str(other) for other in AUTO_GROUP_SIZES if all(inputs[name] % other == 0 for name in odd)]
    more = f" (and of {len(odd) - 1} more modules)" if len(odd) > 1 else ""
    remedy = " or ".join([*fitting, "-1 (per channel)"])
    raise QuantizeError(f"group_size: {size} does not divide the {inputs[first]} inputs of {first}{more}; use {remedy}")
