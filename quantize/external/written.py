"""What an external quantizer left in its checkpoint, module by module, in the terms of our manifest.

Weights are compared with the source's where the layout is one that this package reads and the algorithm leaves every
weight in its place; one that moves scales into norms and neighbours (AWQ) changes the weights on purpose, and their
distance from the source says nothing.
"""

from collections.abc import Mapping

import torch

from quantize.checkpoint import Checkpoint
from quantize.formats.compressed_tensors import METHOD, unpack_weight
from quantize.gram import relative_weight_error
from quantize.manifest import ModuleRecord
from quantize.scheme import Scheme, dequantize
from quantize.targets import Targets

CODES = ("weight_packed", "qweight")


def written_modules(
    source: Checkpoint, result: Checkpoint, targets: Targets, scheme: Scheme, moved: bool
) -> tuple[ModuleRecord, ...]:
    """A record of every target that is quantized in the result. moved: scales have moved between weights."""
    stored: dict[str, dict[str, torch.Tensor]] = {name: {} for name in targets.schemes}
    for tensor_name in result.tensor_names:
        module, _, leaf = tensor_name.rpartition(".")
        if module in stored and leaf != "bias":
            stored[module][leaf] = result.tensor(tensor_name)
    readable = result.config.get("quantization_config", {}).get("quant_method") == METHOD
    records = []
    for name, tensors in stored.items():
        if not is_quantized(tensors):
            continue
        weight = source.tensor(f"{name}.weight")
        error = None
        if readable and not moved:
            error = relative_weight_error(weight.float(), dequantize(unpack_weight(tensors, scheme), torch.float32))
        records.append(
            ModuleRecord(
                name=name,
                bits=scheme.bits,
                group_size=scheme.group_size,
                symmetric=scheme.symmetric,
                relative_error=error,
                error_of="not compared" if error is None else "weights",
                fallback=None,
                dead_columns=0,
                clipped_scales=0,
                parameters=weight.numel(),
                bytes=sum(tensor.nbytes for tensor in tensors.values()),
                seconds=0.0,
            )
        )
    return tuple(records)


def is_quantized(tensors: Mapping[str, torch.Tensor]) -> bool:
    return any(leaf in tensors for leaf in CODES) or ("weight_scale" in tensors and "weight" in tensors)
