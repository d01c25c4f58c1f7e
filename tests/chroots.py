"""Scripts in mounts of their own, with a second root folder for `chroot`. Nothing stays mounted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

TIMEOUT_S = 120

Kind = Literal["mount", "folder"]
"""What the root folder is: a mount of /, or a plain folder with what is in /."""

_MAKE = {
    "mount": 'mount --rbind / "$ROOT"',
    "folder": """
for each in /*; do
    inside=$ROOT/${each#/}
    if [ -L "$each" ]; then
        ln -s "$(readlink "$each")" "$inside"
    elif [ -d "$each" ]; then
        mkdir "$inside"
        mount --rbind "$each" "$inside"
    fi
done""",
}
GPUCR = 'gpucr() { "$PYTHON" -m gpucr "$@"; }'


def run(script: str, root: Path, kind: Kind) -> subprocess.CompletedProcess[str]:
    """Run a script (sh) that has ``$ROOT`` and ``gpucr``, and may ``chroot "$ROOT"``. Needs root."""
    root.mkdir(mode=0o755)
    return subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-euc", f"{_MAKE[kind]}\n{GPUCR}\n{script}"],
        env={**os.environ, "ROOT": str(root), "PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
