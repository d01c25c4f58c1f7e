"""How Sphinx makes the documentation site of the pages that are read on the forge as well; scripts/docs runs it.

The source folder is the root of the clone, so that a link from page to page is the same in both places.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))

import generated  # noqa: E402 - beside this file

generated.write(ROOT / "build" / "reference")

project = "gpucr"
author = "the gpucr authors"
release = re.findall(r'__version__ = "(.*)"', (ROOT / "src/gpucr/version.py").read_text())[0]

extensions = ["myst_parser"]
root_doc = "docs/site/index"
include_patterns = [
    "docs/**",
    "build/reference/*.md",
    "src/gpucr/error_codes.md",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "RELEASING.md",
    "SECURITY.md",
]
myst_heading_anchors = 4  # the same anchors as the forge makes
myst_links_external_new_tab = False

html_theme = "furo"
html_title = f"gpucr {release}"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
# Links to files that are no pages (scripts, sources) stand for those files in the clone.
suppress_warnings = ["myst.header"]
html_static_path = ["static"]
html_css_files = ["gpucr.css"]
