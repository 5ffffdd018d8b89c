"""From a checkpoint to a quantized one, layer by layer from disk: the walk, the journal, the shards and the checks.

A layer's shard depends only on the source, the recipe, the calibration and the layers before it, so that a run killed
anywhere goes on at the next layer and ends with the same bytes. What is in memory at a time: one layer, and the
calibration states.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quantize.atomic import atomic_directory, one_line_os_errors, refuse_existing, refuse_unwritable, write_atomically
from quantize.bnb import quantize_with_bitsandbytes
from quantize.calibration import Calibration, calibrate, rarity
from quantize.checkpoint import CONFIG, INDEX, Checkpoint, refuse_nonfinite
from quantize.companions import copy_companions
from quantize.decoder import Decoder, linears_of, load_module, open_decoder, refuse_shared_keys
from quantize.errors import QuantizeError
from quantize.experts import SplitExperts, for_every_expert, with_one_expert
from quantize.external.run import quantize_externally
from quantize.fingerprint import fingerprint, finished_before, versions
from quantize.formats.choose import FORMATS, Format
from quantize.formats.half import refuse_large_weight
from quantize.gram import InputRecorder
from quantize.heap import return_freed_memory
from quantize.journal import Entry, Journal, file_digest
from quantize.layer import QuantizedModule, quantize_layer, round_module
from quantize.manifest import MANIFEST, Manifest, ModuleRecord, too_few_tokens
from quantize.method import SMOOTHQUANT
from quantize.methods.fusion import Fusion, find_fusions
from quantize.progress import Progress, silent
from quantize.recipe import RARITY, Recipe
from quantize.scheme import QuantizedWeight, Scheme, dequantize
from quantize.targets import Targets, choose_targets
from quantize.walk import Walk, float32_copy


@dataclass
class Work:
    """Everything that stays the same from layer to layer, and the walk, once something has needed it."""

    checkpoint: Checkpoint
    decoder: Decoder
    recipe: Recipe
    targets: Targets
    calibration: Calibration | None
    folder: Path
    device: torch.device
    walk: Walk | None = None
    fusions: dict[tuple[str, ...], tuple[Fusion, ...]] = field(default_factory=dict)

    @property
    def format(self) -> Format:
        return FORMATS[self.recipe.format]

    @property
    def files(self) -> list[str]:
        """One shard per layer, in order, and one for all the rest."""
        count = len(self.decoder.layers) + 1
        return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def quantize_checkpoint(
    source: Path | str,
    recipe: Recipe,
    out: Path | str,
    *,
    calibration: Path | None = None,
    device: str | None = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Writes the quantized checkpoint OUT and returns its manifest. Run again after a kill, it goes on where it was;
    run again when OUT holds the result of the same work, it does nothing.

    calibration: a JSONL file; default the text shipped with the package. device: where the layers are computed, default
    CUDA when there is one. replace: the result of other work in OUT gives way at the end; otherwise it is an error, and
    so is always a folder that no run of this function made. Raises QuantizeError, one line, for everything that the
    user can set right.
    """
    begin = time.perf_counter()
    tell = progress or silent
    checkpoint = Checkpoint.open(source, quantized_ok=False)
    if recipe.plan.external is not None:
        return quantize_externally(checkpoint, recipe, Path(out), calibration, replace, tell)
    if recipe.plan.is_bitsandbytes:
        return quantize_with_bitsandbytes(checkpoint, recipe, Path(out), replace, tell)
    decoder = open_decoder(checkpoint)
    if recipe.plan.scaling:
        refuse_shared_keys(decoder, recipe.method)
    targets = choose_targets(decoder, recipe, checkpoint)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    steps = len(decoder.layers) + 1
    tell("checking the source", 0, steps)
    source_digest = checkpoint.weights_digest(checks_of_weights(checkpoint, targets, recipe.format))
    text = calibrate(checkpoint, recipe, calibration) if recipe.plan.is_calibrated else None
    identity = fingerprint(checkpoint, recipe, text, place, source_digest)
    with one_line_os_errors(Path(out)):
        finished = finished_before(Path(out), identity)
        if finished is not None:
            return finished
        replace = replace and (Path(out) / MANIFEST).is_file()
    with atomic_directory(Path(out), resumable=True, replace=replace) as folder:
        work = Work(checkpoint, decoder, recipe, targets, text, folder, place)
        journal = Journal.resume(folder, identity)
        for step, file in enumerate(work.files):
            last = step == steps - 1
            tell("embeddings and head" if last else f"{recipe.method} layer {step + 1}", step, steps)
            if step < len(journal.entries):
                if not last:
                    replay_layer(work, step, journal.entries[step], needed=len(journal.entries) < steps - 1)
                continue
            tensors, modules = finish_rest(work) if last else finish_layer(work, step)
            journal = journal.record(write_shard(folder, file, tensors, modules))
            del tensors
            return_freed_memory()
        manifest = finish_checkpoint(work, journal, source_digest, identity, begin)
        journal.close()
    tell("done", steps, steps)
    return manifest


