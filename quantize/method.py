"""The methods by name: what each first does to the inputs of a layer's linears, and how it then rounds their weights.

A plus in a name composes the two: the scaling of one method, the rounding of the other.
"""

from dataclasses import dataclass

AWQ = "awq"
SMOOTHQUANT = "smoothquant"

NEAREST = "nearest"
CLIPPED = "clipped"
GPTQ = "gptq"


@dataclass(frozen=True)
class Method:
    """`bits` it is made for, the default first. scaling: AWQ, SMOOTHQUANT or None. rounding: NEAREST, CLIPPED (each
    group's range cut for the least output error) or GPTQ. activations: what the layer computes with, when the method
    is made for quantized ones. external: the library that does all of it, and its algorithm; the other fields then only
    say whether it needs calibration. is_bitsandbytes: that library does it, in this process."""

    bits: tuple[int, ...]
    scaling: str | None = None
    rounding: str = NEAREST
    activations: str | None = None
    external: tuple[str, str] | None = None
    is_bitsandbytes: bool = False

    @property
    def is_calibrated(self) -> bool:
        return self.scaling is not None or self.rounding != NEAREST

    @property
    def is_sequential(self) -> bool:
        """Whether a layer must see what the quantized layers before it put out: gptq compensates for that too."""
        return self.rounding == GPTQ


METHODS = {
    "int8": Method((8,)),
    "int4": Method((4,)),
    "int3": Method((3,)),
    "awq": Method((4, 3), AWQ, CLIPPED),
    "gptq": Method((4, 3, 8), None, GPTQ),
    "awq+gptq": Method((4, 3), AWQ, GPTQ),
    "smoothquant": Method((8,), SMOOTHQUANT, NEAREST, "int8"),
    "smoothquant+gptq": Method((8,), SMOOTHQUANT, GPTQ, "int8"),
}


BITSANDBYTES_METHODS = {
    "bnb-int8": Method((8,), is_bitsandbytes=True),
    "bnb-nf4": Method((4,), is_bitsandbytes=True),
}

EXTERNAL_METHODS = {
    f"external:{library}:{algorithm}": Method(
        bits,
        AWQ if algorithm == AWQ else None,
        GPTQ if algorithm == GPTQ else NEAREST,
        external=(library, algorithm),
    )
    for library, algorithm, bits in (
        ("llmcompressor", GPTQ, (4, 8)),
        ("llmcompressor", AWQ, (4, 8)),
        ("llmcompressor", "rtn", (4, 8)),
        ("gptqmodel", GPTQ, (4, 3, 8)),
        ("gptqmodel", AWQ, (4,)),
        ("autoawq", AWQ, (4,)),
        ("autogptq", GPTQ, (4, 3, 8)),
    )
}
"""What `external/` drives. The library's name alone means the first of its algorithms."""


def method_named(name: object) -> Method | None:
    """One of `METHODS`, of bitsandbytes', or an external one: "external:llmcompressor:awq", or the library alone."""
    if not isinstance(name, str):
        return None
    return (METHODS | BITSANDBYTES_METHODS).get(name) or next(
        (method for full, method in EXTERNAL_METHODS.items() if full == name or full.rpartition(":")[0] == name), None
    )
