"""A recording as an SVG that plays by CSS alone; a viewer that does not play it shows its last screen."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from tests.docs.pictures.recording import Frame, Row, Run
from tests.docs.pictures.svg import number

LONGEST_WAIT_S, END_S = 1.2, 4.0
"""No change is waited for longer than that; so long the last screen stays."""

_CHARACTER, _LINE, _MARGIN, _BAR = 7.83, 19, 20, 34  # pixels, at 13 px of a monospace font
_COLOURS = {
    "default": "#c9d1d9", "black": "#6e7681", "red": "#ff7b72", "green": "#3fb950", "brown": "#d29922",
    "yellow": "#d29922", "blue": "#58a6ff", "magenta": "#bc8cff", "cyan": "#39c5cf", "white": "#f0f6fc",
}  # fmt: skip
_STYLE = """
  text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre }
  .bold { font-weight: 600 } .typed { fill: #f0f6fc } .prompt { fill: #3fb950 }
"""


def draw(title: str, frames: Sequence[Frame]) -> str:
    """The SVG."""
    begins = _shortened([frame.at_s for frame in frames])
    whole_s = begins[-1] + END_S
    height_rows = max(len(_filled(frame.rows)) for frame in frames)
    width_cells = max(sum(len(run.text) for run in row) for frame in frames for row in frame.rows)
    width = round(2 * _MARGIN + _CHARACTER * width_cells)
    height = _BAR + _MARGIN + _LINE * height_rows
    spans: dict[tuple[float, float], str] = {}
    parts: list[str] = []
    for line in range(height_rows):
        rows = [frame.rows[line] if line < len(frame.rows) else () for frame in frames]
        for begin_s, end_s, row in _shown(begins, rows, whole_s):
            always = begin_s == 0 and end_s == whole_s
            name = "" if always else spans.setdefault((begin_s, end_s), f"s{len(spans)}")
            parts += _texts(row, _BAR + _MARGIN // 2 + _LINE * line + 13, name)
    moves = [_animation(name, begin_s, end_s, whole_s) for (begin_s, end_s), name in spans.items()]
    dots = "".join(
        f'<circle cx="{_MARGIN + 20 * n}" cy="17" r="6" fill="{c}"/>'
        for n, c in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'role="img" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title>",
            "<!-- made by: python -m tests.docs.pictures -->",
            f"<style>{_STYLE}" + "\n".join(moves),
            "  @media (prefers-reduced-motion: reduce) { text, rect { animation: none !important } }",
            "</style>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="9" fill="#0d1117" stroke="#57606a"/>',
            dots,
            *parts,
            "</svg>\n",
        ]
    )


def _shortened(at_s: Sequence[float]) -> list[float]:
    """The same moments without long waits, from 0 on."""
    begins = [0.0]
    for before, after in pairwise(at_s):
        begins.append(round(begins[-1] + min(after - before, LONGEST_WAIT_S), 2))
    return begins


def _filled(rows: Sequence[Row]) -> Sequence[Row]:
    """Without the empty rows at the end."""
    used = [place for place, row in enumerate(rows) if row]
    return rows[: used[-1] + 1] if used else ()


def _shown(begins: Sequence[float], rows: Sequence[Row], whole_s: float) -> list[tuple[float, float, Row]]:
    """From when to when a line of the screen shows what; not when it is empty."""
    found: list[tuple[float, float, Row]] = []
    for begin_s, end_s, row in zip(begins, [*begins[1:], whole_s], rows, strict=True):
        if found and found[-1][2] == row and found[-1][1] == begin_s:
            found[-1] = (found[-1][0], end_s, row)
        elif row:
            found.append((begin_s, end_s, row))
    return found


def _animation(name: str, begin_s: float, end_s: float, whole_s: float) -> str:
    """Shown from here to there, again and again; without animation, only what is on the last screen is shown."""
    last = end_s == whole_s
    steps = [f"0% {{ opacity: {int(not begin_s)} }}"]
    if begin_s:
        steps.append(f"{100 * begin_s / whole_s:.2f}% {{ opacity: 1 }}")
    if not last:
        steps.append(f"{100 * end_s / whole_s:.2f}% {{ opacity: 0 }}")
    steps.append(f"100% {{ opacity: {int(last)} }}")
    return (
        f"  .{name} {{ opacity: {int(last)}; animation: {name} {whole_s:.2f}s step-end infinite }} "
        f"@keyframes {name} {{ {' '.join(steps)} }}"
    )


def _texts(row: Row, y: int, name: str) -> list[str]:
    shown = f' class="{name}"' if name else ""
    parts, column, spans = [], 0, []
    for place, run in enumerate(row):
        if run.reverse:
            x = _MARGIN + _CHARACTER * column
            parts.append(
                f'<rect{shown} x="{number(x)}" y="{y - 14}" width="{number(_CHARACTER * len(run.text))}" '
                f'height="{_LINE}" fill="{_COLOURS.get(run.colour, "#c9d1d9")}"/>'
            )
        spans.append(_span(run, is_first=place == 0))
        column += len(run.text)
    attributes = f'x="{_MARGIN}" y="{y}" fill="{_COLOURS["default"]}" xml:space="preserve"'
    parts.append(f"<text{shown} {attributes}>{''.join(spans)}</text>")
    return parts


def _span(run: Run, *, is_first: bool) -> str:
    text = escape(run.text)
    if is_first and (run.text + " ").startswith("# "):
        return f'<tspan class="prompt"># </tspan><tspan class="typed">{escape(run.text[2:])}</tspan>'
    if run.reverse:
        return f'<tspan fill="#0d1117">{text}</tspan>'
    weight = ' class="bold"' if run.bold else ""
    if run.colour != "default":
        return f'<tspan{weight} fill="{_COLOURS.get(run.colour, _COLOURS["default"])}">{text}</tspan>'
    return f"<tspan{weight}>{text}</tspan>" if run.bold else text
