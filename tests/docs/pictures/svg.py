"""A drawing of boxes, lines and text, as SVG that can be read on a light and on a dark page.

The colours follow ``prefers-color-scheme``. The drawing brings its own background, so it can also be read if a page has
another scheme than the reader's system. Text is text, and a box refuses one that is wider than itself.
"""

from __future__ import annotations

from html import escape

WIDTH = 720
"""Pixels: as wide as a page of the site is."""
SIZE = 15
"""Of the font, in pixels."""
_EM = 0.55  # the width of a letter of a sans-serif font beside its size, with some to spare

# What a box, a line or a text can be: how it is filled, and its outline.
LIGHT = {
    "page": ("#ffffff", "#d0d7de"),
    "run": ("#dafbe1", "#1a7f37"),
    "still": ("#fff8c5", "#9a6700"),
    "gpu": ("#dafbe1", "#1a7f37"),
    "host": ("#fff1d6", "#bc4c00"),
    "disk": ("#ddf4ff", "#0969da"),
    "box": ("#f6f8fa", "#6e7781"),
    "plain": ("#afb8c1", "#afb8c1"),
    "captured": ("#54aeff", "#54aeff"),
    "interposed": ("#2da44e", "#2da44e"),
    "hole": ("none", "#8c959f"),
    "ink": ("#1f2328", "none"),
    "soft": ("#57606a", "none"),
    "line": ("none", "#57606a"),
    "grid": ("none", "#d8dee4"),
    "stop": ("none", "#cf222e"),
    "a": ("none", "#8250df"),
    "b": ("none", "#bc4c00"),
    "c": ("none", "#0969da"),
    "d": ("none", "#1a7f37"),
    "e": ("none", "#cf222e"),
}
DARK = {
    "page": ("#0d1117", "#30363d"),
    "run": ("#12361f", "#3fb950"),
    "still": ("#3b2f0b", "#d29922"),
    "gpu": ("#12361f", "#3fb950"),
    "host": ("#43250b", "#f0883e"),
    "disk": ("#0c2d4d", "#58a6ff"),
    "box": ("#21262d", "#8b949e"),
    "plain": ("#6e7681", "#6e7681"),
    "captured": ("#388bfd", "#388bfd"),
    "interposed": ("#2ea043", "#2ea043"),
    "hole": ("none", "#6e7681"),
    "ink": ("#e6edf3", "none"),
    "soft": ("#9da7b1", "none"),
    "line": ("none", "#9da7b1"),
    "grid": ("none", "#2b323b"),
    "stop": ("none", "#ff7b72"),
    "a": ("none", "#bc8cff"),
    "b": ("none", "#f0883e"),
    "c": ("none", "#58a6ff"),
    "d": ("none", "#3fb950"),
    "e": ("none", "#ff7b72"),
}
GROUNDS = ("page", "run", "still", "gpu", "host", "disk", "box")
"""What text is on; the other kinds are lines, bars and the text itself."""


def _colours(colours: dict[str, tuple[str, str]]) -> str:
    return " ".join(f".{kind} {{ fill: {fill}; stroke: {stroke} }}" for kind, (fill, stroke) in colours.items())


_STYLE = f"""<style>
  text {{ font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }}
  .hole {{ stroke-dasharray: 4 4 }} .bold {{ font-weight: 600 }}
  {_colours(LIGHT)}
  @media (prefers-color-scheme: dark) {{ {_colours(DARK)} }}
</style>"""


def number(value: float) -> str:
    """A coordinate, without needless digits."""
    return f"{value:.1f}".removesuffix(".0")


class Drawing:
    """Collects what is drawn; :meth:`text` of the whole is :meth:`svg`."""

    def __init__(self, title: str, height: int, made_by: str = "python -m tests.docs.pictures") -> None:
        self._title = title
        self._height = height
        self._made_by = made_by
        self._parts: list[str] = []

    def text(
        self, x: float, y: float, words: str, *, kind: str = "ink", anchor: str = "start", size: int = SIZE,
        bold: bool = False, room: float = 0,
    ) -> None:  # fmt: skip
        """One line of text. ``room``: how wide it may be, in pixels; default up to the edge of the drawing."""
        width = _EM * size * len(words)
        left = {"start": x, "middle": x - width / 2, "end": x - width}[anchor]
        if left < 0 or left + width > WIDTH or (room and width > room):
            raise ValueError(f"{words!r} has no room: {width:.0f} px")
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        weight = " bold" if bold else ""
        attributes = f'x="{number(x)}" y="{number(y)}" font-size="{size}"{place}'
        self._parts.append(f'<text class="{kind}{weight}" {attributes}>{escape(words)}</text>')

    def notes(self, y: float, *lines: str) -> None:
        """What there is to say below."""
        for place, line in enumerate(lines):
            self.text(20, y + 22 * place, line, size=13)

    def box(
        self, x: float, y: float, width: float, height: float, *words: str, kind: str = "box", size: int = SIZE
    ) -> None:
        """A box with lines of text in its middle."""
        self.bar(x, y, width, height, kind, corner=6)
        step = size + 4
        top = y + height / 2 - step * (len(words) - 1) / 2 + size * 0.36
        for place, line in enumerate(words):
            self.text(x + width / 2, top + step * place, line, anchor="middle", size=size, room=width - 4)

    def line(
        self, *points: tuple[float, float], kind: str = "line", width: float = 1.5, arrow: bool = False,
        dashed: bool = False,
    ) -> None:  # fmt: skip
        """A line through points, with an arrow at its end."""
        path = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(f'<path class="{kind}" fill="none" stroke-width="{width:g}"{dash} d="{path}"/>')
        if arrow:
            self._arrow(points[-2], points[-1], kind)

    def _arrow(self, before: tuple[float, float], end: tuple[float, float], kind: str) -> None:
        dx, dy = end[0] - before[0], end[1] - before[1]
        length = (dx * dx + dy * dy) ** 0.5
        dx, dy = dx / length, dy / length
        x, y = end[0] - 9 * dx, end[1] - 9 * dy
        points = ((x - 4 * dy, y + 4 * dx), end, (x + 4 * dy, y - 4 * dx))
        path = "M" + "L".join(f"{number(across)} {number(down)}" for across, down in points)
        self._parts.append(f'<path class="{kind}" fill="none" stroke-width="1.5" d="{path}"/>')

    def bar(self, x: float, y: float, width: float, height: float, kind: str, corner: int = 0) -> None:
        """A rectangle."""
        size = f'width="{number(width)}" height="{number(height)}"'
        round_corners = f' rx="{corner}"' if corner else ""
        self._parts.append(f'<rect class="{kind}" x="{number(x)}" y="{number(y)}" {size}{round_corners}/>')

    def dot(self, x: float, y: float, kind: str) -> None:
        """A point of a curve."""
        self._parts.append(f'<circle class="{kind}" cx="{number(x)}" cy="{number(y)}" r="3"/>')

    def svg(self) -> str:
        """The file."""
        title = escape(self._title)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{self._height}" '
                f'viewBox="0 0 {WIDTH} {self._height}" role="img" aria-label="{title}">',
                f"<title>{title}</title>",
                f"<!-- made by: {self._made_by} -->",
                _STYLE,
                f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{self._height - 1}" rx="8"/>',
                *self._parts,
                "</svg>\n",
            ]
        )
