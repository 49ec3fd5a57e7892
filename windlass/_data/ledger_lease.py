"""Leases from a ledger: the scheduler's, or one inside the process for threads that act as workers.

The consumer draws from what the worker holds, and waits for the ledger only when that is nothing. With a scheduler a
thread keeps enough in hand, and is the only one that asks; inside the process the consumer itself asks, which takes
microseconds.
"""

import collections
import contextlib
import math
import threading
import time
from typing import TYPE_CHECKING

from windlass._data.lease import Indices, Lease, Order, range_of
from windlass._data.lease_source import LeaseSource, SchedulerLeaseSource
from windlass._errors import Closed, InvalidArgument, Timeout, WindlassError
from windlass.control import messages as m
from windlass.control.holding import Batch, Holding, Key
from windlass.control.leases import ranges_of

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster

_PAUSE_SECONDS = (0.01, 0.25)  # between questions that are not urgent: at least, and at most
_PAUSE_FACTOR = 50  # and this many times the duration of a question
_GOODBYE_SECONDS = 2.0
_ANSWER_SECONDS = 1.0  # to wait for answers where nothing is left to draw; then the ledger is asked all the same
_FOREVER_SECONDS = 1e6
_LEAST = 2  # ranges to hold


def leased_by(
    cluster: "Cluster",
    name: str,
    samples: int,
    batch_size: int,
    epochs: int,
    order: Order,
    shuffle: bool,
    seed: int,
    ahead_seconds: float,
    lease_size: int | None,
) -> Lease:
    """A lease for this worker, from the ledger that its cluster has."""
    what = f"lease {name!r}"
    size = range_of(samples, batch_size) if lease_size is None else lease_size
    terms = m.LeaseTerms(int(samples), int(batch_size), int(size), int(epochs), bool(shuffle), int(seed))
    if ranges_of(terms) > m.RANGES_MAX:
        raise InvalidArgument(f"{what}: at most {m.RANGES_MAX} ranges in an epoch, not {ranges_of(terms)}")
    attendance = cluster._attendance
    if attendance is not None:
        made = LedgerLease(cluster, SchedulerLeaseSource(attendance, name), name, terms, order, float(ahead_seconds))
        attendance.recalls[name] = made._recall
        return made
    if cluster._remote is not None and cluster.world_size > 1:
        raise InvalidArgument(
            f"{what}: with servers=[...] there is no scheduler that could lease data to {cluster.world_size} workers; "
            'use split="static", or the address of a scheduler'
        )
    return LedgerLease(cluster, cluster._near.ledgers.source(name, cluster.world_size), name, terms, order, 0.0)