def checks_of_weights(checkpoint: Checkpoint, targets: Targets, form: str) -> Callable[[str, torch.Tensor], None]:
    """A visitor for `weights_digest` that refuses what no method could quantize into the format."""
    refuse = refuse_nonfinite(checkpoint)

    def visit(name: str, tensor: torch.Tensor) -> None:
        refuse(name, tensor)
        scheme = targets.schemes.get(name.removesuffix(".weight"))
        if FORMATS[form].is_half and scheme is not None and name.endswith(".weight"):
            largest = max(abs(extreme) for extreme in torch.stack(tensor.aminmax()).tolist())
            refuse_large_weight(name, largest, scheme, form)

    return visit


def refuse_wrong_out(out: Path | str) -> None:
    """What `quantize_checkpoint` would say of OUT, for those who compute something else first. The result of an earlier
    run is left for it to judge. Raises QuantizeError."""
    with one_line_os_errors(Path(out)):
        if not (Path(out) / MANIFEST).is_file():
            refuse_existing(Path(out), QuantizeError)
    refuse_unwritable(Path(out))


def started_walk(work: Work) -> Walk:
    if work.walk is None:
        assert work.calibration is not None
        token_ids = work.calibration.token_ids
        importance = rarity(token_ids) if work.recipe.token_importance == RARITY else None
        work.walk = Walk(work.decoder, work.checkpoint, token_ids, work.device, importance)
    return work.walk


def finish_layer(work: Work, index: int) -> tuple[dict[str, torch.Tensor], tuple[ModuleRecord, ...]]:
    """The tensors of one layer as they are stored, by full name, and the records of its quantized linears."""
    prefix = work.decoder.layer_prefix(index)
    schemes = {name.removeprefix(prefix): scheme for name, scheme in work.targets.in_layer(prefix).items()}
    if work.recipe.plan.is_calibrated:
        results, changed = calibrated_layer(work, index, schemes)
    else:
        weights = {name: work.checkpoint.tensor(f"{prefix}{name}.weight").to(work.device) for name in schemes}
        results, changed = {name: rounded(work, weights[name], scheme) for name, scheme in schemes.items()}, {}
    tensors: dict[str, torch.Tensor] = {}
    records = []
    for name, result in results.items():
        stored = work.format.pack(prefix + name, result.quantized)
        tensors.update(stored)
        records.append(result.record(prefix + name, stored))
    for name in work.checkpoint.tensor_names:
        local = name.removeprefix(prefix)
        if name.startswith(prefix) and local.removesuffix(".weight") not in schemes:
            tensors[name] = changed[local] if local in changed else work.checkpoint.tensor(name)
    return tensors, tuple(records)


def rounded(work: Work, weight: torch.Tensor, scheme: Scheme, fallback: str | None = None) -> QuantizedModule:
    return round_module(weight, scheme, work.format.scale_dtype(weight.dtype), work.format, fallback)


