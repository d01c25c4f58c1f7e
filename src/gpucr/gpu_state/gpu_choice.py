"""Choose the GPUs for a job: a complete GPU map from what it had, what is here, and the user's wishes. No I/O.

The driver requires a pair for every GPU of the machine where a process started, used or not, each new GPU once. The
user gives what matters (``--gpu-map``, ``--gpu``); the rest is filled in here: a GPU keeps its place if possible,
otherwise a free one of the same model is chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from gpucr.errors import InvalidRequest, Unsupported
from gpucr.model import Gpu, GpuMap, gpu_pairs
from gpucr.quantities import counted, format_bytes, whole_number

_ALL_PLACED = "the driver wants a place for every GPU of the machine"


class GpuRequest(Struct, frozen=True):
    """The user's request, as typed: GPUs by index, UUID, or unique prefix of a UUID.

    ``pairs``: old and new ones. ``onto``: where the GPUs that the job uses go, in their order. ``auto``: free ones.
    """

    pairs: tuple[tuple[str, str], ...] = ()
    onto: tuple[str, ...] = ()
    auto: bool = False

    @classmethod
    def of(cls, gpu_map: GpuMap | str | None, gpu: str | None) -> GpuRequest:
        """Parse the arguments of `restore` and `resume`. Raises InvalidRequest if both are given, or malformed."""
        if gpu_map is not None and gpu is not None:
            raise InvalidRequest(
                "--gpu and --gpu-map both say where the job goes", hint="give one of them", code="GPUCR-BAD-GPU"
            )
        if isinstance(gpu_map, str):
            return cls(pairs=gpu_pairs(gpu_map))
        if gpu_map is not None:
            return cls(pairs=gpu_map.pairs)
        if gpu is None or gpu.strip() == "auto":
            return cls(auto=gpu is not None)
        names = tuple(name.strip() for name in gpu.split(","))
        if not all(names):
            raise InvalidRequest(
                f"{gpu!r} does not name GPUs",
                hint="write --gpu auto, --gpu 1 or --gpu GPU-6b1e,3",
                code="GPUCR-BAD-GPU",
            )
        return cls(onto=names)

    def __bool__(self) -> bool:
        return bool(self.pairs or self.onto or self.auto)


class GpuUser(Struct, frozen=True):
    """One process that returns to GPUs: the UUIDs of all that the driver knows, and device memory on those it uses."""

    pid: int
    known: tuple[str, ...]
    held_bytes: Mapping[str, int]


class GpuChoice(Struct, frozen=True):
    """Where the job goes.

    ``gpu_map`` is None if every GPU stays; ``reasons`` are sentences that explain gpucr's choices. ``had`` are the GPUs
    that the driver knows for its processes, ``needed_bytes`` the device memory per UUID of these.
    """

    gpu_map: GpuMap | None
    reasons: tuple[str, ...]
    had: tuple[Gpu, ...]
    needed_bytes: Mapping[str, int]
    users: tuple[GpuUser, ...]

    def for_process(self, pid: int, *, used_only: bool = False) -> GpuMap | None:
        """The map for one process, by `GpuUser.pid`: for all GPUs it knows, or only those it uses. None: it stays."""
        user = next((user for user in self.users if user.pid == pid), None)
        if self.gpu_map is None or user is None:
            return None
        return self.gpu_map.only(user.held_bytes if used_only else user.known)


def choose_gpus(
    request: GpuRequest, had: Sequence[Gpu], users: Sequence[GpuUser], here: Sequence[Gpu], busy: Collection[str] = ()
) -> GpuChoice:
    """Plan the whole map. Without a request every GPU stays, and preflight checks whether it can.

    ``had``: the GPUs of the machine where the job ran, ``here`` those of this one. ``busy``: the UUIDs of GPUs that
    other processes use; only ``auto`` avoids them. Too little memory is refused for ``auto``, and left to preflight if
    the user named the GPU.

    Raises InvalidRequest for names that match no GPU, several GPUs, or one twice; Unsupported if there are too few GPUs
    of a model, or too little memory for ``auto``.
    """
    job = _Job(had, users)
    if not request:
        return GpuChoice(None, (), tuple(job.gpus), job.needed_bytes, tuple(users))
    places = _Places(job, here, busy if request.auto else ())
    places.fix(_named_pairs(request, job, here))
    places.keep_partitioned()
    places.require_enough()
    places.complete(strict=request.auto)
    pairs = tuple((gpu.uuid, places.found[gpu.uuid].uuid) for gpu in job.gpus)
    gpu_map = None if all(old == new for old, new in pairs) else GpuMap(pairs)
    return GpuChoice(gpu_map, tuple(places.reasons), tuple(job.gpus), job.needed_bytes, tuple(users))


def find_gpu(name: str, gpus: Sequence[Gpu], where: str) -> Gpu:
    """The GPU with this index or UUID prefix. ``where`` ends the message: "on this machine".

    A whole UUID may lack its ``GPU-``, as in cuda.core. Raises InvalidRequest if no GPU or several match.
    """
    index = whole_number(name)
    if index is not None:
        fitting = [gpu for gpu in gpus if gpu.index == index]
    elif len(name) > len("GPU-") and name.lower().startswith("gpu-"):
        fitting = [gpu for gpu in gpus if gpu.uuid.lower().startswith(name.lower())]
    elif len(name) == len("6b1e4d2c-0f3a-4c52-9c53-0a6f5a1d7e88"):
        fitting = [gpu for gpu in gpus if gpu.uuid.lower() == f"gpu-{name.lower()}"]
    else:
        raise InvalidRequest(
            f"{name!r} names no GPU",
            hint="name a GPU by its index or the beginning of its UUID (GPU-...): `nvidia-smi -L`",
            code="GPUCR-BAD-GPU",
        )
    if len(fitting) == 1:
        return fitting[0]
    known = ", ".join(f"{gpu.index}: {gpu.uuid}" for gpu in fitting or gpus) or "none"
    if fitting:
        raise InvalidRequest(
            f"{name} can be {len(fitting)} GPUs {where}", hint=f"give more of the UUID ({known})", code="GPUCR-BAD-GPU"
        )
    raise InvalidRequest(f"there is no GPU {name} {where}", hint=f"its GPUs are {known}", code="GPUCR-BAD-GPU")


def used_gpus(had: Sequence[Gpu], users: Sequence[GpuUser]) -> tuple[Gpu, ...]:
    """Those of ``had`` with device memory of one of the users; if that is unknown, all that they know."""
    return tuple(_Job(had, users).used)


class _Job:
    """The GPUs that the driver knows for a job, and what the job needs on each."""

    def __init__(self, had: Sequence[Gpu], users: Sequence[GpuUser]) -> None:
        known = {uuid for user in users for uuid in user.known}
        self.gpus = [gpu for gpu in had if gpu.uuid in known]
        self.needed_bytes: dict[str, int] = {}
        for user in users:
            for uuid, size_bytes in user.held_bytes.items():
                self.needed_bytes[uuid] = self.needed_bytes.get(uuid, 0) + size_bytes
        # NVML has no figures in some containers: then every GPU counts as used.
        used = set(self.needed_bytes) or known
        self.used = [gpu for gpu in self.gpus if gpu.uuid in used]
        self.unused = [gpu for gpu in self.gpus if gpu.uuid not in used]

    def needs(self, gpu: Gpu) -> int:
        """Device memory that goes where this GPU goes."""
        return self.needed_bytes.get(gpu.uuid, 0)


def _named_pairs(request: GpuRequest, job: _Job, here: Sequence[Gpu]) -> list[tuple[Gpu, Gpu]]:
    """What the user named, as GPUs."""
    pairs: list[tuple[Gpu, Gpu]] = []
    if (request.onto or request.pairs) and not job.gpus:
        raise InvalidRequest(
            "the job has no suspended device memory, so no GPUs can be chosen for it",
            hint="omit --gpu and --gpu-map; `gpucr move` takes a running job to other GPUs",
            code="GPUCR-BAD-GPU",
        )
    if request.onto:
        if len(request.onto) != len(job.used):
            uses = ", ".join(_label(gpu) for gpu in job.used) or "none"
            raise InvalidRequest(
                f"the job uses {counted(len(job.used), 'GPU')}, and --gpu names {len(request.onto)}",
                hint=f"name one for each GPU that it uses ({uses}), or `--gpu auto`",
                code="GPUCR-BAD-GPU",
            )
        pairs = [
            (old, find_gpu(name, here, "on this machine")) for old, name in zip(job.used, request.onto, strict=True)
        ]
    for old_name, new_name in request.pairs:
        old = find_gpu(old_name, job.gpus, "where the job ran")
        pairs.append((old, find_gpu(new_name, here, "on this machine")))
    for side, word in ((0, "left"), (1, "right")):
        named = [pair[side].uuid for pair in pairs]
        for pair in pairs:
            if named.count(pair[side].uuid) > 1:
                raise InvalidRequest(
                    f"{_label(pair[side])} appears twice on the {word} side of the GPU map"
                    if request.pairs
                    else f"--gpu names {_label(pair[side])} twice",
                    hint="each GPU of the job goes to one of its own",
                    code="GPUCR-BAD-GPU",
                )
    return pairs


class _Places:
    """Finds a GPU of this machine for every GPU of the job. ``found``: by the UUID of the old one."""

    def __init__(self, job: _Job, here: Sequence[Gpu], busy: Collection[str]) -> None:
        self._job = job
        self._here = here
        self._busy = frozenset(busy)
        self._open = [gpu for gpu in here if not gpu.mig_enabled]
        self._left_by_user: set[str] = set()
        self.found: dict[str, Gpu] = {}
        self.reasons: list[str] = []

    def fix(self, pairs: Sequence[tuple[Gpu, Gpu]]) -> None:
        """GPUs that the user named cannot be chosen again."""
        for old, new in pairs:
            self._take(old, new)
            self._left_by_user.add(old.uuid)

    def keep_partitioned(self) -> None:
        """GPUs in MIG mode that the job does not use stay where they are: nothing else fits there."""
        taken = {gpu.uuid for gpu in self.found.values()}
        partitioned = {gpu.uuid: gpu for gpu in self._here if gpu.mig_enabled and gpu.uuid not in taken}
        for old in self._unplaced(self._job.unused):
            if old.uuid in partitioned:
                self._take(old, partitioned[old.uuid])

    def require_enough(self) -> None:
        """A place for each GPU, used or not, of its own model. Raises Unsupported if there are too few."""
        for model in dict.fromkeys(gpu.name for gpu in self._unplaced(self._job.gpus)):
            wanted = [gpu for gpu in self._job.gpus if gpu.name == model]
            missing = len(self._unplaced(wanted)) - len(self._of_model(model))
            if missing > 0:
                raise self._too_few(model, len(wanted), missing)

    def complete(self, *, strict: bool) -> None:
        """Place the rest. ``strict``: raise Unsupported if there is no GPU with enough memory for a used one."""
        for model in dict.fromkeys(gpu.name for gpu in self._unplaced(self._job.gpus)):
            used = [gpu for gpu in self._unplaced(self._job.used) if gpu.name == model]
            needs = {gpu.uuid: self._job.needs(gpu) for gpu in used}
            if not _fits(list(needs.values()), self._free(model)):
                if strict:
                    raise self._no_room(used, model)
                needs = dict.fromkeys(needs, 0)
            for old in self._place(used, model, needs):
                self._explain_used(old, chosen=strict)
            unused = [gpu for gpu in self._unplaced(self._job.unused) if gpu.name == model]
            for old in self._place(unused, model, dict.fromkeys((gpu.uuid for gpu in unused), 0)):
                self._explain_unused(old)

    def _place(self, olds: Sequence[Gpu], model: str, needs: Mapping[str, int]) -> Sequence[Gpu]:
        """Find a place for each; `_fits` has checked that there is one. Returns ``olds``.

        First, those stay that can without taking another's room. Then they are placed largest first: any GPU with room
        for it would also do for smaller ones, so the choice among them costs nothing.
        """
        for old in olds:
            own = next((gpu for gpu in self._of_model(model) if gpu.uuid == old.uuid), None)
            if own is None or own.memory_free_bytes < needs[old.uuid] or own.uuid in self._busy:
                continue
            others = [needs[gpu.uuid] for gpu in self._unplaced(olds) if gpu is not old]
            if _fits(others, [gpu.memory_free_bytes for gpu in self._of_model(model) if gpu is not own]):
                self._take(old, own)
        for old in sorted(self._unplaced(olds), key=lambda gpu: -needs[gpu.uuid]):
            fitting = [gpu for gpu in self._of_model(model) if gpu.memory_free_bytes >= needs[old.uuid]]
            self._take(old, min(fitting, key=lambda gpu: self._rank(old, gpu)))
        return olds

    def _rank(self, old: Gpu, new: Gpu) -> tuple[bool, bool, bool, int, int]:
        """Least is best: idle, its own, one that the user has moved the job off, then the emptiest."""
        return (
            new.uuid in self._busy,
            new.uuid != old.uuid,
            new.uuid not in self._left_by_user,
            -new.memory_free_bytes,
            new.index,
        )

    def _take(self, old: Gpu, new: Gpu) -> None:
        self.found[old.uuid] = new
        self._open = [gpu for gpu in self._open if gpu.uuid != new.uuid]

    def _unplaced(self, gpus: Sequence[Gpu]) -> list[Gpu]:
        return [gpu for gpu in gpus if gpu.uuid not in self.found]

    def _of_model(self, model: str) -> list[Gpu]:
        return [gpu for gpu in self._open if gpu.name == model]

    def _free(self, model: str) -> list[int]:
        return [gpu.memory_free_bytes for gpu in self._of_model(model)]

    def _explain_used(self, old: Gpu, *, chosen: bool) -> None:
        new, needed = self.found[old.uuid], format_bytes(self._job.needs(old))
        room = f"{format_bytes(new.memory_free_bytes)} free, {needed} needed"
        if new.uuid != old.uuid:
            self.reasons.append(f"{_label(old)} goes to {_label(new)} ({room}): {self._why_not_its_own(old)}")
        elif chosen:
            self.reasons.append(f"{_label(old)} stays ({room})")

    def _explain_unused(self, old: Gpu) -> None:
        new = self.found[old.uuid]
        if new.uuid != old.uuid:
            self.reasons.append(f"{_label(old)}, which the job does not use, goes to {_label(new)}: {_ALL_PLACED}")

    def _why_not_its_own(self, old: Gpu) -> str:
        own = next((gpu for gpu in self._here if gpu.uuid == old.uuid), None)
        if own is None:
            return "this machine does not have it"
        if own.memory_free_bytes < self._job.needs(old):
            return f"it has {format_bytes(own.memory_free_bytes)} free"
        if own.uuid in self._busy:
            return "another process uses it"
        return "it is taken by another GPU of the job"

    def _too_few(self, model: str, wanted: int, missing: int) -> Unsupported:
        usable = [gpu for gpu in self._here if gpu.name == model and not gpu.mig_enabled]
        have = ", ".join(dict.fromkeys(gpu.name for gpu in self._here)) or "none"
        used = sum(gpu.name == model for gpu in self._job.used)
        return Unsupported(
            f"the job ran on a machine with {counted(wanted, 'GPU')} ({model}) and uses {used}; this machine has "
            f"{len(usable)} of that model (its GPUs: {have}), and {_ALL_PLACED}: {missing} too few",
            hint="restore it on a machine with as many",
            code="GPUCR-NO-GPU",
        )

    def _no_room(self, used: Sequence[Gpu], model: str) -> Unsupported:
        needs = ", ".join(f"{format_bytes(self._job.needs(gpu))} ({_label(gpu)})" for gpu in used)
        free = ", ".join(f"{format_bytes(gpu.memory_free_bytes)} ({_label(gpu)})" for gpu in self._of_model(model))
        return Unsupported(
            f"no choice of GPUs has room for the job: it needs {needs}; free are {free}",
            hint="end or suspend what uses the GPUs (`gpucr ps`), then try again",
            code="GPUCR-GPU-FULL",
        )


def _fits(needs: Sequence[int], free: Sequence[int]) -> bool:
    """Whether each need can have its own GPU: compare the largest need with the most room, and so on."""
    if len(needs) > len(free):
        return False
    pairs = zip(sorted(needs, reverse=True), sorted(free, reverse=True), strict=False)
    return all(needed <= room for needed, room in pairs)


def _label(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({gpu.uuid[:12]})"
