"""What a run says of processes that end badly: what happened first comes first, and a traceback comes once.

When a server is killed, every worker fails soon after, each with a traceback of its own. Those are consequences: of one
of them the traceback is shown, of the others a line.

    windlass run: server 1 ended with signal SIGKILL (not sent by this run: out of memory?)
    windlass run: worker 0 ended with exit code 1:
      Traceback (most recent call last):
      ...
    windlass run: worker 1 ended with exit code 1: ServerLost
    windlass run: exit code 1, that of worker 0; the first to end was server 1, with signal SIGKILL
"""

import signal
import sys
from collections.abc import Callable
from typing import Protocol

from windlass.launch.child import describe
from windlass.launch.last_words import LastWords
from windlass.launch.output import show


class Ended(Protocol):
    """A process that has ended, here or on another host."""

    @property
    def role(self) -> str:
        """What it was."""

    @property
    def name(self) -> str:
        """Its role and number."""

    @property
    def code(self) -> int | None:
        """Its exit code, or the signal that ended it with a minus."""

    @property
    def last_words(self) -> LastWords:
        """What it said at last."""


class Failures:
    """Of one run, in the order in which they were noticed. to: who is told."""

    def __init__(self, to: Callable[[str], object] | None = None) -> None:
        self._say = say if to is None else to
        self._first: Ended | None = None
        self._told = 0  # how many there were
        self._tracebacks: list[list[str]] = []  # that were shown
        self._shows = True  # whether the next traceback is shown

    @property
    def service_lost(self) -> bool:
        """Whether the first to end was a server or the scheduler, so that failures of workers may follow from it."""
        return self._first is not None and self._first.role != "worker"

    def tell(self, child: Ended, then: str = "") -> None:
        """Says that it has ended, and what happens now."""
        self._first = self._first or child
        self._told += 1
        text, words = f"{child.name} ended with {how(child)}{then}", child.last_words.take()
        if words and self._shows and words not in self._tracebacks:
            self._tracebacks.append(words)
            self._shows = False
            text = "\n  ".join([f"{text}:", *words])
        elif words:
            text = f"{text}: {_kind(child)}"
        self._say(text)

    def forgive(self) -> None:
        """Somebody replaces who has failed: the next failure may be another matter."""
        self._shows = True

    def conclude(self, failed: Ended, code: int, just_told: bool) -> None:
        """Says where the exit code comes from, unless that is all that was said, and just now."""
        if self._first is not None and not (just_told and self._told == 1):
            first = f"; the first to end was {self._first.name}, with {describe(self._first.code or 0)}"
            self._say(f"exit code {code}, that of {failed.name}{'' if self._first.name == failed.name else first}")


def _kind(child: Ended) -> str:
    """Of an exception, its class; of what a server says, everything."""
    error = child.last_words.error
    return error.partition(":")[0].rpartition(".")[2] if child.role == "worker" else error


def how(child: Ended) -> str:
    """What it ended with. SIGKILL comes from the run only when it ends, and then nobody is told."""
    killed = child.code == -signal.SIGKILL
    return describe(child.code or 0) + (" (not sent by this run: out of memory?)" if killed else "")


def say(text: str) -> None:
    """To whoever has started the run."""
    show(f"windlass run: {text}", sys.stderr)
