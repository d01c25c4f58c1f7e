"""Time against device memory while several servers share a GPU: a picture from tests/hardware/on_demand.py's JSON.

    .venv/bin/python -m benchmarks.on_demand RESULTS PICTURE

RESULTS is the file of its ``--json``, with the GPU, sizes and samples of one run. PICTURE is a PNG. Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GIB = 1 << 30
COLOURS = ("#2f7d32", "#1f5f99", "#b25d00", "#6b4c9a", "#8a8f98", "#a23b3b", "#4a7c7c", "#7a6a2f", "#555555", "#c2185b")


def spans(samples: Sequence[tuple[float, int, Sequence[str]]], name: str) -> list[tuple[float, float]]:
    """When a server was awake: (begin, length) in seconds."""
    found: list[tuple[float, float]] = []
    begin_s: float | None = None
    last_s = 0.0
    for at_s, _, awake in samples:
        if name in awake and begin_s is None:
            begin_s = at_s
        elif name not in awake and begin_s is not None:
            found.append((begin_s, at_s - begin_s))
            begin_s = None
        last_s = at_s
    return [*found, (begin_s, last_s - begin_s)] if begin_s is not None else found


def draw(outcome: Mapping[str, Any], path: Path) -> None:
    """Write the picture: memory in use above, who is awake below."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    samples = outcome["memory"]
    names = sorted({name for _, _, awake in samples for name in awake})
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(9, 4.5), sharex=True, gridspec_kw={"height_ratios": [2, 0.4 + 0.3 * len(names)]}
    )
    above.plot([each[0] for each in samples], [each[1] / GIB for each in samples], color="#333333", linewidth=1)
    above.axhline(outcome["gpu_bytes"] / GIB, color="#9aa5b1", linestyle="--", linewidth=1)
    above.set_ylabel("GiB in use")
    above.set_ylim(bottom=0)
    for number, name in enumerate(names):
        below.broken_barh(spans(samples, name), (number - 0.35, 0.7), color=COLOURS[number % len(COLOURS)])
    below.set_yticks(range(len(names)), names)
    below.set_xlabel("seconds")
    for panel in (above, below):
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{outcome['servers']} servers on {outcome['gpu']}: who is awake")
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Draw it."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
