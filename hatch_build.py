"""Puts into the wheel what is made as it is built: the manual pages, and the programs and libraries that are in C."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class MadeFiles(BuildHookInterface):  # type: ignore[type-arg]  # hatchling's parameter is its own builder's
    """An editable install has none: it would need gpucr's dependencies first, and compiles what it uses.

    ``$CC`` names the compiler, and so the processor and the C library that the wheel is for (scripts/wheels).
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make the pages, files of share/man/man1, and what is in C, which gives the wheel its platform."""
        if version == "editable":
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from gpucr.cli.manual import write_pages

        self._folder = tempfile.TemporaryDirectory(prefix="gpucr-wheel-")
        for path in write_pages(Path(self._folder.name, "man")):
            build_data["shared_data"][str(path)] = f"share/man/man1/{path.name}"
        self._add_compiled(build_data)

    def _add_compiled(self, build_data: dict[str, Any]) -> None:
        from gpucr.interposer.build import LIBRARY, compile_library, platform_tag
        from gpucr.sim.build import SHIPPED, compile_products

        library = compile_library(Path(self._folder.name))
        simulator = Path(self._folder.name, "sim")
        products = compile_products(simulator)
        build_data["force_include"][str(library)] = f"gpucr/interposer/{LIBRARY}"
        build_data["force_include"][str(simulator)] = f"gpucr/sim/{SHIPPED.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(library, *products)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was made."""
        if version != "editable":
            self._folder.cleanup()
