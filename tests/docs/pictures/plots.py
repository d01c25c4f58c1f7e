"""Plots of what was measured: each is drawn from a file of benchmarks/results, and from nothing else."""

from __future__ import annotations

import itertools
import json
import math
from decimal import Decimal
from typing import Any

from tests.docs.pages import ROOT
from tests.docs.pictures.svg import Drawing

RESULTS = ROOT / "benchmarks" / "results"

_LEFT, _RIGHT = 190, 610  # where bars begin, and where the longest one ends
_BAR = 17
_NAMES = {
    "plain": "plain driver and CRIU",
    "captured": "gpucr, captured",
    "interposed": "gpucr, interposed",
    "gpucr": "gpucr",
}
_COLOURS = {"plain": "plain", "captured": "captured", "interposed": "interposed", "gpucr": "interposed"}


def read(name: str) -> dict[str, Any]:
    """What a file of benchmarks/results has; figures with the digits that it gives them."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(), parse_float=Decimal)
    return found


def figures(found: dict[str, Any]) -> list[Decimal]:
    """Every figure of a file of bars, in seconds."""
    return [row[tool] for group in found["groups"] for row in group["rows"] for tool in found["tools"] if tool in row]


def bars(found: dict[str, Any]) -> str:
    """A bar for each figure: shorter is better."""
    tools = found["tools"]
    rows = [len([tool for tool in tools if tool in row]) for group in found["groups"] for row in group["rows"]]
    height = 96 + 34 * len(found["groups"]) + sum(_BAR * count + 9 for count in rows) + 48
    groups = "; ".join(
        f"{group['name']}: "
        + ", ".join(f"{row['name']} " + " / ".join(str(row[t]) for t in tools if t in row) for row in group["rows"])
        for group in found["groups"]
    )
    drawing = Drawing(f"{found['title']}, seconds ({' / '.join(tools)}). {groups}", height)
    drawing.text(20, 32, found["title"], bold=True, size=17)
    drawing.text(700, 32, "seconds; less is better", anchor="end", kind="soft", size=13)
    x = 20.0
    for tool in tools:
        drawing.bar(x, 51, 16, 14, _COLOURS[tool])
        drawing.text(x + 24, 63, _NAMES[tool], size=14)
        x += 56 + 8 * len(_NAMES[tool])
    longest, y = max(figures(found)), 84
    for group in found["groups"]:
        drawing.text(20, y + 18, group["name"], bold=True)
        y += 34
        for row in group["rows"]:
            own = [tool for tool in tools if tool in row]
            drawing.text(_LEFT - 12, y + _BAR * len(own) / 2 + 5, row["name"], anchor="end", size=14)
            for tool in own:
                width = (_RIGHT - _LEFT) * float(row[tool] / longest)
                drawing.bar(_LEFT, y, width, _BAR - 2, _COLOURS[tool])
                drawing.text(_LEFT + width + 8, y + 12, str(row[tool]), size=13)
                y += _BAR
            y += 9
    drawing.text(20, height - 36, f"{found['hardware']}, driver {found['driver']}", kind="soft", size=13)
    drawing.text(20, height - 16, f"{found['statistic']}, {found['date']}", kind="soft", size=13)
    return drawing.svg()


def curves(found: dict[str, Any]) -> str:
    """What intervals between checkpoints cost, over the mean time between failures; both scales are logarithmic."""
    drawing = Drawing(
        "Time lost over the mean time between failures: auto lies on the theoretical optimum, fixed intervals above it",
        460,
    )
    drawing.text(20, 32, "Time lost to checkpoints and failures (simulated)", bold=True, size=17)
    rows = found["rows"]
    left, right, top, bottom = 76, 690, 96, 400
    hours = [math.log(row["mtbf_h"]) for row in rows]
    low, high = math.log(0.003), math.log(1.0)

    def height(part: float) -> float:
        return bottom - (bottom - top) * (math.log(part) - low) / (high - low)

    for part in (0.003, 0.01, 0.03, 0.1, 0.3, 1.0):
        drawing.line((left, height(part)), (right, height(part)), kind="grid", width=1)
        drawing.text(left - 8, height(part) + 5, f"{100 * part:g} %", anchor="end", kind="soft", size=13)
    places = [left + (right - left) * (hour - hours[0]) / (hours[-1] - hours[0]) for hour in hours]
    for x, row in zip(places, rows, strict=True):
        drawing.text(x, bottom + 20, f"{float(row['mtbf_h']):g}", anchor="middle", kind="soft", size=13)
    drawing.text(
        (left + right) / 2, bottom + 44, "mean time between failures, hours", anchor="middle", kind="soft", size=13
    )
    lines = [(f"every {name}", [row["fixed"][name] for row in rows]) for name in rows[0]["fixed"]]
    lines += [("auto", [row["automatic"] for row in rows]), ("optimum in theory", [row["optimum"] for row in rows])]
    named = 20.0
    for (name, parts), kind in zip(lines, "abcde", strict=True):
        is_theory = name == "optimum in theory"
        thick = 4.0 if name == "auto" else 2.0
        drawing.line((named, 62), (named + 24, 62), kind=kind, width=thick, dashed=is_theory)
        drawing.text(named + 32, 67, name, size=14)
        named += 46 + 7.7 * len(name)
        points = list(zip(places, [height(float(part)) for part in parts], strict=True))
        drawing.line(*points, kind=kind, width=thick, dashed=is_theory)
        if not is_theory:
            for point in points:
                drawing.dot(*point, kind)
    return drawing.svg()


def who_is_awake(found: dict[str, Any]) -> str:
    """Device memory over time, and below it a row for each server: a bar while it is awake."""
    samples = found["samples"]
    names = sorted({name for _, _, awake in samples for name in awake})
    left, right, top, bottom, row = 84, 690, 64, 190, 26
    end_s, whole = float(samples[-1][0]), float(found["gpu_gib"])
    height = bottom + 24 + row * len(names) + 56
    drawing = Drawing(f"{found['title']}: device memory in use over time, and which server is awake", height)
    drawing.text(20, 32, found["title"], bold=True, size=17)
    drawing.text(700, 32, "GiB in use, and who is awake", anchor="end", kind="soft", size=13)

    def across(seconds: float) -> float:
        return left + (right - left) * seconds / end_s

    def up(gib: float) -> float:
        return bottom - (bottom - top) * gib / whole

    for gib in (0.0, whole / 2, whole):
        drawing.line((left, up(gib)), (right, up(gib)), kind="grid", width=1, dashed=gib == whole)
        drawing.text(left - 8, up(gib) + 5, f"{gib:.0f}", anchor="end", kind="soft", size=13)
    points: list[tuple[float, float]] = []
    for (begin, gib, _), (end, _, _) in itertools.pairwise(samples):  # each lasts until something else is seen
        points += [(across(float(begin)), up(float(gib))), (across(float(end)), up(float(gib)))]
    drawing.line(*points, kind="c", width=1.5)
    first = bottom + 24
    for place, name in enumerate(names):
        drawing.text(left - 8, first + row * place + 15, name, anchor="end", size=13)
    for (begin, _, awake), (end, _, _) in itertools.pairwise(samples):
        for name in awake:
            y = first + row * names.index(name)
            drawing.bar(across(float(begin)), y, across(float(end)) - across(float(begin)), row - 6, "interposed")
    below = first + row * len(names)
    for seconds in range(0, int(end_s) + 1, 60):
        drawing.text(across(seconds), below + 14, f"{seconds} s", anchor="middle", kind="soft", size=13)
    drawing.text(
        20, height - 16, f"{found['hardware']}, driver {found['driver']}, {found['date']}", kind="soft", size=13
    )
    return drawing.svg()


def panels(found: dict[str, Any]) -> str:
    """Seconds over a size and over a share, in a panel each: how long a job stands still, and the whole dump."""
    about, top, bottom = found["curves"], 100, 340
    drawing = Drawing(f"{found['title']}: how long they stand still and take, with and without a first pass", 440)
    drawing.text(20, 32, found["title"], bold=True, size=17)
    drawing.text(700, 32, "seconds", anchor="end", kind="soft", size=13)
    x = 20.0
    for name, kind, dashed in (
        ("stands still", "d", False), ("whole", "d", True),
        ("stands still, no first pass", "b", False), ("whole, no first pass", "b", True),
    ):  # fmt: skip
        drawing.line((x, 62), (x + 24, 62), kind=kind, width=2, dashed=dashed)
        drawing.text(x + 32, 67, name, size=14)
        x += 48 + 7.4 * len(name)
    highest = max(value for panel in about["panels"] for values in panel["whole"].values() for value in values)
    for panel, left in zip(about["panels"], (56.0, 406.0), strict=True):
        _panel(drawing, panel, (left, left + 284.0), (top, bottom), float(highest))
    drawing.text(20, 408, f"{about['hardware']}, driver {found['driver']}", kind="soft", size=13)
    drawing.text(20, 428, about["statistic"], kind="soft", size=13)
    return drawing.svg()


def _panel(
    drawing: Drawing, panel: dict[str, Any], across: tuple[float, float], down: tuple[float, float], highest: float
) -> None:
    (left, right), (top, bottom) = across, down
    last = float(panel["at"][-1])
    for seconds in range(0, int(highest) + 1, 5):
        y = bottom - (bottom - top) * seconds / highest
        drawing.line((left, y), (right, y), kind="grid", width=1)
        drawing.text(left - 8, y + 5, f"{seconds}", anchor="end", kind="soft", size=13)
    places = [left + (right - left) * float(each) / last for each in panel["at"]]
    free = left - 100.0
    for x, each in zip(places, panel["at"], strict=True):
        if x - free >= 24:  # the first of those that stand too close
            drawing.text(x, bottom + 20, f"{each}", anchor="middle", kind="soft", size=13)
            free = x
    drawing.text((left + right) / 2, bottom + 42, panel["name"], anchor="middle", kind="soft", size=13)
    for measured, dashed in (("whole", True), ("still", False)):
        for way, kind in (("none", "b"), ("first", "d")):
            points = [
                (x, bottom - (bottom - top) * float(seconds) / highest)
                for x, seconds in zip(places, panel[measured][way], strict=True)
            ]
            drawing.line(*points, kind=kind, width=2, dashed=dashed)
            for point in points:
                drawing.dot(*point, kind)


PLOTS = {
    "compare": bars, "interposed": bars, "intervals": curves, "on-demand": who_is_awake, "incremental": panels,
}  # fmt: skip
"""Name of the file in benchmarks/results, and of the picture → what draws it."""


def draw(name: str) -> str:
    """A plot, from its file."""
    return PLOTS[name](read(name))
