"""Reads and writes quantized linears as AutoGPTQ and GPTQModel do, without importing them.

For a weight of N outputs and K inputs, b bits, groups of g inputs (G = K / g; G = 1 per channel):

| tensor    | shape                | holds                                                                      |
|-----------|----------------------|----------------------------------------------------------------------------|
| `qweight` | int32 [K b / 32, N]  | code + 2^(b-1), packed along K                                             |
| `qzeros`  | int32 [G, N b / 32]  | zero point + 2^(b-1), packed along N; version 1 stores one less            |
| `scales`  | fp16 [G, N]          |                                                                            |
| `g_idx`   | int32 [K]            | the group of each input: k // g, unless the groups follow the act-order    |

Dequantized weight = (code - zero_point) * scale, code and zero_point signed. Elements are packed lowest bits first, as
in compressed-tensors (`pack_codes`), but down the columns. Worked values, b = 4: the first eight codes of an output,
-8 -7 -6 -5 -4 -3 -2 -1, become the word 0x76543210 in row 0; eight outputs without zero points have the word 0x77777777
in `qzeros` in version 1 and 0x88888888 in version 2. b = 3: thirty-two zero points are the words 0xDB6DB6DB 0xB6DB6DB6
0x6DB6DB6D in version 1, 0x24924924 0x49249249 0x92492492 in version 2.

The version is told by these values before it is told by the label `checkpoint_format`, which tools get wrong. In
version 1 a zero point of -2^(b-1) cannot be stored as one less: GPTQModel borrows from the next field, others spoil the
word. Such words are read where GPTQModel signs the file, and refused otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quantize.errors import QuantizeError
from quantize.formats.compressed_tensors import WORD_BITS, pack_codes, unpack_codes
from quantize.formats.half import half_scale
from quantize.scheme import PER_CHANNEL, QuantizedWeight, Scheme

METHOD = "gptq"
BITS = (3, 4, 8)
LEAVES = frozenset({"qweight", "qzeros", "scales", "g_idx"})
VERSIONS = {"gptq": 1, "gptq_v2": 2}


def pack_weight(module_name: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """The tensors of the linear `module_name`, version 1. Raises QuantizeError for zero points, for shapes that do not
    fill whole words, and for scales that fp16 does not hold exactly."""
    outputs, inputs = weight.codes.shape
    scheme = weight.scheme
    reason = misfit(scheme, outputs, inputs)
    if reason:
        raise QuantizeError(f"{module_name}: {reason}")
    scale = half_scale(weight.scale, module_name)
    groups = scale.shape[1]
    stored_zero = torch.full((groups, outputs), -1, dtype=torch.int8, device=weight.codes.device)
    tensors = {
        "qweight": pack_codes(weight.codes, scheme.bits).T.contiguous(),
        "qzeros": pack_codes(stored_zero, scheme.bits),
        "scales": scale.T.contiguous(),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // scheme.group_width(inputs),
    }
    return {f"{module_name}.{name}": tensor for name, tensor in tensors.items()}


def misfit(scheme: Scheme, outputs: int, inputs: int) -> str | None:
    """Why a weight of this scheme and shape cannot be written as GPTQ; None when it can."""
    if not scheme.symmetric:
        return "GPTQ is written symmetric only (vLLM refuses it with zero points); use compressed-tensors or awq"
    if scheme.activations:
        return "GPTQ cannot say that activations are quantized; use compressed-tensors"
    if scheme.bits not in BITS:
        return f"GPTQ packs {', '.join(map(str, BITS))} bits, not {scheme.bits}; use compressed-tensors"
    for count, what in ((inputs, "inputs"), (outputs, "outputs")):
        if count * scheme.bits % WORD_BITS:
            return f"GPTQ packs {scheme.bits}-bit weights into whole words, which {count} {what} do not fill"
    return None


def quantization_config(schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of config.json; `ignored` are the linears that keep their weights. transformers finds those
    inside the layers by what `modules_in_block_to_quantize` leaves out, vLLM and GPTQModel by `dynamic`."""
    scheme = one_scheme(schemes, METHOD)
    settings: dict[str, Any] = {
        "quant_method": METHOD,
        "bits": scheme.bits,
        "group_size": scheme.group_size,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
        "lm_head": False,
    }
    left_out = sorted(name for name in ignored if has_number(name))
    if left_out:
        settings["modules_in_block_to_quantize"] = [sorted(schemes)]
        settings["dynamic"] = {f"-:^{re.escape(name)}$": {} for name in left_out}
    return settings


def has_number(module_name: str) -> bool:
    """Whether the module is one of a list, such as that of the layers."""
    return any(part.isdigit() for part in module_name.split("."))


def one_scheme(schemes: Mapping[str, Scheme], name: str) -> Scheme:
    """The scheme of all modules; `name` is the format that has room for only one."""
    first = next(iter(schemes))
    other = next((module for module in schemes if schemes[module] != schemes[first]), None)
    if other is not None:
        raise QuantizeError(
            f"format: {name} stores all modules in one scheme, but {first} is {said(schemes[first])} and {other} "
            f"{said(schemes[other])}; use compressed-tensors, or drop the override"
        )
    return schemes[first]


def said(scheme: Scheme) -> str:
    group = "per channel" if scheme.group_size == PER_CHANNEL else f"groups of {scheme.group_size}"
    return f"{scheme.bits} bits {group}{'' if scheme.symmetric else ' with zero points'}"


