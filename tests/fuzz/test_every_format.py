"""A new format, or a new reader of one, has a target: this fails until it is listed here."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

import msgspec

import gpucr
from gpucr import records
from tests.fuzz import test_formats
from tests.store.formats import FORMATS

_SOURCE = Path(gpucr.__file__).parent
_NOT_IN_USE = ("sim", "compat")  # the simulator reads its own state; the drop-in reads arguments

_OF_JSON = {"gpucr.records": {"decode", "convert", "read_json", "decoder"}, "gpucr.json_text": {"parse"}}
_MAY_READ = re.compile(r"gpucr\.records|import records|json|unpack|FromString|from_bytes")
_OF_BYTES = {"unpack", "unpack_from", "iter_unpack", "FromString", "ParseFromString", "from_bytes"}

KERNEL = "the kernel says it"
OWN_MEMORY = "a program's own memory says it, and what is wrong there harms that program alone"
NOT_READ = "a canary's own numbers on a GPU; packages, which dpkg reads; what the build has just compiled"

_IMAGES = "fuzz/test_snapshots.py test_damaged_images"
_READERS: Mapping[str, str] = {
    "batch/company.py _hear": "nodes_order",
    "batch/company.py _look": "nodes_news",
    "batch/place.py main": "ray_start",
    "borrow/ledger.py _read": "borrower",
    "containers/meeting.py call": "attendants_answer",
    "containers/oci.py find": "container_state",
    "containers/podman.py find": "container_state",
    "containers/record.py read_record": "container",
    "criu/image_entries.py _next": _IMAGES,
    "criu/provide.py _fetch": NOT_READ,
    "criu/service.py _decoded": "criu_message",
    "diagnosis/canaries/programs/data.py expect_number": NOT_READ,
    "diagnosis/canaries/store.py _read": "canary_results",
    "gpu_state/custom_storage/carrier.py _serve": "request_to_a_carrier",
    "gpu_state/custom_storage/carrier.py _serve_lane": "request_to_a_carrier",
    "gpu_state/custom_storage/client.py _receive": "carriers_answer",
    "gpu_state/interposed/shared.py kept_shares": "shares_kept",
    "helper/client.py _connected": KERNEL,
    "interposer/build.py platform_tag": NOT_READ,
    "on_demand/listing.py _served": "forwarders_status",
    "on_demand/neighbours.py contender_in": "forwarders_message",
    "on_demand/neighbours.py message_in": "forwarders_message",
    "on_demand/neighbours.py user_of": KERNEL,
    "privileged/keys.py verified": "helper_signature",
    "helper/messages.py _descriptors": "helpers_message",
    "helper/messages.py decode": "helpers_message",
    "helper/opened.py _fill": "ghost_image",
    "privileged/peer.py _credentials": KERNEL,
    "interposer/client.py _connect": KERNEL,
    "interposer/library.py why_not_loaded": "elf_program",
    "interposer/protocol.py blocks": "agents_answer",
    "interposer/protocol.py inside": "agents_answer",
    "interposer/protocol.py parse": "agents_answer",
    "interposer/protocol.py status": "agents_answer",
    "jobs/record.py _read_status": "job_status",
    "jobs/record.py decode": "job_record",
    "jobs/sandbox/keeper.py _receive": "word_to_a_keeper",
    "jobs/sandbox/keeper.py _spawn": "word_to_a_keeper",
    "jobs/sandbox/keeper.py main": "word_to_a_keeper",
    "jobs/sandbox/label.py decode": "keeper_tag",
    "jobs/sandbox/started.py _receive": "keepers_word",
    "linux/claims.py _lock_number": KERNEL,
    "linux/descriptors.py _receive": OWN_MEMORY,
    "linux/descriptors.py _socket_into": OWN_MEMORY,
    "linux/ends.py wait_status": KERNEL,
    "linux/file_locks.py _by_query": KERNEL,
    "linux/injection.py _out_of_rseq": OWN_MEMORY,
    "linux/interrupted_calls.py _loaded_number": "interrupted_call",
    "linux/interrupted_calls.py _on_stack": "interrupted_call",
    "linux/interrupted_calls.py _word": "interrupted_call",
    "jobs/sidecar.py _read": "supervision_state",
    "linux/memory.py present_prefix": KERNEL,
    "linux/mounts.py mount_of": KERNEL,
    "linux/namespaces.py bring_loopback_up": KERNEL,
    "linux/process_records.py read": "process_note",
    "linux/ptrace.py is_stopped_by_fault": KERNEL,
    "linux/ptrace.py signal_fault_address": KERNEL,
    "linux/sigframe.py fpu_state": KERNEL,
    "linux/unix_diag.py _inodes": KERNEL,
    "linux/unix_diag.py _parse": KERNEL,
    "linux/netlink.py _messages": KERNEL,
    "linux/netlink.py _raise_for": KERNEL,
    "linux/netlink.py attributes": KERNEL,
    "linux/sock_diag.py _parse": KERNEL,
    "network/records.py read": "network_record",
    "criu/images.py move": _IMAGES,
    "nodes/peers.py find_peers": "nodes_ends",
    "nodes/peers.py match": "nodes_ends",
    "nodes/places.py _merged": "nodes_place",
    "nodes/places.py agree": "nodes_place",
    "nodes/wire.py _decode": "nodes_message",
    "nodes/wire.py receive": "nodes_handshake",
    "snapshot/manifest.py decode": "manifest",
    "snapshot/manifest.py decode_brief": "fuzz/test_snapshots.py decode",
    "store/config.py decode": "config",
    "store/crypto.py unseal": "sealed",
    "store/index.py _place": "index",
    "store/index.py decode": "index",
    "store/keys.py _decode": "key",
    "store/pack.py decode_trailer": "pack",
    "store/pack.py iter_entries": "pack",
    "store/pieces.py decode_list": "pieces",
    "store/read_back.py decode": "read",
    "store/retired.py _read_ids": "batch",
    "store/sets.py decode": "set",
    "store/stored_snapshot.py decode": "snapshot",
    "undo/recovery.py _action": "guard_record",
    "undo/recovery.py decode": "guard_record",
}
"""Who takes bytes apart, and the target that tries it: one of `test_formats`, of a store's formats, or a test."""


