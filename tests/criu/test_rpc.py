"""The messages: field numbers are CRIU's, and the generated code matches rpc.proto."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from gpucr.criu import rpc_pb2

PROTO = Path(rpc_pb2.__file__).with_name("rpc.proto")


def test_generated_code_matches_the_proto() -> None:
    """Compared by content, since newer protocs write other text around it."""
    written: dict[str, dict[str, int]] = {}
    for kind, name, body in re.findall(
        r"^(message|enum) (\w+) \{(.*?)^\}", PROTO.read_text(), re.MULTILINE | re.DOTALL
    ):
        pattern = r"(\w+) = (\d+);" if kind == "message" else r"^\s*(\w+) = (\d+);"
        written[name] = {field: int(number) for field, number in re.findall(pattern, body, re.MULTILINE)}
    messages = {
        name: {field.name: field.number for field in message.fields}
        for name, message in rpc_pb2.DESCRIPTOR.message_types_by_name.items()
    }
    enums = {
        name: {value.name: value.number for value in enum.values}
        for name, enum in rpc_pb2.DESCRIPTOR.enum_types_by_name.items()
    }
    assert {**messages, **enums} == written


def test_generated_code_is_not_tied_to_a_runtime() -> None:
    """Code of protoc 26 and newer checks the runtime's version at import, and refuses the next major one."""
    assert "runtime_version" not in Path(rpc_pb2.__file__).read_text()


def test_bytes_on_the_wire() -> None:
    options = rpc_pb2.Options(images_dir_fd=5, network_lock=rpc_pb2.NFTABLES)
    request = rpc_pb2.Request(type=rpc_pb2.DUMP, opts=options)
    # type (1) = 1; opts (2), 5 bytes: images_dir_fd (1) = 5, network_lock (64, a two-byte tag) = 2
    assert request.SerializeToString() == bytes([0x08, 1, 0x12, 5, 0x08, 5, 0x80, 0x04, 2])


def test_unknown_fields_of_an_answer_are_skipped() -> None:
    response = rpc_pb2.Response.FromString(bytes([0x08, 2, 0x10, 1, 0x22, 2, 0x08, 77, 0x58, 9]))
    assert (response.type, response.success, response.restore.pid) == (rpc_pb2.RESTORE, True, 77)


@pytest.mark.parametrize("module", ["gpucr.criu", "gpucr.criu.install", "gpucr.criu.options"])
def test_light_modules_import_no_protobuf(module: str) -> None:
    import subprocess

    code = f"import sys, {module}; sys.exit('google.protobuf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
