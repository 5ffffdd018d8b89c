"""How to quantize, as a value: read from a mapping (a YAML file, the command line), checked once.

Everything that changes the resulting bytes is in here, so that two equal recipes on equal inputs give equal
checkpoints.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from quantize.errors import QuantizeError
from quantize.formats.choose import FORMATS
from quantize.method import AWQ, BITSANDBYTES_METHODS, EXTERNAL_METHODS, GPTQ, METHODS, Method, method_named
from quantize.scheme import PER_CHANNEL, Scheme

RARITY = "rarity"
HIGHEST_SEED = 2**63 - 1
"""What a generator of torch takes."""
AUTO_GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True)
class Override:
    """What the modules matching `pattern` (a glob over full module names) do differently; None keeps the recipe's."""

    pattern: str
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    skip: bool = False


@dataclass(frozen=True)
class Recipe:
    """bits and activations default by method; group_size None means per channel at 8 bits, else 128 where it divides
    every target, else 64, else 32. samples windows of sequence_length tokens calibrate the methods that need it. damp
    is the share of the Hessian's mean diagonal that gptq adds first; seed is that of the proof of where scales may go.
    token_importance: "rarity" lets rare tokens count more in gptq's Hessian.

    Symmetric is the default for every method because it loads everywhere: some versions of SGLang and vLLM take
    compressed-tensors of 4 bits only so, and asymmetric weights cannot go out as GPTQ at all. Zero points buy accuracy
    for 1/16 bit per weight (groups of 64): ask for symmetric: false where the server takes them.
    """

    method: str
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool = True
    activations: str | None = None
    ignore: tuple[str, ...] = ("lm_head",)
    overrides: tuple[Override, ...] = ()
    samples: int = 128
    sequence_length: int = 2048
    seed: int = 0
    damp: float = 0.01
    act_order: bool = True
    token_importance: str | None = None
    format: str = "compressed-tensors"

    def __post_init__(self) -> None:
        check(self, "recipe")
        if self.bits is None:
            object.__setattr__(self, "bits", self.plan.bits[0])
        if self.activations is None:
            object.__setattr__(self, "activations", self.plan.activations)
        check_combination(self, "recipe")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], where: str = "recipe") -> "Recipe":
        """A recipe from plain values. Raises QuantizeError naming `where` and the field."""
        if not isinstance(mapping, Mapping):
            raise QuantizeError(f"{where}: expected a mapping of fields such as method: gptq")
        known = [field.name for field in fields(cls)]
        for key in mapping:
            if key not in known:
                raise QuantizeError(f"{where}: {key}: no such field; there are {', '.join(known)}")
        if mapping.get("method") is None:
            raise QuantizeError(f"{where}: method: missing; one of {', '.join(METHODS)}")
        values = {key: value for key, value in mapping.items() if value is not None}
        if "ignore" in values:
            values["ignore"] = read_ignore(values["ignore"], where)
        if "overrides" in values:
            values["overrides"] = read_overrides(values["overrides"], where)
        try:
            return cls(**values)
        except QuantizeError as failure:
            raise QuantizeError(str(failure).replace("recipe: ", f"{where}: ", 1)) from None

    def to_mapping(self) -> dict[str, Any]:
        """Plain values that `from_mapping` reads back, in the order of the fields."""
        mapping = asdict(self)
        mapping["ignore"] = list(self.ignore)
        mapping["overrides"] = {
            override.pattern: {
                key: value for key, value in asdict(override).items() if key != "pattern" and value not in (None, False)
            }
            | ({"symmetric": False} if override.symmetric is False else {})
            for override in self.overrides
        }
        return mapping

    @property
    def plan(self) -> Method:
        method = method_named(self.method)
        assert method is not None
        return method

    def skips(self, name: str) -> bool:
        """Whether the module keeps its weights: ignored, or skipped by its first matching override. An override for
        the module's very name is meant: `lm_head: {bits: 8}` needs no other ignore."""
        override = self.override_of(name)
        if override is not None and override.pattern == name:
            return override.skip
        if any(fnmatchcase(name, pattern) for pattern in self.ignore):
            return True
        return override is not None and override.skip

    def override_of(self, name: str) -> Override | None:
        return next((entry for entry in self.overrides if fnmatchcase(name, entry.pattern)), None)

    def scheme_of(self, name: str, auto_group_size: int) -> Scheme:
        """The scheme of one module; `auto_group_size` stands in where neither recipe nor override names a group."""
        override = self.override_of(name) or Override(name)
        bits = override.bits if override.bits is not None else self.bits
        assert bits is not None
        symmetric = override.symmetric if override.symmetric is not None else self.symmetric
        group_size = override.group_size if override.group_size is not None else self.group_size
        if group_size is None:
            group_size = PER_CHANNEL if bits == 8 else auto_group_size
        return Scheme(bits, group_size, symmetric, self.activations if bits == 8 else None)


