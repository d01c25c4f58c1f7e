"""The contents of a snapshot as a tree of lines, and as JSON takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from msgspec import Struct, field

from gpucr.cli.output import printable
from gpucr.criu.imaged_files import OpenDescriptor
from gpucr.criu.imaged_memory import MemoryUse
from gpucr.operations.inspect import ProcessContents, SnapshotContents
from gpucr.quantities import counted, format_bytes

_SOCKETS = ("tcp", "udp", "internet", "unix", "packet", "netlink")


class Branch(Struct):
    """A line of the tree and its children."""

    text: str
    branches: list[Branch] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """The line itself and all below it, with the strokes that connect them."""
        waiting = [("", "", self)]
        while waiting:
            stroke, indent, branch = waiting.pop()
            yield stroke + branch.text
            below = [("├─ ", "│  ")] * (len(branch.branches) - 1) + [("└─ ", "   ")]
            children = zip(below, branch.branches, strict=False)
            waiting += reversed([(indent + first, indent + rest, child) for (first, rest), child in children])


def tree_of(contents: SnapshotContents, *, every_file: bool) -> Branch:
    """The job, its processes below their parents with their memory and files, and shared memory.

    ``every_file`` lists the descriptors one by one.
    """
    threads = sum(len(process.record.threads) for process in contents.processes)
    root = Branch(f"job: {counted(len(contents.processes), 'process')}, {counted(threads, 'thread')}")
    if len(contents.processes) > 1:
        root.branches.append(Branch("memory of all", [Branch(_memory_line(use)) for use in contents.memory]))
    by_pid: dict[int, Branch] = {}
    for process in contents.processes:  # parents before children
        branch = _process_branch(process, every_file=every_file)
        by_pid.get(process.record.parent_pid, root).branches.append(branch)
        by_pid[process.pid] = branch
    if contents.shared:
        root.branches.append(_shared_branch(contents))
    return root


_LEFT_BY = {"interposed": ", left by its interposer", "custom_storage": ", handed over by the driver"}


def _process_branch(process: ProcessContents, *, every_file: bool) -> Branch:
    record = process.record
    state = record.found_state.word if record.found_state is not None else "no CUDA"
    held = f", {format_bytes(sum(record.device_bytes.values()))} on GPUs" if record.device_bytes else ""
    command = printable(" ".join(record.command_line) or f"[{record.name}]")
    branch = Branch(f"{record.pid} ({state}{held}, {counted(len(record.threads), 'thread')}) {command}")
    if record.found_state is not None and not any(use.kind == "device" for use in process.memory):
        size = sum(extent.size_bytes for extent in record.staging)
        known = f"{format_bytes(size)} in {counted(len(record.staging), 'extent')}, " if record.staging else ""
        branch.branches.append(Branch(f"device memory: {known}in CRIU's images"))
    places = [
        ("device/" if data.store_bytes is None else "the store") + _LEFT_BY.get(data.kind, "")
        for data in record.device_parts.values()
    ]
    for use in process.memory:
        place = places.pop(0) if use.kind == "device" and places else "CRIU's images"
        branch.branches.append(Branch(_memory_line(use, place)))
    branch.branches += _file_branches(process, every_file=every_file)
    return branch


def _memory_line(use: MemoryUse, place: str | None = None) -> str:
    """``place``: where the snapshot has device memory."""
    what = {"device": "device memory", "kernel": "the kernel's pages"}.get(use.kind, use.kind)
    if use.kind == "reserved":
        return f"reserved: {format_bytes(use.mapped_bytes)} of address space in {counted(use.mappings, 'mapping')}"
    packed = f", {format_bytes(use.packed_bytes)} compressed" if use.packed_bytes is not None else ""
    noun = "extent" if use.kind == "device" else "mapping"
    where = f" in {place}" if use.kind == "device" and place is not None else ""
    stored = f"{format_bytes(use.stored_bytes)} stored{where}{packed}"
    return f"{what}: {format_bytes(use.mapped_bytes)} in {counted(use.mappings, noun)}, {stored}"


def _file_branches(process: ProcessContents, *, every_file: bool) -> list[Branch]:
    found = []
    for title, are_sockets in (("open files", False), ("sockets", True)):
        chosen = [each for each in process.descriptors if (each.kind in _SOCKETS) is are_sockets]
        if not chosen:
            continue
        kinds = Counter(each.kind for each in chosen)
        branch = Branch(f"{title}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
        if every_file:
            branch.branches = [Branch(_descriptor_line(each)) for each in chosen]
        found.append(branch)
    return found


def _descriptor_line(each: OpenDescriptor) -> str:
    return f"{each.fd} {each.kind}" + (f" {printable(each.name)}" if each.name is not None else "")


def _shared_branch(contents: SnapshotContents) -> Branch:
    stored = sum(each.stored_bytes for each in contents.shared)
    branch = Branch(f"shared memory: {counted(len(contents.shared), 'object')}, {format_bytes(stored)} stored once")
    for each in contents.shared:
        name = printable(each.name) if each.name is not None else "without a name"
        pids = ", ".join(map(str, each.pids))
        size = f"{format_bytes(each.size_bytes)}, {format_bytes(each.stored_bytes)} stored"
        branch.branches.append(Branch(f"{name}: {size}, mapped by {pids}"))
    return branch


def as_json_record(contents: SnapshotContents) -> dict[str, Any]:
    """The member ``contents`` of the JSON."""
    return {
        "processes": [
            {
                "pid": process.pid,
                "memory": process.memory,
                "descriptors": process.descriptors,
            }
            for process in contents.processes
        ],
        "memory": contents.memory,
        "shared_memory": contents.shared,
        "packed_bytes": contents.packed_bytes,
        "problems": list(contents.problems),
    }