def calibrated_layer(
    work: Work, index: int, schemes: Mapping[str, Scheme]
) -> tuple[dict[str, QuantizedModule], dict[str, torch.Tensor]]:
    """One layer through a method that looks at its inputs, and the walk's states past it.

    A sequential method sees the states that quantized layers produce, and its own quantized weights produce the next
    ones. The others, as in their papers, see the states of the original model: they compensate nothing, so one pass per
    layer is enough. Nobody needs what the last layer puts out.
    """
    walk, plan = started_walk(work), work.recipe.plan
    layer = work.decoder.layers[index]
    load_module(work.decoder, layer, work.decoder.layer_prefix(index), work.checkpoint, work.device)
    recorder = InputRecorder(linears_of(layer), walk.sampled_every if plan.scaling == SMOOTHQUANT else None)
    try:
        fusions = proved_fusions(work, walk, index, layer) if plan.scaling else ()
        is_last = index + 1 == len(work.decoder.layers)
        if plan.is_sequential or is_last:
            walk.observe(index, layer, recorder)
        else:
            walk.advance(index, layer, recorder)
        return_freed_memory()
        with torch.inference_mode():
            results, changed = quantize_layer(
                layer, schemes, recorder.grams(), recorder.samples(), recorder.tokens(), fusions, work.recipe
            )
        if plan.is_sequential and not is_last:
            for name, result in results.items():
                put_weight(layer, name, result.quantized)
            walk.advance(index, layer)
    finally:
        layer.to("meta")
    return results, changed


def proved_fusions(work: Work, walk: Walk, index: int, layer: nn.Module) -> tuple[Fusion, ...]:
    """Where scales may be moved: proved in float32 on the first layer with these linears, for all that have them (a
    mixture may follow on dense layers)."""
    structure = tuple(linears_of(layer))
    if structure not in work.fusions:
        exact, probe = float32_copy(layer), walk.probe.float()
        recorder = InputRecorder(linears_of(exact))
        mixtures = {name: module for name, module in exact.named_modules() if isinstance(module, SplitExperts)}

        def run(candidate: nn.Module) -> torch.Tensor:
            return walk.run_layer(index, candidate, probe)

        with recorder.watching():
            run(exact)
        proved = find_fusions(exact, run, with_one_expert(recorder.leader, mixtures), work.recipe.seed)
        work.fusions[structure] = for_every_expert(proved, mixtures)
    return work.fusions[structure]


def put_weight(layer: nn.Module, name: str, quantized: QuantizedWeight) -> None:
    """The linear with its quantized weight, in the dtype and on the device of the weight that it had."""
    module = layer.get_submodule(name)
    assert isinstance(module, nn.Linear)
    before = module.weight
    weight = dequantize(quantized, before.dtype).to(before.device)
    module.weight = nn.Parameter(weight, requires_grad=False)


def replay_layer(work: Work, index: int, entry: Entry, needed: bool) -> None:
    """Brings the states past a layer that an earlier run finished, with the very weights that it continued with."""
    if not needed or not work.recipe.plan.is_calibrated:
        return
    walk = started_walk(work)
    layer = work.decoder.layers[index]
    prefix = work.decoder.layer_prefix(index)
    load_module(work.decoder, layer, prefix, work.checkpoint, work.device)
    if work.recipe.plan.scaling:
        proved_fusions(work, walk, index, layer)
    if work.recipe.plan.is_sequential:
        put_stored_layer(work, layer, prefix, entry)
    walk.advance(index, layer)
    layer.to("meta")


