"""gpucr.cli.columns: tables that fit."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import termios

import pytest

from gpucr.cli.columns import Column, cells, fit, shortened, terminal_width, wrapped

COLUMNS = (
    Column("PID", is_number=True),
    Column("STATE"),
    Column("AGE", rank=2),
    Column("GPUS", rank=1),
    Column("COMMAND", least=16, keeps_end=False),
)
ROWS = [("7", "running", "3 d 4 h", "0,1", "python train.py --epochs 90"), ("4711", "locked", "1 s", "-", "x")]


def test_all_columns_are_shown_where_they_fit() -> None:
    assert fit(COLUMNS, ROWS, 200) == [
        " PID  STATE    AGE      GPUS  COMMAND",
        "   7  running  3 d 4 h  0,1   python train.py --epochs 90",
        "4711  locked   1 s      -     x",
    ]


def test_the_last_column_is_cut_before_another_is_dropped() -> None:
    assert fit(COLUMNS, ROWS, 50)[1] == "   7  running  3 d 4 h  0,1   python train.py --e…"


@pytest.mark.parametrize(
    ("width", "heading"),
    [(45, " PID  STATE    GPUS  COMMAND"), (35, " PID  STATE    COMMAND"), (12, "P…  ST…  CO…"), (0, "")],
)
def test_the_order_in_which_columns_are_dropped(width: int, heading: str) -> None:
    lines = fit(COLUMNS, ROWS, width)
    assert lines[0] == heading
    assert all(len(line) <= width for line in lines)


def test_no_rows() -> None:
    assert fit(COLUMNS, [], 80) == ["PID  STATE  AGE  GPUS  COMMAND"]


@pytest.mark.parametrize(("told", "expected"), [(101, 101), (0, None)])
def test_the_width_of_a_terminal(told: int, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 is what a terminal has that nobody has told its size, as `script` makes one if it has none itself."""
    master, slave = os.openpty()
    with open(slave, "w") as terminal:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 33, told, 0, 0))
        monkeypatch.setattr(sys, "stdout", terminal)
        assert terminal_width() == expected
        monkeypatch.undo()
    os.close(master)


NAMES = (Column("NAME", least=12), Column("STATE", least=20), Column("AGE", rank=1))
LONG = [("finetune-llama-7b", "dumped (/var/snapshots/llama/step-9000)", "3 d 4 h")]


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (None, "finetune-llama-7b  dumped (/var/snapshots/llama/step-9000)  3 d 4 h"),
        (60, "finetune-llama-7b  dumped (/var/sna…lama/step-9000)  3 d 4 h"),
        (45, "finetun…ama-7b  dumped (/v…tep-9000)  3 d 4 h"),
        (40, "finetune-llama-7b  dumped (/v…step-9000)"),
        (24, "finet…ma-7b  dumpe…9000)"),
    ],
)
def test_text_is_shortened_before_columns_are_dropped(width: int | None, line: str) -> None:
    assert fit(NAMES, LONG, width)[1] == line


def test_wide_characters_take_two_cells() -> None:
    rows = [("模型客服", "running"), ("e\u0301t\u00e9", "locked")]  # the second one with a combining accent
    columns = (Column("NAME", least=6), Column("STATE"))
    assert fit(columns, rows, 80) == ["NAME      STATE", "模型客服  running", "e\u0301t\u00e9       locked"]
    assert fit(columns, rows, 15)[1] == "模型…   running"
    assert [cells(line) for line in fit(columns, rows, 15)] == [13, 15, 14]


@pytest.mark.parametrize(
    ("size", "keeps_end", "expected"),
    [(None, True, "abcdefghijkl"), (12, True, "abcdefghijkl"), (9, True, "abcd…ijkl"), (9, False, "abcdefgh…"),
     (8, True, "abcdefg…"), (1, True, "…"), (0, True, "")],
)  # fmt: skip
def test_shortened(size: int | None, keeps_end: bool, expected: str) -> None:
    assert shortened("abcdefghijkl", size, keeps_end=keeps_end) == expected


def test_prose_wraps_between_words() -> None:
    assert list(wrapped("one two three", 9)) == ["one two", "three"]
    assert list(wrapped("one two three", 12, first="so: ")) == ["so: one two", "    three"]
    assert list(wrapped("one two three", 9, first="so: ", indent=1)) == ["so: one", " two", " three"]
    assert list(wrapped("one two three", None, first="so: ")) == ["so: one two three"]
    assert list(wrapped("", 9, first="so: ")) == ["so:"]
