"""The kinds of backend: the driver's, and those registered above it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpucr.errors import Unsupported
from gpucr.gpu_state.backend import CAPTURED, CUSTOM_STORAGE, INTERPOSED, PLAIN, Backend, Kind, Return
from gpucr.gpu_state.captured import CapturedReturn
from gpucr.gpu_state.holders import Holders
from gpucr.gpu_state.ways import no_custom_storage
from gpucr.model import KIND_NAME, DevicePart, StagedExtent
from gpucr.undo.protection import Protection

_kinds: dict[str, Kind] = {}


def register(kind: Kind) -> None:
    """From now on dumps offer every process to this kind, above those registered earlier.

    Raises ValueError for a name that is taken or invalid.
    """
    if kind.name in (*_kinds, CAPTURED, PLAIN, INTERPOSED, CUSTOM_STORAGE) or not KIND_NAME.fullmatch(kind.name):
        raise ValueError(f"no kind can be called {kind.name!r}, or there is one")
    _kinds[kind.name] = kind


def unregister(name: str) -> None:
    """Undo `register`: dumps no longer use it, and restores do not know it."""
    del _kinds[name]


class _OfKind(Holders):
    """What a registered kind holds, in an operation."""

    def __init__(self, kind: Kind, protection: Protection) -> None:
        self._kind = kind
        self._protection = protection

    def backend_for(self, part: DevicePart) -> Backend | None:
        return self._kind.backend_for(part, self._protection)


def registered(protection: Protection) -> tuple[Holders, ...]:
    """What the registered kinds hold in an operation, from the lowest up."""
    return tuple(_OfKind(kind, protection) for kind in _kinds.values())


def require_kinds(parts: Mapping[DevicePart, str], where: str) -> None:
    """Raise Unsupported if device memory of one of these kinds cannot be brought back here."""
    for part, name in parts.items():
        kind = _kinds.get(name) if part.level else None
        is_own = name in ((INTERPOSED,) if part.level else (CAPTURED, CUSTOM_STORAGE))
        if kind is None and not is_own:
            raise Unsupported(
                f"device memory of process {part.pid} was held by {name!r}, which this gpucr does not know",
                hint=f"restore {where} with a gpucr that does; `gpucr inspect --json` lists the kinds",
                code="GPUCR-BACKEND",
            )
        missing = kind.missing() if kind is not None else no_custom_storage() if name == CUSTOM_STORAGE else None
        if missing is not None:
            raise Unsupported(
                f"device memory of process {part.pid} was held by {name!r}, and cannot come back here: {missing}",
                hint="provide it, or restore on a machine that has it",
                code="GPUCR-BACKEND",
            )


def return_for(part: DevicePart, name: str, extents: Sequence[StagedExtent], size_bytes: int) -> Return:
    """A `Return` for a part held by this kind, staged or registered. Raises Unsupported."""
    if part.level:
        return _kinds[name].return_for(part, extents, size_bytes)
    return CapturedReturn(part, extents, size_bytes)
