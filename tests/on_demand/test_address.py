"""What can be listened on."""

from __future__ import annotations

import pytest

from gpucr.errors import InvalidRequest
from gpucr.on_demand.address import Address, parse, parse_all
from gpucr.on_demand.settings import OnDemand


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("8000", Address(8000, "127.0.0.1", 8000)),
        ("8000:9000", Address(9000, "127.0.0.1", 8000)),
        ("0.0.0.0:8000", Address(8000, "0.0.0.0", 8000)),  # noqa: S104 - it is what users write
        ("0.0.0.0:8000:9000", Address(9000, "0.0.0.0", 8000)),  # noqa: S104
        ("localhost:8000", Address(8000, "localhost", 8000)),
        ("[::1]:8000", Address(8000, "::1", 8000)),
        ("[::]:8000:9000", Address(9000, "::", 8000)),
        ("unix:/run/a.sock:9000", Address(9000, path="/run/a.sock")),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse(text) == address


def test_how_they_are_shown() -> None:
    assert [str(parse(text)) for text in ("8000:1", "[::1]:8000", "unix:/a/b:7")] == [
        "127.0.0.1:8000",
        "[::1]:8000",
        "unix:/a/b",
    ]


@pytest.mark.parametrize(
    "text",
    ["", "a", "0", "65536", "8000:0", ":8000", "[]:8000", "::1:8000", "1:2:3:4", "unix:", "unix:/a", "unix:/a:b",
     "unix:/a:0", f"unix:/{'a' * 107}:1", "8000 ", "-1", "localhost"],
)  # fmt: skip
def test_invalid_addresses(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not an address to listen on") as caught:
        parse(text)
    assert caught.value.code == "GPUCR-ADDRESS"


def test_an_address_is_named_once() -> None:
    with pytest.raises(InvalidRequest, match="named twice"):
        parse_all(("8000", "127.0.0.1:8000:9000"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"listen": ()}, "no address"),
        ({"idle_s": 0.0}, "--idle is 0 s"),
        ({"stay_s": -1.0}, "--stay is -1 s"),
        ({"wake_timeout_s": float("nan")}, "--wake-timeout is nan s"),
        ({"request_limit_s": 1e10}, "--request-limit is 1e"),
    ],
)
def test_implausible_settings(changes: dict[str, object], words: str) -> None:
    made = OnDemand(**{"listen": ("8000",), **changes})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=words):
        made.check()
