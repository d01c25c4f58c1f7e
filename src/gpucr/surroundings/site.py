"""Where a job is restored."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field

from gpucr.criu.engine import Criu
from gpucr.jobs.sandbox import BareKeeper, EmptySandbox, HelpedKeepers, Network
from gpucr.linux import processes
from gpucr.snapshot.shared_files import ROOT

if TYPE_CHECKING:
    from gpucr.helper.client import HelperCriu


class RestoreSite(Struct, frozen=True):
    """Where a job is restored: its keeper, and how to start CRIU there.

    ``shared_root`` is the folder of shared memory that the job will see; ``outputs``: which files take the place of
    others in it. ``helper``: that same CRIU, where it is the privileged helper's. ``ends_with_caller``: the keeper was
    told so.
    """

    keeper: EmptySandbox | BareKeeper | HelpedKeepers
    criu: Criu
    isolated: bool
    network: Network
    shared_root: Path = ROOT
    outputs: Mapping[Path, Path] = field(default_factory=dict)
    helper: HelperCriu | None = None
    ends_with_caller: bool = False

    @property
    def root(self) -> str:
        """Prefix of paths in the job's mounts, as seen from here."""
        return f"{processes.PROC}/{self.keeper.id.pid}/root"
