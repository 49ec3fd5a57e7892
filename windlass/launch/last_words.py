"""What a process prints before it ends badly, held back so that the launcher can say it once, after the cause.

    epoch 3                                  passed on
    Traceback (most recent call last):       held: it may be what the process ends with
      File "train.py", line 7, in <module>
    KeyError: 'that one'                     and so is what follows at once
                                             the process ends: the launcher has it
    going on                                 or it goes on: everything is passed on, in order

Nobody knows at a traceback whether the process ends with it or has only logged it. Who goes on prints something else,
or is quiet for HOLD_SECONDS. Pure: time comes from outside.
"""

import re

HOLD_SECONDS = 5.0  # a worker that ends takes leave of its cluster first
AT_ONCE_SECONDS = 0.2  # what comes later than that after an exception is no part of it
LINES_MAX = 1000
_HEAD = re.compile(r'(  [+] Exception Group )?Traceback \(most recent call last\):|  File ".*", line \d+$')
_LINK = re.compile(r"$|\s|During handling of the above exception|The above exception was the direct cause")
_OF_A_SERVER = re.compile("ERROR ")  # what it says if it cannot begin


class LastWords:
    """Of one process. is_server: its own errors are lines, without a traceback."""

    def __init__(self, *, is_server: bool = False) -> None:
        self._is_server = is_server
        self._held: list[str] = []
        self._at = 0.0  # when the last of them came
        self._complete = False  # the exception itself has come
        self.error = ""  #: the line that names the exception held at last

    def add(self, line: str, now: float) -> list[str]:
        """The lines to be passed on, now that this one has come."""
        head = _OF_A_SERVER if self._is_server else _HEAD
        if head.match(line):
            self._complete = self._is_server
            self.error = _OF_A_SERVER.sub("", line, count=1) if self._is_server else ""
        elif not self._held:
            return [line]
        elif self._complete and not _LINK.match(line) and now - self._at > AT_ONCE_SECONDS:
            return [*self.take(), line]
        elif not self._complete and not line[:1].isspace() and line:
            self._complete, self.error = True, line
        self._held.append(line)
        self._at = now
        return self.take() if len(self._held) > LINES_MAX else []

    def due(self) -> float | None:
        """When what is held is to be passed on at the latest; None: nothing is."""
        return self._at + HOLD_SECONDS if self._held else None

    def expire(self, now: float) -> list[str]:
        """The lines to be passed on because the process has gone on."""
        due = self.due()
        return self.take() if due is not None and now >= due else []

    def take(self) -> list[str]:
        """What is held, and no more from now on."""
        held, self._held = self._held, []
        return held