def put_stored_layer(work: Work, layer: nn.Module, prefix: str, entry: Entry) -> None:
    """What was stored of a layer in the place of what it came from: the quantized linears, and what took their
    scales."""
    stored = load_file(work.folder / entry.file)
    for record in entry.modules:
        own = {
            name.removeprefix(f"{record.name}."): tensor
            for name, tensor in stored.items()
            if name.startswith(f"{record.name}.")
        }
        quantized = work.format.unpack(own, work.targets.schemes[record.name])
        put_weight(layer, record.name.removeprefix(prefix), quantized)
    quantized_weights = {f"{record.name}.weight" for record in entry.modules}
    for name, _ in list(layer.named_parameters()):
        if prefix + name in stored.keys() - quantized_weights:
            owner, _, leaf = name.rpartition(".")
            tensor = stored[prefix + name].to(work.device)
            layer.get_submodule(owner)._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)


def finish_rest(work: Work) -> tuple[dict[str, torch.Tensor], tuple[ModuleRecord, ...]]:
    """All tensors outside the layers; a targeted head is rounded to nearest and, where it was tied, untied."""
    inside = tuple(work.decoder.layer_prefix(index) for index in range(len(work.decoder.layers)))
    tensors = {
        name: work.checkpoint.tensor(name) for name in work.checkpoint.tensor_names if not name.startswith(inside)
    }
    records = []
    for name, scheme in work.targets.outside_layers(work.decoder.prefix).items():
        weight = tensors.pop(f"{name}.weight", None)
        if weight is None:
            weight = work.checkpoint.tensor(work.targets.tied_to)
        fallback = "round to nearest: outside the decoder layers" if work.recipe.plan.is_calibrated else None
        result = rounded(work, weight, scheme, fallback)
        stored = work.format.pack(name, result.quantized)
        tensors.update(stored)
        records.append(result.record(name, stored))
    return tensors, tuple(records)


def write_shard(folder: Path, file: str, tensors: dict[str, torch.Tensor], modules: tuple[ModuleRecord, ...]) -> Entry:
    """The shard on the disk, whole, before anything says that it is."""
    partial = folder / f"{file}.partial"
    try:
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, partial, {"format": "pt"})
        with partial.open("rb") as handle:
            os.fsync(handle.fileno())
        os.replace(partial, folder / file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return Entry(file, file_digest(folder / file), tuple(sorted(tensors)), modules)


def finish_checkpoint(work: Work, journal: Journal, source_digest: str, identity: str, begin: float) -> Manifest:
    """Config, index, copied files and manifest, after everything has been counted."""
    folder, checkpoint, targets = work.folder, work.checkpoint, work.targets
    modules = tuple(record for entry in journal.entries for record in entry.modules)
    weight_map = {name: entry.file for entry in journal.entries for name in entry.tensors}
    packed = [record for record in modules if f"{record.name}.{work.format.leaf}" in weight_map]
    if len(packed) != len(targets.schemes):
        raise QuantizeError(
            f"{folder}: {len(packed)} of {len(targets.schemes)} modules were packed; this is a bug, report it"
        )
    config = dict(checkpoint.config)
    if targets.unties:
        config["tie_word_embeddings"] = False
    config["quantization_config"] = work.format.config(targets.schemes, targets.ignored)
    size = sum((folder / file).stat().st_size for file in work.files)
    write_atomically(folder / CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    write_atomically(folder / INDEX, json.dumps(index, indent=2) + "\n")
    copy_companions(checkpoint.path, folder)
    text = work.calibration
    manifest = Manifest(
        source_digest=source_digest,
        fingerprint=identity,
        recipe=work.recipe.to_mapping(),
        calibration=None if text is None else text.to_mapping(checkpoint.chat_template_digest()),
        versions=versions(),
        modules=modules,
        bytes_before=checkpoint.bytes(),
        bytes_after=size,
        bits_per_weight=8 * sum(record.bytes for record in modules) / sum(record.parameters for record in modules),
        coverage={"expected": len(targets.schemes), "packed": len(packed)},
        notes=(*targets.notes, *((text.note,) if text is not None and text.note else ()), *too_few_tokens(modules)),
        seconds=round(time.perf_counter() - begin, 3),
        tokenizer_digest=checkpoint.tokenizer_digest(),
        chat_template_digest=checkpoint.chat_template_digest(),
    )
    manifest.write(folder)
    return manifest
