"""Root's keys, and the signature of a set of images, which proves that root's CRIU wrote them for this user."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta
from msgspec.structs import replace

from gpucr import records
from gpucr.helper.messages import Network
from gpucr.linux import trusted_paths
from gpucr.privileged.rights import Refused
from gpucr.records import Count, Record, RecordError

KEYS_FOLDER = Path("/etc/gpucr/helper")
OWN_NAME = "own.key"
MAX_SIGNATURE_BYTES = 16 << 20

_KEY_BYTES = 32
_SUFFIX = ".key"

Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class SignedFile(Record, frozen=True):
    """An image. ``blake3``: the digest of the whole file."""

    name: Annotated[str, Meta(pattern=r"\A[a-z0-9-]{1,64}\.img\Z")]
    size_bytes: Count
    blake3: Digest


class Signature(Record, frozen=True):
    """``network``: the job's network, the machine's or its own.

    ``mac``: the HMAC-SHA256 of the whole record with an empty ``mac``, by the key with the id ``key``.
    """

    format: Literal["gpucr-helper"]
    version: Literal[1]
    uid: Annotated[int, Meta(ge=1, lt=1 << 32)]
    network: Network
    files: Annotated[tuple[SignedFile, ...], Meta(min_length=1, max_length=1 << 17)]
    key: Digest
    mac: Annotated[str, Meta(pattern=r"\A(?:[0-9a-f]{64})?\Z")]


class Keys:
    """The keys in root's folder: the machine's own, and those of other machines that it trusts."""

    def __init__(self, folder: Path = KEYS_FOLDER) -> None:
        self._folder = folder

    def make(self) -> bool:
        """Create the machine's own key, unless it has one. Raises OSError if others can change the folder."""
        trusted_paths.make_private(self._folder)
        trusted_paths.require_ours(self._folder)
        try:
            fd = trusted_paths.open_file(self._folder / OWN_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        with os.fdopen(fd, "w", encoding="ascii") as stream:
            stream.write(os.urandom(_KEY_BYTES).hex() + "\n")
        return True

    def ids(self) -> tuple[str, ...]:
        """The ids of all keys, the machine's own first. Raises OSError, Refused."""
        own = key_id(self.own())
        return (own, *sorted(each for each in self._accepted() if each != own))

    def own(self) -> bytes:
        """The key that this machine signs with. Raises OSError, Refused."""
        trusted_paths.require_ours(self._folder)
        return _read_key(self._folder / OWN_NAME)

    def _accepted(self) -> Mapping[str, bytes]:
        trusted_paths.require_ours(self._folder)
        found = [_read_key(self._folder / name) for name in os.listdir(self._folder) if name.endswith(_SUFFIX)]
        return {key_id(key): key for key in found}

    def verified(self, data: bytes, uid: int) -> Signature:
        """The signature, if it is valid for this user and by a trusted key. Raises Refused."""
        try:
            found = records.decode(data, Signature)
        except (RecordError, UnicodeDecodeError) as e:
            raise Refused(f"the signature of the images is damaged: {e}") from e
        key = self._accepted().get(found.key)
        if key is None:
            raise Refused("the images were signed with a key that this machine does not know")
        if not hmac.compare_digest(_mac(replace(found, mac=""), key), found.mac):
            raise Refused("the signature of the images is wrong")
        if found.uid != uid:
            raise Refused(f"the images are of a job of uid {found.uid}")
        if len({each.name for each in found.files}) != len(found.files):
            raise Refused("the signature of the images is damaged: a name is there twice")
        return found


def signature(files: Sequence[SignedFile], uid: int, network: Network, key: bytes) -> bytes:
    """The signature of this user's images, as the content of a file."""
    unsigned = Signature("gpucr-helper", 1, uid, network, tuple(files), key_id(key), "")
    return records.encode(replace(unsigned, mac=_mac(unsigned, key)))


def key_id(key: bytes) -> str:
    """An id for a key that reveals nothing about it."""
    return hashlib.sha256(b"gpucr helper key id\n" + key).hexdigest()


def _mac(unsigned: Signature, key: bytes) -> str:
    return hmac.new(key, records.encode(unsigned), "sha256").hexdigest()


def _read_key(path: Path) -> bytes:
    fd = trusted_paths.open_file(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as stream:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise Refused(f"{path} is not root's alone (mode 0600)")
        text = stream.read(2 * _KEY_BYTES + 2).strip()
    try:
        key = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise Refused(f"{path} is not a key: {2 * _KEY_BYTES} hexadecimal digits")
    return key
