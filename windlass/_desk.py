"""Where a worker's leases come from: the scheduler, or ledgers inside the process for threads that act as workers."""

import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from windlass._errors import SpecMismatch
from windlass.control import messages as m
from windlass.control.leases import Ledger, said

if TYPE_CHECKING:
    from windlass._scheduled import Attendance


class Desk(Protocol):
    """Where leases come from."""

    is_near: bool  #: asking takes no time, and it is never away
    recalled: bool  #: the worker holds less than it knows

    def ask(self, make: Callable[[int], m.Lease], seconds: float) -> m.Leased:
        """What the ledger answers."""

    @property
    def away(self) -> bool:
        """Whether nobody would answer at the moment."""

    def check(self) -> None:
        """Raises why nobody ever will."""

    def leave(self) -> None:
        """This worker takes no more."""


class Ledgers:
    """Those of an engine inside the process, by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, Ledger] = {}
        self._desks: dict[int, NearDesk] = {}
        self._numbers = itertools.count(1)

    def desk(self, name: str, workers: int) -> "NearDesk":
        """For one more worker."""
        number = next(self._numbers)
        made = self._desks[number] = NearDesk(self, number, name, workers)
        return made

    def ask(self, who: int, workers: int, question: m.Lease) -> m.Leased:
        """What the ledger answers."""
        with self._lock:
            ledger = self._by_name.setdefault(question.name, Ledger(question.terms))
            if ledger.terms != question.terms:
                raise SpecMismatch(
                    f"lease {question.name!r} exists with other terms\n  there: {said(ledger.terms)}\n"
                    f"  asked: {said(question.terms)}"
                )
            leased = ledger.ask(who, workers, question)
            for other in ledger.recalled:
                self._desks[other].recalled = True
            ledger.recalled.clear()
            return leased

    def leave(self, who: int, name: str) -> None:
        """A worker takes no more."""
        with self._lock:
            self._desks.pop(who, None)
            if name in self._by_name:
                self._by_name[name].left(who)

    def status(self) -> dict[str, dict[str, int]]:
        """As of a scheduler's, by name."""
        with self._lock:
            return {name: ledger.status() for name, ledger in self._by_name.items()}


class NearDesk:
    """A worker at the ledgers of its process."""

    is_near = True
    away = False

    def __init__(self, ledgers: Ledgers, who: int, name: str, workers: int) -> None:
        self._ledgers, self._who, self._name, self._workers = ledgers, who, name, workers
        self.recalled = False

    def ask(self, make: Callable[[int], m.Lease], seconds: float) -> m.Leased:
        """What the ledger answers."""
        self.recalled = False
        return self._ledgers.ask(self._who, self._workers, make(0))

    def check(self) -> None:
        """It is always there."""

    def leave(self) -> None:
        """This worker takes no more."""
        self._ledgers.leave(self._who, self._name)


class FarDesk:
    """A worker at its scheduler."""

    is_near = False
    recalled = False  # a Recall is a message, and wakes the thread

    def __init__(self, attendance: "Attendance", name: str) -> None:
        self._attendance, self._name = attendance, name

    def ask(self, make: Callable[[int], m.Lease], seconds: float) -> m.Leased:
        """What the ledger answers, once the scheduler is there."""
        leased = self._attendance.member.ask(make, f"lease {self._name!r}", seconds).leased
        assert leased is not None
        return leased

    @property
    def away(self) -> bool:
        """Whether the scheduler is."""
        return self._attendance.member.away

    def check(self) -> None:
        """Raises why the scheduler does not want us any more."""
        if self._attendance.over is not None:
            raise self._attendance.over

    def leave(self) -> None:
        """The scheduler knows when the worker leaves."""
        self._attendance.recalls.pop(self._name, None)