def check(recipe: Recipe, where: str) -> None:
    """Types and ranges of single fields."""
    if method_named(recipe.method) is None:
        known = EXTERNAL_METHODS if str(recipe.method).startswith("external") else METHODS | BITSANDBYTES_METHODS
        close = get_close_matches(str(recipe.method), known, n=1)
        meant = f"did you mean {close[0]}? One" if close else "one"
        raise QuantizeError(f"{where}: method: {recipe.method!r} is unknown; {meant} of {', '.join(known)}")
    for name, low in (("samples", 1), ("sequence_length", 2), ("seed", 0)):
        value = getattr(recipe, name)
        if not is_int(value) or value < low:
            raise QuantizeError(f"{where}: {name}: {value!r} is not a whole number of at least {low}")
    if recipe.seed > HIGHEST_SEED:
        raise QuantizeError(f"{where}: seed: {recipe.seed} is above {HIGHEST_SEED}")
    if recipe.bits is not None and (not is_int(recipe.bits) or recipe.bits not in recipe.plan.bits):
        allowed = " or ".join(str(bits) for bits in recipe.plan.bits)
        raise QuantizeError(f"{where}: bits: {recipe.method} takes {allowed}, not {recipe.bits!r}")
    check_group_size(recipe.group_size, f"{where}: group_size")
    for name in ("symmetric", "act_order"):
        if not isinstance(getattr(recipe, name), bool):
            raise QuantizeError(f"{where}: {name}: {getattr(recipe, name)!r} is neither true nor false")
    if recipe.activations not in (None, "int8"):
        raise QuantizeError(f"{where}: activations: {recipe.activations!r} is neither null nor int8")
    if isinstance(recipe.damp, bool) or not isinstance(recipe.damp, int | float) or not 0 < recipe.damp <= 1:
        raise QuantizeError(f"{where}: damp: {recipe.damp!r} is not above 0 and at most 1")
    if not isinstance(recipe.format, str) or recipe.format not in FORMATS:
        raise QuantizeError(f"{where}: format: {recipe.format!r} cannot be written; one of {', '.join(FORMATS)}")


def check_combination(recipe: Recipe, where: str) -> None:
    """What the fields must be together, once the defaults are in place."""
    if recipe.token_importance not in (None, RARITY):
        raise QuantizeError(f"{where}: token_importance: {recipe.token_importance!r} is neither null nor {RARITY}")
    if recipe.token_importance and recipe.plan.rounding != GPTQ:
        raise QuantizeError(f"{where}: token_importance: only gptq weighs tokens, not {recipe.method}")
    if recipe.activations == "int8" and not (recipe.bits == 8 and recipe.symmetric):
        raise QuantizeError(f"{where}: activations: int8 activations need symmetric 8-bit weights")
    if recipe.activations == "int8" and recipe.group_size not in (None, PER_CHANNEL):
        raise QuantizeError(f"{where}: group_size: int8 activations need one scale per output channel (-1)")
    if recipe.plan.external is not None:
        check_external(recipe, where)
    if recipe.plan.is_bitsandbytes:
        check_bitsandbytes(recipe, where)


def check_bitsandbytes(recipe: Recipe, where: str) -> None:
    """The library has no settings but which modules to leave alone."""
    for field in fields(Recipe):
        free = field.name in ("method", "bits", "ignore", "samples", "sequence_length", "seed")
        if not free and getattr(recipe, field.name) != field.default:
            raise QuantizeError(f"{where}: {field.name}: {recipe.method} takes none; leave it out")


def check_external(recipe: Recipe, where: str) -> None:
    """What the libraries cannot be asked for through one recipe."""
    library, algorithm = recipe.plan.external or ("", "")
    if recipe.overrides:
        raise QuantizeError(f"{where}: overrides: {recipe.method} takes none; use a method of quantgate's own")
    if recipe.activations is not None:
        raise QuantizeError(f"{where}: activations: {recipe.method} quantizes weights only here")
    if recipe.ignore != ("lm_head",):
        raise QuantizeError(f"{where}: ignore: {recipe.method} leaves lm_head as it is and takes nothing else")
    own = ("damp", "act_order", "token_importance", "format")
    for field in fields(Recipe):
        if field.name in own and getattr(recipe, field.name) != field.default:
            raise QuantizeError(f"{where}: {field.name}: {recipe.method} has its own; leave it out")
    if recipe.symmetric and algorithm == AWQ and library != "llmcompressor":
        raise QuantizeError(
            f"{where}: symmetric: {recipe.method} writes zero points always; add symmetric: false (--asymmetric)"
        )


def check_group_size(value: Any, where: str) -> None:
    if value is not None and (not is_int(value) or (value != PER_CHANNEL and value < 1)):
        raise QuantizeError(f"{where}: {value!r} is neither a positive whole number nor -1 (per output channel)")


def check_flag(value: Any, where: str) -> None:
    if value is not None and not isinstance(value, bool):
        raise QuantizeError(f"{where}: {value!r} is neither true nor false")


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_ignore(value: Any, where: str) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple) or not all(isinstance(x, str) for x in value):
        raise QuantizeError(f"{where}: ignore: expected a list of module name patterns, such as [lm_head]")
    return tuple(value)


def read_overrides(value: Any, where: str) -> tuple[Override, ...]:
    """`{pattern: {bits, group_size, symmetric, skip}}`; the order counts, the first match wins."""
    if not isinstance(value, Mapping):
        raise QuantizeError(f"{where}: overrides: expected a mapping from module name pattern to its settings")
    known = [field.name for field in fields(Override) if field.name != "pattern"]
    overrides = []
    for pattern, settings in value.items():
        spot = f"{where}: overrides: {pattern}"
        if not isinstance(settings, Mapping):
            raise QuantizeError(f"{spot}: expected settings, such as {{bits: 8}} or {{skip: true}}")
        for key in settings:
            if key not in known:
                raise QuantizeError(f"{spot}: {key}: no such field; there are {', '.join(known)}")
        bits = settings.get("bits")
        if bits is not None and (not is_int(bits) or bits not in (3, 4, 8)):
            raise QuantizeError(f"{spot}: bits: {bits!r} is not 3, 4 or 8")
        check_group_size(settings.get("group_size"), f"{spot}: group_size")
        check_flag(settings.get("symmetric"), f"{spot}: symmetric")
        check_flag(settings.get("skip"), f"{spot}: skip")
        overrides.append(Override(str(pattern), **settings))
    return tuple(overrides)
