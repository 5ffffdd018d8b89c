"""Gives a model the module tree of its checkpoint.

Some models run under other names than they are stored under, and run a layer's experts as one tensor. transformers
knows how the names correspond; from that, modules get the names that their tensors have on disk, and fused experts
become linears, so that one name means one thing in the checkpoint, the recipe, the manifest and the model.
"""

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from quantize.experts import SplitExperts, is_splittable


def shape_as_stored(model: PreTrainedModel, stored: Iterable[str]) -> None:
    """Renames modules inside the layers and splits fused experts after the tensor names `stored`. What it cannot bring
    into that shape stays as it is."""
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    own = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    experts: dict[str, dict[str, list[str]]] = {}
    renamed: dict[str, str] = {}
    for name in stored:
        if name in own:
            continue
        place, pattern = rename_source_key(name, renamings, converters)
        if place not in own:
            continue
        path, _, leaf = place.rpartition(".")
        stored_path = name.rpartition(".")[0]
        if pattern is not None:
            converter = next(converter for converter in converters if pattern in converter.source_patterns)
            if not merges_experts(converter) or not is_splittable(model.get_submodule(path)):
                continue
            stored_path, _index, _projection = stored_path.rsplit(".", 2)
            experts.setdefault(path, {})[leaf] = [
                source.removesuffix(".weight").rpartition(".")[2] for source in converter.source_patterns
            ]
        elif not name.endswith(f".{leaf}"):
            continue
        renamed.update(differing_names(path, stored_path))
    for path, projections in experts.items():
        if len(projections) == 2:
            split = SplitExperts(model.get_submodule(path), projections["gate_up_proj"], projections["down_proj"][0])
            model.set_submodule(path, split)
    # Deepest first, so that the paths above still hold.
    for path in sorted(renamed, key=lambda path: -path.count(".")):
        rename_module(model, path, renamed[path])


def older_names(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """The tensors of `model` that are stored under another name only (GPT-NeoX's head is `embed_out`): the model's name
    to the stored one."""
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    own = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    stored = set(stored)
    renamed = {rename_source_key(name, renamings, [])[0]: name for name in stored - own}
    return {name: old for name, old in renamed.items() if name in own - stored}


def merges_experts(converter: WeightConverter) -> bool:
    """Whether a conversion stacks one tensor per expert, and at most puts such stacks beside one another."""
    first, *rest = converter.operations
    return (
        isinstance(first, MergeModulelist)
        and first.dim == 0
        and (not rest or (len(rest) == 1 and isinstance(rest[0], Concatenate) and rest[0].dim == 1))
    )


def differing_names(path: str, stored_path: str) -> dict[str, str]:
    """The modules on the way to `path` that are called otherwise on disk, by their path. Names outside numbered lists
    (the head, the base model) are those that the rest of the world uses, and stay."""
    parts, stored_parts = path.split("."), stored_path.split(".")
    if len(parts) != len(stored_parts):
        return {}
    return {
        ".".join(parts[: depth + 1]): stored_part
        for depth, (part, stored_part) in enumerate(zip(parts, stored_parts, strict=True))
        if part != stored_part and any(parent.isdigit() for parent in parts[:depth])
    }


def rename_module(model: nn.Module, path: str, new: str) -> None:
    """The module keeps its place in its parent, and its old name as an attribute, by which the parent's forward calls
    it."""
    above, _, old = path.rpartition(".")
    parent = model.get_submodule(above)
    module = parent._modules[old]
    if new in parent._modules:
        return
    children = [(new if name == old else name, child) for name, child in parent._modules.items()]
    parent._modules.clear()
    parent._modules.update(children)
    object.__setattr__(parent, old, module)
