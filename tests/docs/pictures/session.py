"""The session of the main page: its commands run one after the other, and the tests type them again.

They run on the simulated driver in namespaces of their own, as those of the pages do (sessions.py); only root can
record. What they print is real, and so is how long they take.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Sequence
from html import unescape
from pathlib import Path

from tests.docs.pages import DOCS
from tests.docs.pictures.recording import Frame, Row, Run
from tests.docs.sessions import play

PICTURE = DOCS / "pictures" / "session.svg"
TITLE = "A job on a GPU is suspended, resumed, written to disk and restored"
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
_BEFORE = 'eval "$(gpucr sim env)"'
_CLOCK = "date +%s.%N"
_KEY_S, _PAUSE_S = 0.03, 0.6


def record() -> list[Frame]:
    """Run the commands: each is on the screen when it has been typed, and what it printed when it has ended."""
    typed = [_BEFORE, _CLOCK]
    for command in COMMANDS:
        typed += [command, _CLOCK]
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        (root / "snapshots").mkdir()
        answers = play(typed, root / "home", {"/var/snapshots": f"{root}/snapshots"})[1:]
    clock = [float(answer.stdout[0]) for answer in answers[::2]]
    return frames([(command, answers[2 * n + 1].stdout, clock[n + 1] - clock[n]) for n, command in enumerate(COMMANDS)])


def frames(scenes: Iterable[tuple[str, Sequence[str], float]]) -> list[Frame]:
    """The screens of commands, what each printed, and the seconds that it took."""
    found: list[Frame] = []
    rows: tuple[Row, ...] = ()
    now_s = 0.0
    for command, printed, seconds in scenes:
        rows = (*rows, (Run(f"# {command}"),))
        found.append(Frame(now_s, rows))
        now_s += _KEY_S * len(command) + seconds
        rows = (*rows, *((Run(line),) for line in printed))
        found.append(Frame(now_s, rows))
        now_s += _PAUSE_S
    return found


def as_page(picture: str) -> str:
    """The picture's commands and answers as a page has them, for the test that types them."""
    rows = re.findall(r"<text[^>]*>(.*?)</text>", picture)
    lines = [unescape(re.sub(r"<[^>]*>", "", text)) for text in rows]
    return "\n".join(["```console", f"# {_BEFORE}", *lines, "```", ""])
