"""gpucr.cli.columns: tables that fit."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import termios

import pytest

from gpucr.cli.columns import WIDTH_WITHOUT_TERMINAL, Column, fit, output_width, terminal_width

COLUMNS = (
    Column("PID", is_number=True),
    Column("STATE"),
    Column("AGE", rank=2),
    Column("GPUS", rank=1),
    Column("COMMAND"),
)
ROWS = [("7", "running", "3 d 4 h", "0,1", "python train.py --epochs 90"), ("4711", "locked", "1 s", "-", "x")]


def test_everything_where_there_is_room() -> None:
    assert fit(COLUMNS, ROWS, 200) == [
        " PID  STATE    AGE      GPUS  COMMAND",
        "   7  running  3 d 4 h  0,1   python train.py --epochs 90",
        "4711  locked   1 s      -     x",
    ]


def test_the_last_column_is_cut_before_another_gives_way() -> None:
    assert fit(COLUMNS, ROWS, 50)[1] == "   7  running  3 d 4 h  0,1   python train.py --ep"


@pytest.mark.parametrize(
    ("width", "heading"),
    [(45, " PID  STATE    GPUS  COMMAND"), (35, " PID  STATE    COMMAND"), (10, " PID  STAT"), (0, "")],
)
def test_what_gives_way(width: int, heading: str) -> None:
    lines = fit(COLUMNS, ROWS, width)
    assert lines[0] == heading
    assert all(len(line) <= width for line in lines)


def test_no_rows() -> None:
    assert fit(COLUMNS, [], 80) == ["PID  STATE  AGE  GPUS  COMMAND"]


@pytest.mark.parametrize(("told", "expected"), [(101, 101), (0, None)])
def test_the_width_of_a_terminal(told: int, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 is what a terminal has that nobody has told its size, as `script` makes one where it has none itself."""
    master, slave = os.openpty()
    with open(slave, "w") as terminal:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 33, told, 0, 0))
        monkeypatch.setattr(sys, "stdout", terminal)
        assert terminal_width() == expected
        assert output_width() == (expected or WIDTH_WITHOUT_TERMINAL)
        monkeypatch.undo()
    os.close(master)
