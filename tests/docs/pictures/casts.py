"""The recordings of the documentation. Each is a real session on the simulated driver."""

from __future__ import annotations

from tests.docs.pictures import screen, session
from tests.docs.pictures.recording import Frame, shell


def demo() -> list[Frame]:
    """What `gpucr demo` does and checks."""
    with shell(80, 40) as camera:
        camera.type("gpucr demo")
    return camera.frames


def progress() -> list[Frame]:
    """The live lines of a dump that leaves its job running."""
    started = "gpucr run --name train -- gpucr sim counter --port 7000 --mib 1024"
    with shell(100, 30, (started,)) as camera:
        camera.type("gpucr dump train --to /var/snapshots/a --leave-running | head -n 1")
    return camera.frames


def top() -> list[Frame]:
    """Two jobs; one is suspended and resumed by keys."""
    started = tuple(
        f"gpucr run --name {name} -- gpucr sim counter --port 7000 --mib {mib}"
        for name, mib in (("train", 768), ("serve", 256))
    )
    with shell(92, 10, started) as camera:
        camera.type("gpucr top", wait=False)
        camera.see("serve")
        camera.rest(1)
        camera.press("s", "y")
        camera.press("y", "checkpointed:")
        camera.rest(1)
        camera.press("r", "y")
        camera.press("y", "running:")
        camera.rest(1)
    return camera.frames


def survives() -> list[Frame]:
    """A supervised job is killed, and comes back from its latest checkpoint."""
    with shell(100, 30) as camera:
        camera.type("gpucr run --every 3s --to /var/snapshots/store --name train -- gpucr sim counter --port 7000")
        camera.type("gpucr exec train -- gpucr sim ask 7000")
        camera.rest(5)
        camera.type("gpucr ls /var/snapshots/store")
        camera.type("gpucr exec train -- gpucr sim ask 7000")
        camera.rest(5)
        camera.type("pkill -9 counter")
        camera.rest(8)
        camera.type("gpucr logs train")
        camera.type("gpucr exec train -- gpucr sim ask 7000")
    return camera.frames


CASTS = {
    "session": (session.record, session.TITLE),
    "demo": (demo, "gpucr demo: a CUDA program is dumped, killed and restored, and every step is checked"),
    "progress": (progress, "gpucr dump: the steps of a dump that leaves its job running, each with its progress"),
    "top": (top, "gpucr top: two jobs on GPUs; one is suspended and resumed with a key"),
    "survives": (survives, "A supervised job is killed, and its supervisor brings it back from the latest checkpoint"),
}
"""Name of the file in docs/pictures → what records it, and what it shows."""


def record(name: str) -> str:
    """Record one, as SVG. Needs root; takes seconds to a minute."""
    play, title = CASTS[name]
    return screen.draw(title, play())
