"""What a running program has written to a file so far."""

from pathlib import Path


def complete_lines(path: Path) -> list[str]:
    """The lines of a file, but for a last one that is still being written; none where there is no file yet."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return []
    return text[: text.rfind("\n") + 1].splitlines()
