"""How long tests wait before they give up: an emulated processor takes ten times as long.

``GPUCR_TEST_PATIENCE=10`` multiplies the limits.
"""

from __future__ import annotations

import os

PATIENCE = int(os.environ.get("GPUCR_TEST_PATIENCE", "1"))
