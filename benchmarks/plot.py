"""The comparison as a picture: one bar for each tool, thing measured and size."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.summary import MEASURED, TOOLS

COLOURS = {"plain": "#9aa5b1", "gpucr": "#2f7d32"}
BAR_WIDTH = 0.38


def is_possible() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(sizes: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Write a PNG with one panel for each size, from what `benchmarks.summary.size_as_json` gives."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    shown = [size for size in sizes if "medians" in size]
    figure, panels = pyplot.subplots(1, len(shown), figsize=(1.5 + 4.5 * len(shown), 4.5), squeeze=False)
    for size, panel in zip(shown, panels[0], strict=True):
        _draw_size(panel, size)
    panels[0][0].set_ylabel("seconds (median)")
    panels[0][-1].legend(frameon=False)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=120)
    pyplot.close(figure)


def _draw_size(panel: Any, size: Mapping[str, Any]) -> None:
    medians = size["medians"]
    names = [what for what in MEASURED if any(what in medians[tool] for tool in TOOLS)]
    for place, tool in enumerate(TOOLS):
        at = [number + (place - 0.5) * BAR_WIDTH for number in range(len(names))]
        heights = [medians[tool].get(what, 0.0) for what in names]
        bars = panel.bar(at, heights, BAR_WIDTH, label=tool, color=COLOURS[tool])
        labels = [f"{height:.2f}" if what in medians[tool] else "" for what, height in zip(names, heights, strict=True)]
        panel.bar_label(bars, labels=labels, fontsize=7, padding=1)
    panel.set_xticks(range(len(names)), [_name(what, size["ratios"].get(what)) for what in names])
    panel.set_title(f"{size['gib']:g} GiB")
    panel.margins(y=0.12)
    panel.spines[["top", "right"]].set_visible(False)


def _name(what: str, ratio: float | None) -> str:
    return what if ratio is None else f"{what}\n{ratio:.2f}×"
