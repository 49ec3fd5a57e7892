"""Where a worker's leases come from: the scheduler, or ledgers inside the process for threads that act as workers."""

import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from windlass._errors import SpecMismatch
from windlass.control import messages as m
from windlass.control.leases import Ledger, said
from windlass.control.leases import Saved as SavedLedger

if TYPE_CHECKING:
    from windlass._client.scheduler_client import Attendance


class LeaseSource(Protocol):
    """Where leases come from."""

    is_near: bool  #: inside the process: asking takes no time, and it is never away
    recalled: bool  #: the ledger has taken back ranges that the worker holds

    def ask(self, make: Callable[[int], m.Lease], seconds: float) -> m.Leased:
        """The ledger's answer."""

    @property
    def away(self) -> bool:
        """Whether the ledger is out of reach at the moment."""

    def check(self) -> None:
        """Raises if there will never be an answer again."""

    def leave(self) -> None:
        """This worker takes no more."""


class Ledgers:
    """The ledgers of an engine inside the process, by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, Ledger] = {}
        self._sources: dict[int, NearLeaseSource] = {}
        self._numbers = itertools.count(1)

    def source(self, name: str, workers: int) -> "NearLeaseSource":
        """A source for one more worker."""
        number = next(self._numbers)
        made = self._sources[number] = NearLeaseSource(self, number, name, workers)
        return made

    def ask(self, who: int, workers: int, question: m.Lease) -> m.Leased:
        """The ledger's answer."""
        with self._lock:
            ledger = self._by_name.setdefault(question.name, Ledger(question.terms))
            if ledger.terms != question.terms:
                raise SpecMismatch(
                    f"lease {question.name!r} exists with other terms\n  there: {said(ledger.terms)}\n"
                    f"  asked: {said(question.terms)}"
                )
            leased = ledger.ask(who, workers, question)
            for other in ledger.recalled:
                self._sources[other].recalled = True
            ledger.recalled.clear()
            return leased

    def leave(self, who: int, name: str) -> None:
        """A worker takes no more."""
        with self._lock:
            self._sources.pop(who, None)
            if name in self._by_name:
                self._by_name[name].left(who)

    def saved(self) -> dict[str, SavedLedger]:
        """What is done, by name, for a checkpoint."""
        with self._lock:
            return {name: ledger.saved() for name, ledger in self._by_name.items()}

    def restore(self, saved: dict[str, SavedLedger]) -> None:
        """Goes on where others had got to. Raises BadLease."""
        restored = {name: Ledger.restored(one) for name, one in saved.items()}
        with self._lock:
            self._by_name.update(restored)

    def status(self) -> dict[str, dict[str, int]]:
        """The status of each ledger, by name, as a scheduler gives it."""
        with self._lock:
            return {name: ledger.status() for name, ledger in self._by_name.items()}


class NearLeaseSource:
    """The ledgers inside the worker's process."""

    is_near = True
    away = False

    def __init__(self, ledgers: Ledgers, who: int, name: str, workers: int) -> None:
        self._ledgers, self._who, self._name, self._workers = ledgers, who, name, workers
        self.recalled = False

    def ask(self, make: Callable[[int], m.Lease], seconds: float) -> m.Leased:
        """The ledger's answer."""
        self.recalled = False
        return self._ledgers.ask(self._who, self._workers, make(0))

    def check(self) -> None:
        """Never raises: the ledger is in this process."""

    def leave(self) -> None:
        """This worker takes no more."""
        self._ledgers.leave(self._who, self._name)


class SchedulerLeaseSource:
    """The ledgers of the worker's scheduler."""

    is_near = False
    recalled = False  # a Recall is a message, and wakes the thread

    def __init__(self, attendance: "Attendance", name: str) -> None:
        self._attendance, self._name = attendance, name

    def ask(self, make: Callable[[int], m.Lease], seconds: float) -> m.Leased:
        """The ledger's answer, once the scheduler is there."""
        leased = self._attendance.member.ask(make, f"lease {self._name!r}", seconds).leased
        assert leased is not None
        return leased

    @property
    def away(self) -> bool:
        """Whether the scheduler is out of reach."""
        return self._attendance.member.away

    def check(self) -> None:
        """Raises if our membership has ended."""
        if self._attendance.over is not None:
            raise self._attendance.over

    def leave(self) -> None:
        """Forgets recalls; the scheduler notices itself when the worker leaves."""
        self._attendance.recalls.pop(self._name, None)