def _readers() -> Iterator[str]:
    """``file function`` of everything in the source that takes JSON, protobuf or packed numbers apart."""
    for path in sorted(_SOURCE.rglob("*.py")):
        file = path.relative_to(_SOURCE)
        text = path.read_text(encoding="utf-8")
        is_looked_at = file.parts[0] not in _NOT_IN_USE and str(file) not in ("records.py", "json_text.py")
        if is_looked_at and _MAY_READ.search(text):
            tree = ast.parse(text)
            imported = {
                name.asname or name.name
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and node.module in _OF_JSON
                for name in node.names
                if name.name in _OF_JSON[node.module]
            }
            functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
            for function in functions:
                if any(_takes_apart(node, imported) for node in ast.walk(function)):
                    yield f"{file} {function.name}"


def _takes_apart(node: ast.AST, imported: set[str]) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    if isinstance(called, ast.Name):
        return called.id in imported
    if not isinstance(called, ast.Attribute):
        return False
    of = called.value.id if isinstance(called.value, ast.Name) else ""
    return (
        called.attr in _OF_BYTES
        or (of == "json" and called.attr == "loads")
        or (of == "records" and called.attr in _OF_JSON["gpucr.records"])
    )


def test_every_reader_has_a_target() -> None:
    assert set(_readers()) == set(_READERS)


def test_every_target_is_there() -> None:
    tests = Path(__file__).parents[1]
    for reader, target in _READERS.items():
        if target in (KERNEL, OWN_MEMORY, NOT_READ):
            continue
        file, _, name = target.partition(" ")
        is_there = f"def {name}(" in (tests / file).read_text(encoding="utf-8") if name else target in _ALL
        assert is_there, f"{reader}: there is no {target}"


_ALL = {*test_formats.TARGETS, *FORMATS}


def test_output_of_programs_may_be_any_bytes() -> None:
    for path in _SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "text=True" in text and path.relative_to(_SOURCE).parts[0] not in _NOT_IN_USE:
            for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
                given = {keyword.arg for keyword in call.keywords}
                assert "text" not in given or "errors" in given, f"{path}:{call.lineno}"


def test_digits_of_others_are_read_in_one_way() -> None:
    """`quantities.whole_number`: 5000 digits are no number for `int`, and other scripts have digits too."""
    known = {
        *("jobs/names.py", "cli/candidates.py", "cli/ps.py", "cli/kill.py", "operations/end_job.py"),  # no int()
        *("jobs/sandbox/keeper.py", "linux/namespaces.py", "linux/processes.py", "linux/cgroups.py"),  # the kernel's
        "quantities.py",
    }
    found = {
        str(path.relative_to(_SOURCE))
        for path in _SOURCE.rglob("*.py")
        if path.relative_to(_SOURCE).parts[0] not in _NOT_IN_USE
        and re.search(r"\.is(decimal|digit|numeric)\(", path.read_text(encoding="utf-8"))
    }
    assert found == known


def test_every_kind_of_record_is_read_by_a_target() -> None:
    """From its corpus: records that are read by way of something general, too."""
    for path in _SOURCE.rglob("*.py"):
        if "(Record" in path.read_text(encoding="utf-8"):
            importlib.import_module(".".join(path.relative_to(_SOURCE.parent).with_suffix("").parts))
    with mock.patch.dict(records._decoders, clear=True):
        for name in test_formats.TARGETS:
            test_formats.test_the_corpus(name)
        for form in FORMATS.values():
            form.read(form.sample())
        read = {each for kind in records._decoders for each in _structs_in(msgspec.inspect.type_info(kind))}
    kinds = {each for each in _subclasses(records.Record) if not each.__subclasses__()}  # others are only built on
    assert {each.__qualname__ for each in kinds - read} == set()


def _subclasses(kind: type) -> set[type]:
    direct: list[type] = kind.__subclasses__()
    return {each for below in direct for each in (below, *_subclasses(below))}


def _structs_in(info: object) -> set[type]:
    """All kinds of structs in a type, as msgspec describes it."""
    if isinstance(info, msgspec.inspect.StructType):
        return {info.cls, *(each for field in info.fields for each in _structs_in(field.type))}
    if isinstance(info, msgspec.inspect.Type):
        parts = [getattr(info, name, None) for name in ("types", "item_types", "item_type", "key_type", "value_type")]
        inner = [each for part in parts for each in (part if isinstance(part, tuple) else (part,))]
        return {each for part in inner for each in _structs_in(part)}
    return set()
