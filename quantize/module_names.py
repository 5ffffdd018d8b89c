"""What a linear's full name says: its layer, and its kind, which is the same in every layer and for every expert."""

import re


def kind_of(name: str) -> str:
    """A name within its layer, numbers replaced: "mlp.experts.*.up_proj"."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def layer_and_kind(name: str) -> tuple[int | None, str]:
    """ "model.layers.3.mlp.up_proj" is (3, "mlp.up_proj"); what is in no layer has None and its whole name."""
    found = re.match(r"(?:[^.]*\.)*?(\d+)\.(.+)$", name)
    return (int(found.group(1)), kind_of(found.group(2))) if found else (None, name)
