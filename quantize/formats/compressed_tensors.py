"""Reads and writes quantized linears as compressed-tensors does, without importing that library.

Two layouts, for a weight of N outputs and K inputs, b bits, groups of g inputs (G = K / g; G = 1 per channel):

| `pack-quantized` (activations as they are)       | `int-quantized` (b = 8, W8A8)    |
|--------------------------------------------------|----------------------------------|
| `weight_packed` int32 [N, ceil(K b / 32)]        | `weight` int8 [N, K]             |
| `weight_scale` [N, G]                            | `weight_scale` [N, G]            |
| `weight_zero_point` int32 [ceil(N b / 32), G]    | `weight_zero_point` int8 [N, G]  |
| `weight_shape` int64 [2] = N, K                  |                                  |

The zero point is there only for asymmetric schemes. Dequantized weight = (code - zero_point) * scale, where code and
zero_point are signed, in [-2^(b-1), 2^(b-1) - 1].

Packing stores code + 2^(b-1), element i in bits i*b to i*b + b - 1 of its row, lowest bits first, so that 32 elements
fill exactly b words and an element may straddle two words (b = 3, 5, 6, 7). Worked values, row of eight codes, b = 4:
-8 -7 -6 -5 -4 -3 -2 -1 become nibbles 0 1 2 3 4 5 6 7 and the word 0x76543210. With b = 3, the codes
-4 -3 -2 -1 0 1 2 3 -4 -3 -2 become 0 1 2 3 4 5 6 7 0 1 2; the eleventh (2, binary 010) takes bits 30, 31 of the first
word (10) and bit 0 of the second (0): the words are 0x88FAC688 and 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from quantize.errors import QuantizeError
from quantize.scheme import PER_CHANNEL, QuantizedWeight, Scheme

PACKED = "pack-quantized"
PLAIN = "int-quantized"
MIXED = "mixed-precision"
METHOD = "compressed-tensors"
WORD_BITS = 32


def storage_format(scheme: Scheme) -> str:
    """The layout that this package writes a scheme in: the one that vLLM has kernels for. It takes weight-only schemes
    packed, int8 too (its `_is_wNa16_group_channel`), and plain int8 with int8 activations."""
    return PLAIN if scheme.bits == 8 and scheme.activations == "int8" else PACKED


def misfit(scheme: Scheme, outputs: int, inputs: int) -> str | None:
    """Why a weight of this scheme and shape cannot be written so; None: all can."""
    return None


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed codes int8 [rows, C] as int32 [rows, ceil(C * bits / 32)]; see the file's docstring."""
    rows, columns = codes.shape
    offset = 1 << (bits - 1)
    blocks = -(-columns // WORD_BITS)
    padded = torch.nn.functional.pad(codes, (0, blocks * WORD_BITS - columns), value=-offset)
    elements = padded.reshape(rows, blocks, WORD_BITS)
    words = torch.zeros(rows, blocks, bits, dtype=torch.int32, device=codes.device)
    for index in range(WORD_BITS):
        word, shift = divmod(index * bits, WORD_BITS)
        value = elements[..., index].to(torch.int32) + offset
        words[..., word] |= value << shift
        if shift + bits > WORD_BITS:
            words[..., word + 1] |= value >> (WORD_BITS - shift)
    return words.reshape(rows, blocks * bits)[:, : -(-columns * bits // WORD_BITS)].contiguous()


def unpack_codes(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Inverse of `pack_codes`: int32 [rows, ceil(columns * bits / 32)] back to int8 [rows, columns]."""
    rows = words.shape[0]
    offset = 1 << (bits - 1)
    blocks = -(-columns // WORD_BITS)
    whole = torch.nn.functional.pad(words, (0, blocks * bits - words.shape[1])).reshape(rows, blocks, bits)
    codes = torch.empty(rows, blocks, WORD_BITS, dtype=torch.int8, device=words.device)
    for index in range(WORD_BITS):
        word, shift = divmod(index * bits, WORD_BITS)
        in_this_word = min(bits, WORD_BITS - shift)
        value = (whole[..., word] >> shift) & ((1 << in_this_word) - 1)
        if in_this_word < bits:
            value = value | ((whole[..., word + 1] & ((1 << (bits - in_this_word)) - 1)) << in_this_word)
        codes[..., index] = (value - offset).to(torch.int8)
    return codes.reshape(rows, blocks * WORD_BITS)[:, :columns].contiguous()


def pack_weight(module_name: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """The tensors to store for the linear `module_name`, under their full names."""
    scheme = weight.scheme
    tensors = {"weight_scale": weight.scale.contiguous()}
    if storage_format(scheme) == PLAIN:
        tensors["weight"] = weight.codes.contiguous()
        if weight.zero_point is not None:
            tensors["weight_zero_point"] = weight.zero_point.contiguous()
    else:
        tensors["weight_packed"] = pack_codes(weight.codes, scheme.bits)
        tensors["weight_shape"] = torch.tensor(weight.codes.shape, dtype=torch.int64)
        if weight.zero_point is not None:
            tensors["weight_zero_point"] = pack_codes(weight.zero_point.T, scheme.bits).T.contiguous()
    return {f"{module_name}.{name}": tensor for name, tensor in tensors.items()}


def stored_names(scheme: Scheme, layout: str) -> set[str]:
    """The tensors that a linear in this layout must have, without the module's name."""
    names = {"weight_scale", "weight"} if layout == PLAIN else {"weight_scale", "weight_packed", "weight_shape"}
    return names if scheme.symmetric else names | {"weight_zero_point"}


def unpack_weight(tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedWeight:
    """The weight from its stored tensors, in either layout, under their names without the module's (`weight_scale`)."""
    scale = tensors["weight_scale"]
    zero_point = None if scheme.symmetric else tensors["weight_zero_point"]
    if "weight_packed" in tensors:
        words = tensors["weight_packed"]
        outputs, inputs = (int(size) for size in tensors["weight_shape"])
        if words.dtype != torch.int32 or words.shape != (outputs, words_for(inputs, scheme.bits)):
            raise QuantizeError(
                f"weight_packed {words.dtype} {list(words.shape)} does not fit a weight {[outputs, inputs]} of "
                f"{scheme.bits} bits"
            )
        codes = unpack_codes(words, scheme.bits, inputs)
        if zero_point is not None:
            if zero_point.dtype != torch.int32 or zero_point.shape[0] != words_for(outputs, scheme.bits):
                raise QuantizeError(
                    f"weight_zero_point {zero_point.dtype} {list(zero_point.shape)} does not fit {outputs} outputs"
                )
            zero_point = unpack_codes(zero_point.T, scheme.bits, outputs).T.contiguous()
    else:
        codes = tensors["weight"]
        outputs, inputs = codes.shape
        for name, stored in (("weight", codes), ("weight_zero_point", zero_point)):
            if stored is not None and not holds_codes(stored, scheme):
                raise QuantizeError(f"{name} ({stored.dtype}) is not made of {scheme.bits}-bit integers in int8")
    groups = inputs // scheme.group_width(inputs)
    if scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(outputs, groups).contiguous()
    if zero_point is not None and zero_point.numel() == 1:
        zero_point = zero_point.reshape(1, 1).expand(outputs, groups).contiguous()
    if not scheme.divides(inputs) or codes.shape != (outputs, inputs) or scale.shape != (outputs, groups):
        raise QuantizeError(
            f"weight_scale {list(scale.shape)} does not fit a weight {[outputs, inputs]} "
            f"in groups of {scheme.group_size}"
        )
    return QuantizedWeight(codes, scale, zero_point, scheme)


def words_for(columns: int, bits: int) -> int:
    return -(-columns * bits // WORD_BITS)


def holds_codes(stored: torch.Tensor, scheme: Scheme) -> bool:
    """Whether `stored` is int8 and within the scheme's range, which int8 itself only keeps at 8 bits."""
    if stored.dtype != torch.int8 or scheme.bits == 8 or not stored.numel():
        return stored.dtype == torch.int8
    low, high = stored.aminmax()
    return scheme.lowest <= int(low) and int(high) <= scheme.highest


def quantization_config(schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of config.json. One scheme for all targets every `Linear` but the ignored ones; several
    become one group each, which names its modules."""
    by_scheme: dict[Scheme, list[str]] = {}
    for module, scheme in schemes.items():
        by_scheme.setdefault(scheme, []).append(module)
    if not by_scheme:
        raise QuantizeError("nothing is quantized: no module is left after the recipe's ignore and overrides")
    uniform = len(by_scheme) == 1
    ignored = list(ignored)
    groups = {
        f"group_{index}": _group(scheme, ["Linear"] if uniform else _targets(modules, [*schemes, *ignored]))
        for index, (scheme, modules) in enumerate(by_scheme.items())
    }
    formats = {storage_format(scheme) for scheme in by_scheme}
    return {
        "quant_method": METHOD,
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "config_groups": groups,
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _targets(modules: Iterable[str], everything: Iterable[str]) -> list[str]:
    """Names of modules, the experts among them as one regular expression for each projection where it holds of all of
    them: there are thousands, and transformers finds the experts' scheme by such an expression."""
    members: dict[str, set[str]] = {}
    for name in everything:
        members.setdefault(_experts_pattern(name) or name, set()).add(name)
    own = set(modules)
    chosen: dict[str, None] = {}
    for name in modules:
        pattern = _experts_pattern(name)
        chosen[pattern if pattern and members[pattern] <= own else name] = None
    return list(chosen)


def _experts_pattern(name: str) -> str | None:
    """`re:model[.]layers[.][0-9]+[.]mlp[.]experts[.][0-9]+[.]up_proj$`; None for what has no second number."""
    parts = name.split(".")
    if sum(part.isdigit() for part in parts) < 2:
        return None
    return "re:" + "[.]".join("[0-9]+" if part.isdigit() else re.escape(part) for part in parts) + "$"


def _group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    per_channel = scheme.group_size == PER_CHANNEL
    activations = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
        "group_size": None,
    }
    return {
        "targets": targets,
        "format": storage_format(scheme),
        "weights": {
            "num_bits": scheme.bits,
            "type": "int",
            "symmetric": scheme.symmetric,
            "strategy": "channel" if per_channel else "group",
            "group_size": None if per_channel else scheme.group_size,
            "dynamic": False,
            "actorder": None,
        },
        "input_activations": activations if scheme.activations == "int8" else None,
        "output_activations": None,
    }


def schemes_of(settings: Mapping[str, Any], linears: Iterable[str]) -> dict[str, Scheme] | None:
    """Which of `linears` (module names) are quantized and how, from `quantization_config`.

    None when the file asks for something that this package does not run itself (floating-point weights, static
    activations, blocks, a quantized KV cache, weights that are not stored compressed). Matching is the library's: an
    ignored module is never quantized; a target that is the module's name goes before a regular expression (`re:`), and
    that before a class name.
    """
    if settings.get("quant_method") != METHOD or settings.get("quantization_status") != "compressed":
        return None
    if settings.get("kv_cache_scheme") or (settings.get("transform_config") or {}).get("config_groups"):
        return None
    targets: dict[str, Scheme] = {}
    for group in (settings.get("config_groups") or {}).values():
        layout = group.get("format") or settings.get("format") if isinstance(group, Mapping) else None
        scheme = _scheme_of(group) if layout in (PACKED, PLAIN, "naive-quantized") else None
        if scheme is None:
            return None
        targets.update(dict.fromkeys(group.get("targets") or (), scheme))
    ordered = sorted(targets, key=lambda target: (target == "Linear", target.startswith("re:"), target))
    ignored = list(settings.get("ignore") or ())
    chosen: dict[str, Scheme] = {}
    for name in linears:
        target = next((target for target in ordered if _matches(name, target)), None)
        if target is not None and not any(_matches(name, pattern) for pattern in ignored):
            chosen[name] = targets[target]
    return chosen


def _matches(module_name: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module_name) is not None
    return pattern in (module_name, "Linear")


def _scheme_of(group: Mapping[str, Any]) -> Scheme | None:
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not weights or group.get("output_activations"):
        return None
    strategy = weights.get("strategy")
    plain_weights = (
        weights.get("type", "int") == "int"
        and not weights.get("dynamic")
        and strategy in ("channel", "group", "tensor")
        and weights.get("actorder") not in ("group", "dynamic", True)
        and 2 <= weights.get("num_bits", 8) <= 8
    )
    dynamic_tokens = inputs is None or (
        inputs.get("type", "int") == "int"
        and inputs.get("num_bits", 8) == 8
        and inputs.get("symmetric", True)
        and inputs.get("strategy") == "token"
        and inputs.get("dynamic") is True
    )
    if not plain_weights or not dynamic_tokens:
        return None
    return Scheme(
        bits=weights.get("num_bits", 8),
        group_size=weights["group_size"] if strategy == "group" else PER_CHANNEL,
        symmetric=weights.get("symmetric", True),
        activations=None if inputs is None else "int8",
    )
