"""Puts the manual pages into the wheel; they are made of the commands, as the wheel is built."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ManualPages(BuildHookInterface):  # type: ignore[type-arg]  # hatchling's parameter is its own builder's
    """An editable install has none: it would need gpucr's dependencies before they are installed."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make the pages and name them as files of share/man/man1."""
        if version == "editable":
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from gpucr.cli.manual import write_pages

        self._folder = tempfile.TemporaryDirectory(prefix="gpucr-man-")
        for path in write_pages(Path(self._folder.name)):
            build_data["shared_data"][str(path)] = f"share/man/man1/{path.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was made."""
        if version != "editable":
            self._folder.cleanup()
