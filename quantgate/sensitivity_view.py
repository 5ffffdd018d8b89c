"""What linears lose at 4 bits, as people read it: kinds, layers and the worst linears, each ranked."""

from rich.table import Table

from quantize.sensitivity import Sensitivity

SHOWN = 20


def loss_tables(found: Sensitivity) -> list[Table]:
    """Three rankings by KL in nats per token, the most sensitive first; all linears are in the JSON document."""
    text = found.calibration
    title = f"loss alone at 4 bits, on {text['samples']} windows of {text['sequence_length']} tokens: nats per token"
    kinds = Table("kind of linear, in every layer", "KL", title=title)
    for kind, kl in sorted(found.kinds.items(), key=lambda item: -item[1]):
        kinds.add_row(kind, f"{kl:.2e}")
    layers = Table("layer, whole", "KL")
    for layer, kl in sorted(found.layers.items(), key=lambda item: -item[1]):
        layers.add_row(str(layer), f"{kl:.2e}")
    modules = Table("linear", "KL", caption=f"the first {SHOWN} of {len(found.modules)}; --json has all")
    for module in sorted(found.modules, key=lambda module: -module.kl)[:SHOWN]:
        modules.add_row(module.pattern, f"{module.kl:.2e}")
    return [kinds, layers, modules]
