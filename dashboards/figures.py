"""SVG figures for report.html, drawn as text: they take their colours from the page's style sheet, so that they follow
its light and dark schemes and print well, and need no script and no file beside the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, LABEL_WIDTH, VALUE_WIDTH, ROW_HEIGHT = 860, 250, 170, 26


@dataclass(frozen=True)
class ForestRow:
    """An estimate with its interval. `status` colours it (a check's status, or "better", "worse", "same")."""

    label: str
    low: float
    value: float
    high: float
    status: str
    told: str
    limit: float | None = None


@dataclass(frozen=True)
class BarRow:
    """A bar with what it says at its end."""

    label: str
    value: float
    told: str
    status: str


def forest(rows: Sequence[ForestRow], centre: float, unit: str, title: str) -> Markup:
    """Intervals on one axis with a line at `centre` (no difference), and each row's limit as a tick."""
    if not rows:
        return Markup("")
    ends = [end for row in rows for end in (row.low, row.high, row.value) if math.isfinite(end)] + [centre]
    ends += [row.limit for row in rows if row.limit is not None]
    axis = _Axis(min(ends), max(ends))
    height = ROW_HEIGHT * len(rows) + 46
    parts = [_open(height, title), axis.grid(height - 40, unit), axis.line(centre, height - 40, "centre")]
    for index, row in enumerate(rows):
        y = ROW_HEIGHT * index + ROW_HEIGHT / 2 + 6
        parts.append(_text(0, y, row.label, "label"))
        if row.limit is not None:
            x = axis.x(row.limit)
            parts.append(_line(x, y - 10, x, y + 10, "limit"))
        parts.append(_line(axis.x(row.low), y, axis.x(row.high), y, f"interval {_word(row.status)}"))
        parts.append(
            Markup('<circle class="point {}" cx="{:.1f}" cy="{:.1f}" r="5"/>').format(
                _word(row.status), axis.x(row.value), y
            )
        )
        parts.append(_text(WIDTH, y, row.told, "told", "end"))
    parts.append(Markup("</svg>"))
    return Markup("").join(parts)


def bars(rows: Sequence[BarRow], title: str) -> Markup:
    """Horizontal bars from zero."""
    if not rows:
        return Markup("")
    longest = max(row.value for row in rows) or 1.0
    height = ROW_HEIGHT * len(rows) + 8
    parts = [_open(height, title)]
    room = WIDTH - LABEL_WIDTH - VALUE_WIDTH
    for index, row in enumerate(rows):
        y = ROW_HEIGHT * index + 4
        length = room * row.value / longest
        parts.append(_text(0, y + ROW_HEIGHT / 2, row.label, "label"))
        parts.append(
            Markup('<rect class="bar {}" x="{}" y="{:.1f}" width="{:.1f}" height="{}" rx="2"/>').format(
                _word(row.status), LABEL_WIDTH, y + 3, max(length, 1), ROW_HEIGHT - 8
            )
        )
        parts.append(_text(LABEL_WIDTH + length + 8, y + ROW_HEIGHT / 2, row.told, "told"))
    parts.append(Markup("</svg>"))
    return Markup("").join(parts)


@dataclass(frozen=True)
class _Axis:
    lowest: float
    highest: float

    def x(self, value: float) -> float:
        left, right = self._ends()
        room = WIDTH - LABEL_WIDTH - VALUE_WIDTH
        clamped = min(max(value, left), right)
        return LABEL_WIDTH + room * (clamped - left) / (right - left)

    def _ends(self) -> tuple[float, float]:
        spread = self.highest - self.lowest or max(abs(self.highest), 1.0) * 0.1
        return self.lowest - 0.04 * spread, self.highest + 0.04 * spread

    def ticks(self) -> list[float]:
        """About five round values (Heckbert's nice numbers: 1, 2 or 5 times a power of ten)."""
        left, right = self._ends()
        rough = (right - left) / 5
        power = 10 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
        first = math.ceil(left / step)
        return [index * step for index in range(first, math.floor(right / step) + 1)]

    def grid(self, height: float, unit: str) -> Markup:
        parts = []
        for tick in self.ticks():
            parts.append(self.line(tick, height, "grid"))
            parts.append(_text(self.x(tick), height + 14, f"{tick:.4g}", "tick", "middle"))
        middle = LABEL_WIDTH + (WIDTH - LABEL_WIDTH - VALUE_WIDTH) / 2
        parts.append(_text(middle, height + 32, unit, "unit", "middle"))
        return Markup("").join(parts)

    def line(self, value: float, height: float, kind: str) -> Markup:
        return _line(self.x(value), 2, self.x(value), height, kind)


def _open(height: float, title: str) -> Markup:
    return Markup('<svg viewBox="0 0 {} {:.0f}" role="img" aria-label="{}" class="figure"><title>{}</title>').format(
        WIDTH, height, title, title
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(kind, x1, y1, x2, y2)


def _text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> Markup:
    return Markup(
        '<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}" dominant-baseline="central">{}</text>'
    ).format(kind, x, y, anchor, escape(words))


def _word(status: str) -> str:
    """A status as a class name, whatever it was."""
    return "".join(letter for letter in status if letter.isalnum() or letter == "-") or "same"
