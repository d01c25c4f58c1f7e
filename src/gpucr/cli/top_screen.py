"""`gpucr top` on a terminal: curses draws and reads keys. Only the thread that runs this touches the terminal.

curses restores the terminal however the block ends: by a key, an exception, or a signal, which is noted and ends the
loop. A running operation is then cancelled and waited for, unless another Ctrl-C leaves it to its guard.
"""

from __future__ import annotations

import contextlib
import curses
import locale
import os
import queue
import select
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

from gpucr.cli.output import say
from gpucr.cli.top_lines import Style, screen
from gpucr.cli.top_state import Cancel, Command, Look, Notice, Operate, Quit, TopState
from gpucr.cli.top_work import Blind, Ended, Judged, News, NewsQueue, Seen, Watch, Work, judge, looked_aside
from gpucr.errors import Interrupted
from gpucr.undo.events import Progress

TerminalError = curses.error
_KEY_WAIT_MS = 100
_ESCAPE_DELAY_MS = 25
_KEYS = {
    curses.KEY_UP: "up",
    curses.KEY_DOWN: "down",
    curses.KEY_PPAGE: "page-up",
    curses.KEY_NPAGE: "page-down",
    curses.KEY_HOME: "home",
    curses.KEY_END: "end",
    27: "escape",
}


class TopScreen:
    """The loop: keys and news in, lines out. ``outcomes``: the ended operations, in order."""

    def __init__(self, look: Callable[[], Seen], interval_s: float) -> None:
        """``look`` finds the jobs; its errors are raised."""
        seen = looked_aside(look)
        self._state = TopState(seen.jobs, seen.gpus, activity=seen.activity, kept=seen.kept)
        self._news: NewsQueue = queue.SimpleQueue()
        self._watch = Watch(self._news, look, interval_s)
        self._work: Work | None = None
        self._must_end = False
        self._is_cut_short = False
        self.outcomes: list[Ended] = []

    def run(self) -> None:
        """Run until the user leaves. Raises Interrupted if a signal or the terminal's end ended it.

        Raises TerminalError for an unknown terminal.
        """
        curses.setupterm()  # initscr would end the program
        locale.setlocale(locale.LC_CTYPE, "")
        with self._signals():
            self._watch.start()
            try:
                curses.wrapper(self._loop)
            except curses.error:
                if not _has_hung_up():
                    raise
                self._must_end = True
            finally:
                self._watch.stop()
                self._finish()
            if self._must_end:
                raise Interrupted("interrupted")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Signals end the loop. Ctrl-Z does nothing: it would stop an operation midway, with the job locked."""

        def note(number: int, frame: FrameType | None) -> None:
            self._must_end = self._must_end or number != signal.SIGTSTP
            self._is_cut_short = number == signal.SIGINT

        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)
        before = {number: signal.signal(number, note) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _loop(self, window: curses.window) -> None:
        attributes = _attributes()
        with contextlib.suppress(curses.error):
            curses.curs_set(0)
        curses.set_escdelay(_ESCAPE_DELAY_MS)
        window.timeout(_KEY_WAIT_MS)
        while not self._must_end:
            self._take_news()
            _follow_size(window)
            _draw(window, self._state, attributes)
            code = window.getch()
            if code == curses.KEY_RESIZE:
                window.clear()  # terminals treat their content differently then: redraw it
            key = _key(code)
            if key is None:
                self._must_end = self._must_end or _has_hung_up()
            elif isinstance(command := self._state.press(key), Quit):
                return
            elif command is not None:
                self._do(command)

    def _do(self, command: Command) -> None:
        if isinstance(command, Operate):
            self._work = Work(self._news, command)
        elif isinstance(command, Look):
            judge(self._news, command.pid)
        elif isinstance(command, Cancel) and self._work is not None:
            self._work.cancel()

    def _take_news(self) -> None:
        while True:
            try:
                self._take(self._news.get_nowait())
            except queue.Empty:
                return

    def _take(self, news: News) -> None:
        if isinstance(news, Seen):
            self._state.take_jobs(news.jobs, news.gpus, activity=news.activity, kept=news.kept)
        elif isinstance(news, Blind):
            self._state.notice = Notice((news.problem,), is_error=True)
        elif isinstance(news, Judged):
            self._state.take_findings(news.pid, news.findings)
        elif isinstance(news, Progress):
            self._state.take_progress(news)
        else:
            self.outcomes.append(news)
            self._work = None
            self._state.ended(news.notice)
            self._watch.look_now()

    def _finish(self) -> None:
        """After the screen: undo running work, and wait for that."""
        if self._work is not None:
            self._is_cut_short = False
            say("ending: what is under way is being undone; press Ctrl-C again to leave that to its guard")
            self._work.cancel()
            while not self._work.is_over(_KEY_WAIT_MS / 1000):
                if self._is_cut_short:
                    say("ended; the guard of what was under way brings the job back")
                    os._exit(Interrupted.exit_code)  # skip Python's wait for the polling thread
        self._take_news()


def _attributes() -> dict[Style, int]:
    """NO_COLOR needs no case: these are no colours."""
    return {
        "plain": curses.A_NORMAL,
        "title": curses.A_BOLD,
        "heading": curses.A_UNDERLINE,
        "selected": curses.A_REVERSE,
        "error": curses.A_BOLD,
        "question": curses.A_BOLD,
        "keys": curses.A_DIM,
    }


def _follow_size(window: curses.window) -> None:
    """Adopt the terminal's size from the kernel if the window's differs.

    curses checks it only after a SIGWINCH, which may not come: a blocked signal mask is inherited.
    """
    columns, lines = os.get_terminal_size(sys.stdout.fileno())
    if columns and lines and window.getmaxyx() != (lines, columns):  # 0: unset, as on a serial line
        curses.resizeterm(lines, columns)
        window.clear()


def _draw(window: curses.window, state: TopState, attributes: dict[Style, int]) -> None:
    height, width = window.getmaxyx()
    window.erase()
    for row, line in enumerate(screen(state, width, height)):
        with contextlib.suppress(curses.error):  # the terminal has shrunk meanwhile
            window.insnstr(row, 0, line.text, width, attributes[line.style])  # unlike addnstr, it never wraps
    window.refresh()


def _key(code: int) -> str | None:
    """The name of a key; None if none was pressed. An empty name: one that means nothing here."""
    if code == -1:
        return None
    return _KEYS.get(code) or (chr(code) if 32 < code < 127 else "")


def _has_hung_up() -> bool:
    poll = select.poll()
    poll.register(sys.stdin.fileno(), 0)
    return bool(poll.poll(0))
