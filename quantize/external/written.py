"""What an external quantizer left in its checkpoint, module by module, in the terms of our manifest.

Weights are compared with the source's where the algorithm leaves every weight in its place; one that moves scales into
norms and neighbours (AWQ) changes the weights on purpose, and their distance from the source says nothing.
"""

import torch

from quantize.checkpoint import Checkpoint
from quantize.errors import QuantizeError
from quantize.formats.choose import quantization_of, stored_linears
from quantize.gram import relative_weight_error
from quantize.manifest import ModuleRecord
from quantize.scheme import dequantize
from quantize.targets import Targets


def written_modules(source: Checkpoint, result: Checkpoint, targets: Targets, moved: bool) -> tuple[ModuleRecord, ...]:
    """A record of every target that is quantized in the result. moved: scales have moved between weights. Raises
    QuantizeError for a result in a layout that is not read here."""
    settings = quantization_of(result)
    stored = stored_linears(result, targets.schemes)
    if stored is None:
        raise QuantizeError(
            f"{result.path}: written in a layout that quantgate does not read ({settings.get('quant_method')})"
        )
    records = []
    for name, linear in stored.items():
        if not all(f"{name}.{leaf}" in result.files for leaf in linear.leaves):
            continue
        tensors = {leaf: result.tensor(f"{name}.{leaf}") for leaf in linear.leaves}
        weight = source.tensor(f"{name}.weight").float()
        try:
            quantized, order = linear.read(tensors, *weight.shape)
        except QuantizeError as failure:
            raise QuantizeError(f"{result.path}: {name}: {failure}; report it to the library's makers") from None
        approximation = dequantize(quantized, torch.float32)
        if order is not None:
            approximation = torch.empty_like(approximation).index_copy_(1, order, approximation)
        records.append(
            ModuleRecord(
                name=name,
                bits=quantized.scheme.bits,
                group_size=quantized.scheme.group_size,
                symmetric=quantized.scheme.symmetric,
                relative_error=None if moved else relative_weight_error(weight, approximation),
                error_of="not compared" if moved else "weights",
                fallback=None,
                dead_columns=0,
                clipped_scales=0,
                parameters=weight.numel(),
                bytes=sum(tensor.nbytes for tensor in tensors.values()),
                seconds=0.0,
            )
        )
    return tuple(records)
