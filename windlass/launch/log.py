"""What a server or the scheduler writes about itself: lines on stderr, of which no source may write too many.

Strangers cost little, and that includes the log: a source, the host of a peer, may cause 20 lines in 10 seconds. Lines
that name no source are limited by what they say, at a rate that only a loop reaches. What is left out is counted.
"""

import collections
import logging
import sys
import threading
import time
from collections.abc import Callable

WINDOW_SECONDS = 10.0
LINES_MAX = 20  # of one source in a window
LINES_ALIKE_MAX = 1000  # of no source, with the same format
KEYS_MAX = 1024  # whoever comes when there are so many counts as one


class RateLimit(logging.Filter):
    """Lets a limited number of lines pass. A record's `source` (`extra=`) is who caused it.

    tell: called, from another thread, with a record that counts what was left out of a window.
    """

    def __init__(self, tell: Callable[[logging.LogRecord], object]) -> None:
        super().__init__()
        self._tell = tell
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, ...], int] = {}  # in the window that began with the first of them
        self._windows: collections.deque[tuple[float, tuple[str, ...], str]] = collections.deque()  # when each ends
        self._watched = False  # whether a thread ends windows

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        source: str | None = getattr(record, "source", None)
        key = (source,) if source is not None else (record.name, record.levelname, str(record.msg))
        with self._lock:
            if key not in self._counts and len(self._counts) >= KEYS_MAX:
                key = ("others",)
            before = self._counts.get(key, 0)
            self._counts[key] = before + 1
            if before == 0:
                self._windows.append((time.monotonic() + WINDOW_SECONDS, key, record.name))
                self._watch()
        return before < _most(key)

    def _watch(self) -> None:
        """With the lock: starts the thread that ends windows, unless it runs."""
        if self._watched:
            return
        try:
            threading.Thread(target=self._end_windows, name="windlass-log-windows", daemon=True).start()
            self._watched = True
        except RuntimeError:  # no thread to be had, so nobody would end them
            self._windows.clear()
            self._counts.clear()

    def _end_windows(self) -> None:
        """One after the other, in the order in which they began, until there is none."""
        while True:
            with self._lock:
                if not self._windows:
                    self._watched = False
                    return
                due, key, logger = self._windows[0]
                if (left := due - time.monotonic()) <= 0:
                    self._windows.popleft()
                    left_out = self._counts.pop(key, 0) - _most(key)
            if left > 0:
                time.sleep(left)
            else:
                self._say(key, logger, left_out)

    def _say(self, key: tuple[str, ...], logger: str, left_out: int) -> None:
        if left_out > 0:
            what = f"from {key[0]}" if len(key) == 1 else f"like {key[-1]!r}"
            text = f"{left_out} more lines {what} were left out within {WINDOW_SECONDS:g} s"
            self._tell(logging.LogRecord(logger, logging.WARNING, __file__, 0, text, None, None))


def _most(key: tuple[str, ...]) -> int:
    return LINES_MAX if len(key) == 1 else LINES_ALIKE_MAX


def set_up_log(level: int = logging.INFO) -> None:
    """Lines on stderr, each with its level in front. One that cannot be written is lost, and nothing else."""
    logging.raiseExceptions = False
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RateLimit(handler.emit))
    logging.basicConfig(level=level, format="%(levelname)s %(message)s", handlers=[handler])
