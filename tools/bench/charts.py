"""Draws curves as an SVG, one panel per figure, over a logarithmic axis; and bars."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 300, 190  # of a panel, in pixels
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 34, 36  # margins inside a panel
BARS_WIDTH, NAMES, BAR = 640, 270, 24  # of a chart of bars, of their names, and the height of one
COLOURS = ("#1f6feb", "#d1570c", "#2da44e", "#8250df")


@dataclass(frozen=True)
class Panel:
    """Holds curves with one unit. All have the same points on the horizontal axis."""

    title: str  # with the unit
    curves: dict[str, Sequence[float]]  # by name


def svg(panels: Sequence[Panel], axis: str, points: Sequence[float]) -> str:
    """Draw the panels side by side; all vertical axes begin at 0."""
    width = WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" '
        f'viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate({number * WIDTH} 0)">')
        parts += _panel(panel, axis, points)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, axis: str, points: Sequence[float]) -> list[str]:
    top = nice_ceiling(max(max(values) for values in panel.curves.values()))
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    logs = [math.log(point) for point in points]
    span = (logs[-1] - logs[0]) or 1.0
    across = [LEFT + inner_width * (value - logs[0]) / span for value in logs]
    parts = [_text(WIDTH / 2, 14, panel.title, "middle"), _text(WIDTH / 2, HEIGHT - 4, axis, "middle")]
    for share in (0.0, 0.5, 1.0):
        y = TOP + inner_height * (1 - share)
        line = f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#d0d7de"/>'
        parts += [line, _text(LEFT - 5, y + 4, f"{top * share:,.4g}", "end")]
    for x, point in zip(across, points, strict=True):
        parts.append(_text(x, HEIGHT - BOTTOM + 14, f"{point:,.4g}", "middle"))
    for number, (name, values) in enumerate(panel.curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [
            (x, TOP + inner_height * (1 - value / top)) for x, value in zip(across, values, strict=True)
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in places]
        if len(panel.curves) > 1:
            parts.append(_text(LEFT + 4 + 110 * number, TOP - 6, name, "start", colour))
    return parts


def bars(title: str, values: dict[str, float], *, unit: str = "", mark: float | None = None) -> str:
    """Draw a horizontal bar for each value, from 0 on, with a line at ``mark``; the unit follows numbers."""
    height = TOP + BAR * len(values) + 8
    scale = (BARS_WIDTH - NAMES - 70) / max(values.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{BARS_WIDTH}" height="{height}" '
        f'viewBox="0 0 {BARS_WIDTH} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{BARS_WIDTH}" height="{height}" fill="white"/>',
        _text(BARS_WIDTH / 2, 18, title, "middle"),
    ]
    for number, (name, value) in enumerate(values.items()):
        y, width = TOP + BAR * number, value * scale
        parts += [
            _text(NAMES - 8, y + 13, name, "end"),
            f'<rect x="{NAMES}" y="{y}" width="{width:.1f}" height="{BAR - 6}" fill="{COLOURS[0]}"/>',
            _text(
                NAMES + width + 6,
                y + 13,
                f"{value:,.3g}{unit}" if value < 100 else f"{value:,.0f}{unit}",
                "start",
            ),
        ]
    if mark is not None:
        x = NAMES + mark * scale
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{height}" stroke="{COLOURS[1]}"/>')
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#24292f") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def nice_ceiling(value: float) -> float:
    """Return the least of 1, 2, 2.5, 5 and 10 times a power of ten that is not below the value; 1 for 0."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * (1 - 1e-9))
