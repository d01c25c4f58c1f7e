"""Typed access to JSON that may be damaged or forged: every member is checked for type and range as it is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

PAGE_BYTES = 4096
_SHA256 = re.compile(r"[0-9a-f]{64}")

T = TypeVar("T")


class ManifestError(ValueError):
    """The text is not a valid manifest. The message says where and why; the caller knows the path."""


class Reader:
    """Typed access to one JSON object; every mismatch is a ManifestError that names the place."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise ManifestError(f"{where} is not an object")
        self.value: dict[str, Any] = value
        self.where = where

    def _get(self, key: str, kind: type[T]) -> T:
        if key not in self.value:
            raise ManifestError(f"{self.where} has no {key!r}")
        value = self.value[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ManifestError(f"{self.where}: {key!r} is not of type {kind.__name__}")
        return value

    def text(self, key: str) -> str:
        """A text."""
        return self._get(key, str)

    def boolean(self, key: str) -> bool:
        """A truth value."""
        return self._get(key, bool)

    def integer(self, key: str, smallest: int = 0) -> int:
        """A number from ``smallest`` to 2^64 - 1."""
        return self._in_range(key, self._get(key, int), smallest)

    def _in_range(self, key: str, value: int, smallest: int) -> int:
        if not smallest <= value < 1 << 64:
            raise ManifestError(f"{self.where}: {key!r} is out of range")
        return value

    def whole_pages(self, key: str, smallest: int = 0) -> int:
        """A number of bytes that makes whole pages."""
        value = self.integer(key, smallest)
        if value % PAGE_BYTES:
            raise ManifestError(f"{self.where}: {key!r} is not a multiple of {PAGE_BYTES}")
        return value

    def digests(self, key: str) -> tuple[str | None, ...]:
        """A list of SHA-256 in hex, or null."""
        items = self._get(key, list)
        if any(not (item is None or (isinstance(item, str) and _SHA256.fullmatch(item))) for item in items):
            raise ManifestError(f"{self.where}: {key!r} has an item that is neither a SHA-256 nor null")
        return tuple(items)

    def optional(self, key: str, read: Callable[[str], T]) -> T | None:
        """None only where the manifest says null: a key that is missing is damage."""
        return None if key in self.value and self.value[key] is None else read(key)

    def object(self, key: str) -> Reader:
        """An object."""
        return Reader(self._get(key, dict), f"{self.where}.{key}")

    def objects(self, key: str) -> list[Reader]:
        """A list of objects."""
        return [Reader(item, f"{self.where}.{key}[{i}]") for i, item in enumerate(self._get(key, list))]

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts."""
        return self._items(key, str)

    def integers(self, key: str, smallest: int = 0) -> tuple[int, ...]:
        """A list of numbers, each as in `integer`."""
        return tuple(self._in_range(key, value, smallest) for value in self._items(key, int))

    def _items(self, key: str, kind: type[T]) -> tuple[T, ...]:
        items = self._get(key, list)
        if any(not isinstance(item, kind) or isinstance(item, bool) for item in items):
            raise ManifestError(f"{self.where}: {key!r} has an item that is not of type {kind.__name__}")
        return tuple(items)
