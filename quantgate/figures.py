"""Figures of a quantized checkpoint's layers and of a checkpoint's sensitivity, drawn without a display into a file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from quantgate.errors import FrontDoorError
from quantize.manifest import Manifest, ModuleRecord
from quantize.module_names import layer_and_kind

SUFFIXES = (".png", ".svg", ".pdf")
PALETTE = ("#1d4ed8", "#0f766e", "#b26a00", "#7c3aed", "#be185d", "#4d7c0f", "#0891b2", "#92400e", "#4b5563", "#a21caf")
BIT_COLOURS = {3: "#f4a261", 4: "#cbd5e1", 8: "#5b8def"}
OTHER_BITS = "#e5e7eb"
FALLBACK, DEAD = "#c62828", "#111827"
OUTSIDE = -1
"""The column of what is in no layer."""


def refuse_unwritable_figure(path: Path) -> None:
    """Raises FrontDoorError before any work for a path that no figure can be written to."""
    if path.suffix.lower() not in SUFFIXES:
        raise FrontDoorError(f"{path}: a plot is written as {', '.join(SUFFIXES)}; rename it")
    if not path.absolute().parent.is_dir():
        raise FrontDoorError(f"{path}: no folder {path.absolute().parent}; make it first")
    if path.is_dir():
        raise FrontDoorError(f"{path}: is a folder; name a file")


def save_figure(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=130)


def layers_figure(manifest: Manifest, name: str) -> Figure:
    """Relative error per layer, one line per kind of linear, on a logarithmic scale; below it the bits of every linear,
    fallbacks and dead columns marked."""
    cells: dict[tuple[int, str], list[ModuleRecord]] = {}
    for module in manifest.modules:
        layer, kind = layer_and_kind(module.name)
        cells.setdefault((OUTSIDE if layer is None else layer, kind), []).append(module)
    kinds = list(dict.fromkeys(kind for _, kind in cells))
    layers = sorted({layer for layer, _ in cells}, key=lambda layer: (layer == OUTSIDE, layer))
    width = min(30.0, max(8.0, 3.5 + 0.3 * len(layers)))
    figure = Figure(figsize=(width, 4.6 + 0.28 * len(kinds)), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[4.2, 0.6 + 0.28 * len(kinds)])
    draw_errors(upper, cells, kinds, layers)
    draw_bits(lower, cells, kinds, layers)
    figure.suptitle(f"{name}: {manifest.recipe['method']}, {manifest.bits_per_weight:.2f} bits per weight")
    return figure


def draw_errors(
    axis: Axes, cells: Mapping[tuple[int, str], Sequence[ModuleRecord]], kinds: Sequence[str], layers: Sequence[int]
) -> None:
    compared = set()
    for number, kind in enumerate(kinds):
        points = []
        for column, layer in enumerate(layers):
            errors = [module.relative_error for module in cells.get((layer, kind), ()) if module.relative_error]
            if errors:
                points.append((column, max(errors)))
                compared |= {module.error_of for module in cells[layer, kind]}
        if points:
            colour = PALETTE[number % len(PALETTE)]
            style = "-" if number < len(PALETTE) else "--"
            axis.plot(*zip(*points, strict=True), style, color=colour, marker="o", markersize=3.5, linewidth=1.4,
                      label=kind)  # fmt: skip
    if compared:
        axis.set_yscale("log")
        axis.legend(loc="upper left", bbox_to_anchor=(1.005, 1.0), frameon=False, fontsize=9)
    else:
        axis.text(0.5, 0.5, "no error was measured", ha="center", transform=axis.transAxes)
    axis.set_ylabel(f"relative error of {' and '.join(sorted(compared)) or 'outputs'}")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axis.set_axisbelow(True)


def draw_bits(
    axis: Axes, cells: Mapping[tuple[int, str], Sequence[ModuleRecord]], kinds: Sequence[str], layers: Sequence[int]
) -> None:
    marks: dict[str, Any] = {}
    for row, kind in enumerate(kinds):
        for column, layer in enumerate(layers):
            modules = cells.get((layer, kind))
            if not modules:
                continue
            bits = min(module.bits for module in modules)
            colour = BIT_COLOURS.get(bits, OTHER_BITS)
            axis.add_patch(rectangle(column, row, colour))
            axis.text(column, row, str(bits), ha="center", va="center", fontsize=7, color="#1f2937")
            if any(module.fallback for module in modules):
                (marks["fell back"],) = axis.plot(
                    column, row, "s", markersize=13, markerfacecolor="none", markeredgecolor=FALLBACK, linewidth=0
                )
            if any(module.dead_columns for module in modules):
                (marks["dead columns"],) = axis.plot(column + 0.3, row - 0.28, "v", markersize=4, color=DEAD)
    axis.set_xlim(-0.6, len(layers) - 0.4)
    axis.set_ylim(len(kinds) - 0.4, -0.6)
    axis.set_yticks(range(len(kinds)), kinds, fontsize=9)
    axis.set_xticks(range(len(layers)), ["outside" if layer == OUTSIDE else str(layer) for layer in layers], fontsize=8)
    axis.set_xlabel("layer; below each linear's error, its bits")
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    if marks:
        axis.legend(
            marks.values(), marks.keys(), loc="upper left", bbox_to_anchor=(1.005, 1.0), frameon=False, fontsize=9
        )


def rectangle(column: float, row: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.46, row - 0.42), 0.92, 0.84, color=colour, linewidth=0)


def sensitivity_figure(
    losses: Mapping[tuple[int, str], float], layers: Mapping[int, float], kinds: Mapping[str, float]
) -> Figure:
    """KL at 4 bits in nats per token: of each layer alone above, of each linear alone as a map below, of each kind in
    every layer in its row's name. `losses` by layer and kind."""
    columns, rows = sorted(layers), sorted(kinds, key=lambda kind: -kinds[kind])
    width = min(30.0, max(8.0, 4.5 + 0.3 * len(columns)))
    figure = Figure(figsize=(width, 4.0 + 0.36 * len(rows)), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2.4, 0.6 + 0.36 * len(rows)])
    upper.bar(range(len(columns)), [layers[layer] for layer in columns], color="#1d4ed8", width=0.7)
    upper.set_ylabel("whole layer, nats per token")
    upper.spines[["top", "right"]].set_visible(False)
    positive = [loss for loss in losses.values() if loss > 0]
    if positive:
        # Six decades are more than an eye tells apart; what is below them is drawn as their end.
        norm = LogNorm(max(min(positive), 1e-6 * max(positive)) * 0.999, max(positive) * 1.001)
        picture = [[max(losses.get((layer, kind), 0.0), norm.vmin or 0.0) for layer in columns] for kind in rows]
        image = lower.imshow(picture, aspect="auto", norm=norm, cmap="YlOrRd")
        figure.colorbar(image, ax=lower, label="nats per token", fraction=0.03, pad=0.01)
    lower.set_yticks(range(len(rows)), [f"{kind}  ({kinds[kind]:.1e})" for kind in rows], fontsize=9)
    lower.set_xticks(range(len(columns)), [str(layer) for layer in columns], fontsize=8)
    lower.set_xlabel("layer; each cell: this linear alone at 4 bits (in brackets: this kind in every layer)")
    figure.suptitle("what 4 bits cost: KL of the next token's distribution")
    return figure
