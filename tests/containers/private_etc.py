"""An /etc/criu of a test's own: this machine's is neither read nor changed."""

from __future__ import annotations

from pathlib import Path

_BIND = 'mount --rbind /etc "$0/shared" && mount --bind "$0/etc" /etc && exec "$@"'


def make_private_etc(folder: Path) -> tuple[str, ...]:
    """The beginning of a command that sees an /etc with everything that it has, but ``folder``/etc/criu as its criu.

    There may be no /etc/criu to mount over. So /etc as a whole is another folder, with links to what it had.
    """
    etc = folder / "etc"
    (etc / "criu").mkdir(parents=True)
    (folder / "shared").mkdir()
    for entry in Path("/etc").iterdir():
        if entry.name != "criu":
            (etc / entry.name).symlink_to(folder / "shared" / entry.name)
    return ("unshare", "--mount", "--propagation", "private", "sh", "-c", _BIND, str(folder))