class LedgerLease(Lease):
    """A lease from a ledger; see the head of this file."""

    def __init__(
        self,
        cluster: "Cluster",
        source: LeaseSource,
        name: str,
        terms: m.LeaseTerms,
        order: Order,
        ahead_seconds: float,
    ) -> None:
        super().__init__(cluster, name, terms.samples, terms.batch, terms.epochs, order)
        self._source = source
        self._ahead_seconds = ahead_seconds
        self._range_batches = terms.range // terms.batch
        self._changed = threading.Condition(threading.RLock())  # of what follows
        self._holding = Holding(name, terms)
        self._drawn: collections.deque[Batch] = collections.deque()  # not yet handed to the user
        self._undone: collections.deque[Batch] = collections.deque()  # drawn in an epoch that was left early
        self._used: collections.deque[tuple[int, Key]] = (
            collections.deque()
        )  # ranges, and the clock at their last batch
        self._batch_seconds = 0.0
        self._handed_at = 0.0
        self._turned = False  # there is something to tell the ledger
        self._recalled = False  # the ledger has something to tell us
        self._error: WindlassError | None = None
        self._over = False
        self._thread: threading.Thread | None = None

    @property
    def samples_done(self) -> int:
        """Samples that this worker was given and whose iterations are closed and answered, in all epochs."""
        with self._changed:
            self._settle()
            return self._holding.samples_done

    @property
    def duplicates(self) -> int:
        """Samples that this worker used and another, too, whose work was counted."""
        return self._holding.duplicates

    @property
    def taken_back(self) -> int:
        """Ranges that this worker held and had not begun when they were given to others."""
        return self._holding.taken_back

    # -- the consumer ------------------------------------------------------------------------------------------------

    def _next_epoch(self) -> None:
        super()._next_epoch()
        with self._changed:
            self._holding.enter(self._epoch)
            self._handed_at = 0.0
            self._undone.extend(self._drawn)  # from a loop that was left early
            self._drawn.clear()

    def _draw(self) -> Indices | None:
        waited = False
        while True:
            with self._changed:
                self._check()
                self._settle()
                if self._source.recalled:
                    self._exchange()
                batch = self._undone.popleft() if self._undone else self._holding.draw()
                if batch is not None:
                    self._drawn.append(batch)
                    break
                unanswered = self._used[-1][0] if self._used and not self._drawn else None
            if unanswered is not None and not waited:  # the loop has used everything, whether it pushed anything or not
                if unanswered >= self._cluster.clock:
                    self._cluster.tick()
                self._cluster._session.await_settled(unanswered + 1, _ANSWER_SECONDS)
                waited = True
                continue
            with self._changed:
                if not self._fetch():
                    return None
        if batch.begin == batch.key[1] * self._holding.terms.range:
            self._turn()
        return self._order(batch.key[0], batch.begin, batch.end)

    def _hand(self) -> None:
        with self._changed:
            batch, now = self._drawn.popleft(), time.monotonic()
            if self._handed_at:
                seconds = now - self._handed_at
                self._batch_seconds += (seconds - self._batch_seconds) * (0.2 if self._batch_seconds else 1.0)
            self._handed_at = now
            if batch.last:
                self._used.append((self._cluster._session.iteration, batch.key))

    def _settle(self) -> None:
        """Ranges are done whose last batch was used in an iteration that is closed, with all its pushes answered.

        A worker that is killed before would take them with it.
        """
        clock = self._cluster._session.settled_clock
        while self._used and self._used[0][0] < clock:
            self._holding.done(self._used.popleft()[1])

    def _fetch(self) -> bool:
        """Waits for something to draw. Returns False when the epoch is over for this worker."""
        holding, deadline = self._holding, time.monotonic() + self._cluster._timeout
        self._turn()
        while not holding.has_work and not holding.ended:
            self._check()
            self._source.check()
            if self._source.away and len(holding):
                return False  # we hold ranges of later epochs; others do the rest of this one, or we do later
            if (left := deadline - time.monotonic()) <= 0:
                raise Timeout(f"lease {self.name!r}: no answer from the scheduler, and nothing is held any more")
            self._changed.wait(min(left, 0.1))
        self._handed_at = 0.0  # waiting does not count as the time of a batch
        return holding.has_work

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._over:
            raise Closed(f"lease {self.name!r}: the cluster has been closed")

    # -- the ledger --------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Called when there is something to tell the ledger, or to hear from it."""
        if self._source.is_near:
            self._exchange()
            return
        with self._changed:
            self._turned = True
            self._changed.notify_all()
            if self._thread is None and not self._over:
                self._thread = threading.Thread(target=self._run, name="windlass-lease", daemon=True)
                self._thread.start()

    def _recall(self) -> None:
        """The ledger has taken back ranges that this worker holds."""
        with self._changed:
            self._recalled = True
        self._turn()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._turned or self._over)
                if self._over:
                    return
            begun = time.monotonic()
            try:
                self._exchange()
            except WindlassError as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            pause = min(max(_PAUSE_FACTOR * (time.monotonic() - begun), _PAUSE_SECONDS[0]), _PAUSE_SECONDS[1])
            with self._changed:
                self._changed.wait_for(self._is_urgent, pause)

    def _is_urgent(self) -> bool:
        return self._over or self._recalled or (self._turned and self._holding.hungry)

    def _exchange(self) -> None:
        leased = self._source.ask(self._question, _FOREVER_SECONDS)
        with self._changed:
            if not self._over:
                self._holding.answered(leased)
                self._turned = self._turned or leased.again
            self._changed.notify_all()
        if leased.again and self._source.is_near:
            self._exchange()

    def _question(self, number: int) -> m.Lease:
        with self._changed:
            self._turned = self._recalled = False
            seconds = max(self._batch_seconds * self._range_batches, 1e-6)
            enough = math.ceil(self._ahead_seconds / seconds) if self._batch_seconds else _LEAST
            self._holding.want = min(max(enough, _LEAST), m.HELD_MAX)
            return self._holding.question(number)

    def _close(self, timeout: float, *, failed: bool) -> None:
        # A regular end closes the iteration. Inside the process whatever was pushed ends with us, or not at all.
        settled = not failed and (
            self._source.is_near or self._cluster._session.await_settled(self._cluster.clock + 1, timeout)
        )
        with self._changed:
            if self._over:
                return
            self._over = True
            if not settled:
                self._settle()
            while settled and self._used:
                self._holding.done(self._used.popleft()[1])
            self._changed.notify_all()
        if self._holding.has_reports and self._error is None:
            with contextlib.suppress(WindlassError):  # what the ledger does not hear of, another worker does again
                last = self._source.ask(self._holding.question, min(timeout, _GOODBYE_SECONDS))
                self._holding.duplicates = last.duplicates
        self._source.leave()
