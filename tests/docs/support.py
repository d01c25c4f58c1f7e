"""The facts that preflight knows, for the tests, and the pages that have them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from gpucr.diagnosis.canaries.results import WHAT
from gpucr.diagnosis.preflight.support import gpu_memory, gpu_use, interposed, machine, outside, processes, ties, users
from gpucr.diagnosis.preflight.support.fact import Fact
from tests.docs.pages import DOCS

MAIN_PAGE = DOCS / "what-comes-back.md"
MODULES = (gpu_memory, interposed, gpu_use, processes, ties, outside, machine, users)
_BEGIN, _END = "<!-- made by tests/docs/support.py: canaries -->\n", "<!-- end -->"


def site_module(name: str) -> ModuleType:
    """A module of docs/site, which makes pages of the documentation site."""
    path: Path = DOCS / "site" / f"{name}.py"
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # they import each other
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def facts(module: ModuleType) -> dict[str, Fact]:
    """The facts in a module of `gpucr.diagnosis.preflight.support`, by name and in order."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Fact)}


def with_canaries(text: str) -> str:
    """The main page with a new list of canaries between its marks."""
    before, found, rest = text.partition(_BEGIN)
    assert found, "the page has no mark for canaries"
    rows = "".join(f"| `{name}` | {what} |\n" for name, what in WHAT.items())
    return f"{before}{_BEGIN}| canary | measures |\n| --- | --- |\n{rows}{_END}{rest.partition(_END)[2]}"
