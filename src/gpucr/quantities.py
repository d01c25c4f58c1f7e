"""Human-readable sizes, times and counts, the same in messages, tables and progress; numbers in others' texts."""

from __future__ import annotations


def whole_number(text: str) -> int | None:
    """The number that these digits write; None if they write none of 0 to 10^18.

    `str.isdecimal` is true for other scripts' digits too, and `int` fails for more than 4300.
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def format_bytes(size_bytes: int) -> str:
    """``512 B``, ``1.5 MiB``, ``10.6 GiB``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """A time to wait, or an age: ``7 s``, ``2 min 5 s``, ``1 h 12 min``, ``3 d 4 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def counted(number: int, noun: str) -> str:
    """A count with its noun: ``1 thread``, ``3 threads``, ``2 processes``."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"
