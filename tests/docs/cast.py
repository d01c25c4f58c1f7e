"""Record the picture of the main page: ``python -m tests.docs.cast`` runs its commands and writes the SVG. Needs root.

The commands run on the simulated driver in namespaces of their own, as those of the pages do (sessions.py). What they
print is real, and so is how long they take, up to a second or so: no reader waits longer. The SVG is animated by CSS
alone, and a viewer that does not animate shows all of it. Its own background makes it fit light and dark pages.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path

from tests.docs.sessions import play

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "session.svg"
COMMANDS = (
    "gpucr run --name count -- gpucr sim counter --port 7000 --mib 512",
    "gpucr exec count -- gpucr sim ask 7000",
    "gpucr suspend count",
    "gpucr ps",
    "gpucr resume count",
    "gpucr dump count --to /var/snapshots/a",
    "gpucr ps",
    "gpucr restore /var/snapshots/a | head -n 1",
    "gpucr exec count -- gpucr sim ask 7000",
)
_TITLE = "A job on a GPU is suspended, resumed, written to disk and restored"
_BEFORE = 'eval "$(gpucr sim env)"'
_CLOCK = "date +%s.%N"

_KEY_S, _LONGEST_WAIT_S, _PAUSE_S, _END_S = 0.03, 1.2, 0.6, 5.0
_CHARACTER, _LINE, _MARGIN, _BAR = 8.43, 20, 20, 34  # pixels, at 14 px of a monospace font
_STYLE = """
  text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; white-space: pre }
  .out { fill: #b1bac4 } .in { fill: #f0f6fc } .prompt { fill: #3fb950 }
"""


@dataclass(frozen=True)
class Scene:
    """One command: what it printed, and the seconds that it took."""

    command: str
    shown: tuple[str, ...]
    seconds: float


def record() -> list[Scene]:
    """Run the commands."""
    typed = [_BEFORE, _CLOCK]
    for command in COMMANDS:
        typed += [command, _CLOCK]
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        (root / "snapshots").mkdir()
        answers = play(typed, root / "home", {"/var/snapshots": f"{root}/snapshots"})[1:]
    clock = [float(answer.stdout[0]) for answer in answers[::2]]
    return [Scene(command, answers[2 * n + 1].stdout, clock[n + 1] - clock[n]) for n, command in enumerate(COMMANDS)]


def draw(scenes: list[Scene]) -> str:
    """The SVG."""
    rows: list[tuple[float, str, bool]] = []  # when it is shown, what, and whether it was typed
    now = 0.5
    for scene in scenes:
        rows.append((now, scene.command, True))
        now += _KEY_S * len(scene.command) + min(scene.seconds, _LONGEST_WAIT_S)
        rows += [(now, line, False) for line in scene.shown]
        now += _PAUSE_S
    whole = now + _END_S
    width = round(2 * _MARGIN + _CHARACTER * max(len(text) + 2 * is_typed for _, text, is_typed in rows))
    height = _BAR + _MARGIN + _LINE * len(rows)
    frames, lines = [], []
    for number, (at, text, is_typed) in enumerate(rows):
        y = _BAR + _MARGIN // 2 + _LINE * number + 14
        percent = 100 * at / whole
        frames.append(
            f"  @keyframes r{number} {{ 0%, {percent:.2f}% {{ opacity: 0 }} {percent + 0.01:.2f}% {{ opacity: 1 }} }}"
        )
        prompt = '<tspan class="prompt"># </tspan>' if is_typed else ""
        kind = "in" if is_typed else "out"
        lines.append(
            f'<text class="{kind}" x="{_MARGIN}" y="{y}" xml:space="preserve" '
            f'style="animation: r{number} {whole:.1f}s infinite">{prompt}{escape(text)}</text>'
        )
    dots = "".join(
        f'<circle cx="{_MARGIN + 20 * n}" cy="17" r="6" fill="{c}"/>'
        for n, c in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'role="img" aria-label="{_TITLE}">',
            f"<title>{_TITLE}</title>",
            "<!-- made by: python -m tests.docs.cast -->",
            f"<style>{_STYLE}" + "\n".join(frames),
            "  @media (prefers-reduced-motion: reduce) { text { animation: none !important } }",
            "</style>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="9" fill="#0d1117" stroke="#57606a"/>',
            dots,
            *lines,
            "</svg>\n",
        ]
    )


def as_page(picture: str) -> str:
    """The picture's commands and answers as a page has them, for the test that types them."""
    rows = re.findall(r'<text class="(in|out)"[^>]*>(.*?)</text>', picture)
    lines = [unescape(re.sub(r"<[^>]*>", "", text)) for _kind, text in rows]
    return "\n".join(["```console", f"# {_BEFORE}", *lines, "```", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(record()))