@dataclass(frozen=True)
class Settings:
    """What a GPTQ checkpoint says of itself. `dynamic` are its exceptions by regular expression, the first that matches
    counts; "-:" in front leaves a module alone. borrows: GPTQModel wrote the file."""

    bits: int
    group_size: int
    symmetric: bool
    version: int
    dynamic: Mapping[str, Mapping[str, Any]]
    borrows: bool

    def scheme_of(self, module_name: str) -> Scheme:
        other: Mapping[str, Any] = {}
        for pattern, settings in self.dynamic.items():
            if re.match(pattern.removeprefix("+:"), module_name) and not pattern.startswith("-:"):
                other = settings
                break
        return Scheme(
            other.get("bits", self.bits), other.get("group_size", self.group_size), other.get("sym", self.symmetric)
        )


def read_settings(config: Mapping[str, Any]) -> Settings | None:
    """From `quantization_config` or quantize_config.json; None for a layout that is not this one (Marlin, planar, ...).
    Raises QuantizeError for values that make no sense."""
    label = config.get("checkpoint_format") or config.get("format") or "gptq"
    if label not in VERSIONS or config.get("is_marlin_format"):
        return None
    bits, group_size = config.get("bits"), config.get("group_size", 128)
    if not isinstance(bits, int) or not isinstance(group_size, int):
        raise QuantizeError(f"quantization_config: bits {bits!r} and group_size {group_size!r} are no whole numbers")
    if config.get("pack_dtype", "int32") != "int32":
        return None
    signed_by = str((config.get("meta") or {}).get("quantizer", ""))
    return Settings(
        bits=bits,
        group_size=group_size,
        symmetric=bool(config.get("sym", True)),
        version=VERSIONS[label],
        dynamic=config.get("dynamic") or {},
        borrows="gptqmodel" in signed_by,
    )


def unpack_weight(
    tensors: Mapping[str, torch.Tensor], scheme: Scheme, version: int = 1, borrows: bool = False
) -> tuple[QuantizedWeight, torch.Tensor | None]:
    """The weight from its stored tensors, under their names without the module's; and, where the groups follow the
    act-order, the order [K] in which its columns then are: column j multiplies input order[j].

    The scheme that comes back says symmetric by what the zero points are. Raises QuantizeError for shapes that do not
    fit together, an act-order that gives a group too many inputs, and zero points that cannot be told.
    """
    qweight, scales = tensors["qweight"], tensors["scales"]
    if qweight.dtype != torch.int32:
        raise QuantizeError(f"qweight is {qweight.dtype}, not int32")
    inputs, (groups, outputs) = qweight.shape[0] * WORD_BITS // scheme.bits, scales.shape
    if qweight.shape[1] != outputs or not scheme.divides(inputs) or groups != inputs // scheme.group_width(inputs):
        raise QuantizeError(f"qweight {list(qweight.shape)} and scales {list(scales.shape)} do not fit {said(scheme)}")
    codes = unpack_codes(qweight.T.contiguous(), scheme.bits, inputs)
    zero_point = read_zero_points(tensors["qzeros"], scheme.bits, groups, outputs, version, borrows)
    order = column_order(tensors.get("g_idx"), groups, inputs)
    if order is not None:
        codes = codes[:, order].contiguous()
    read = Scheme(scheme.bits, scheme.group_size, zero_point is None)
    return QuantizedWeight(codes, scales.T.contiguous(), zero_point, read), order


def column_order(g_idx: torch.Tensor | None, groups: int, inputs: int) -> torch.Tensor | None:
    """The columns [K], those of group 0 first, when the groups are not simply one after another."""
    if g_idx is None or not g_idx.numel():
        return None
    width = inputs // groups
    wanted = torch.arange(inputs, device=g_idx.device) // width
    if g_idx.shape != wanted.shape:
        raise QuantizeError(f"g_idx {list(g_idx.shape)} does not fit {inputs} inputs")
    if torch.equal(g_idx.long(), wanted):
        return None
    order = torch.argsort(g_idx.long(), stable=True)
    if not torch.equal(g_idx.long()[order], wanted):
        raise QuantizeError(f"g_idx does not give each of {groups} groups {width} inputs")
    return order


def read_zero_points(
    qzeros: torch.Tensor, bits: int, groups: int, outputs: int, version: int, borrows: bool
) -> torch.Tensor | None:
    """Signed zero points int8 [N, G]; None where all are 0, whatever the version in which that is said."""
    if qzeros.shape != (groups, -(-outputs * bits // WORD_BITS)) or qzeros.dtype != torch.int32:
        raise QuantizeError(f"qzeros {qzeros.dtype} {list(qzeros.shape)} do not fit {outputs} outputs")
    stored = unpack_codes(qzeros, bits, outputs)
    if bool((stored == -1).all()) or bool((stored == 0).all()):
        return None
    highest = (1 << (bits - 1)) - 1
    if version == 2:
        zero_point = stored
    elif not bool((stored == highest).any()):
        zero_point = stored + 1
    elif borrows and WORD_BITS % bits == 0:
        ones = sum(1 << shift for shift in range(0, WORD_BITS, bits))
        zero_point = unpack_codes(qzeros + ones, bits, outputs)
    elif borrows:
        zero_point = torch.where(stored == highest, -highest - 1, stored + 1).to(torch.int8)
    else:
        raise QuantizeError(
            "qzeros hold a zero point that version 1 of GPTQ has no room for, so the values beside it are lost; "
            "quantize again, symmetric or as version 2"
        )
    return zero_point.T.contiguous()
