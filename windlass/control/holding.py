"""What a worker holds of a ledger: ranges to use, what it has begun, and what it has to report. Pure.

draw()  ->  a batch, of the lowest range that it holds up to its epoch; its range is begun
done()  ->  all batches of a range were used and their iterations closed; it is in the next question
question(), answered()  ->  to the ledger and back; one at a time, lost or repeated as may be
"""

import collections
import dataclasses
from collections.abc import Iterator

from windlass.control import messages as m
from windlass.control.leases import pack, ranges_of, size_of, unpack

Key = tuple[int, int]  # epoch, range


@dataclasses.dataclass(frozen=True)
class Batch:
    """Positions `begin` to `end` of an epoch, of one range."""

    key: Key
    begin: int
    end: int
    last: bool  #: of its range


class Holding:
    """See the head of this file."""

    def __init__(self, name: str, terms: m.LeaseTerms) -> None:
        self.name = name
        self.terms = terms
        self.ranges = ranges_of(terms)
        self.epoch = 0  #: that the worker is in
        self.complete = 0  #: epochs that are known to be done
        self.want = 2  #: ranges to hold
        self.hungry = False  #: whether there was nothing to draw
        self.ended = False  #: nothing of the epoch is left for this worker, said the ledger
        self.samples_done = 0  #: of ranges that were done, duplicates included
        self.taken_back = 0  #: ranges
        self.duplicates = 0  #: samples
        self._waiting: collections.deque[Key] = collections.deque()  # held, not begun, in order
        self._begun: dict[Key, None] = {}
        self._now: Key | None = None  # the range that batches are drawn from
        self._at = 0  # position of the next one
        self._reports: list[m.Used] = []  # not acknowledged
        self._kept: list[m.Used] = []  # acknowledged, of epochs that are not done: for a ledger that is made again
        self._acknowledged = 0
        self._whole = True  # the next question has all of them
        self._asked: m.Lease | None = None
        self._over: set[Key] = set()  # reported since that was asked

    def __len__(self) -> int:
        """Ranges that are not begun."""
        return len(self._waiting)

    @property
    def has_reports(self) -> bool:
        """Whether the ledger does not know everything that was done."""
        return bool(self._reports)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to draw in this epoch."""
        return self._now is not None or bool(self._waiting and self._waiting[0][0] <= self.epoch)

    def enter(self, epoch: int) -> None:
        """The worker begins an epoch."""
        self.epoch, self.ended, self.hungry = epoch, False, False

    # -- using -------------------------------------------------------------------------------------------------------

    def draw(self) -> Batch | None:
        """The next batch of this epoch, or of one before. None: nothing of that is held."""
        if self._now is None:
            if not self.has_work:
                self.hungry = True
                return None
            self._now = self._waiting.popleft()
            self._begun[self._now] = None
            self._at = self._now[1] * self.terms.range
        self.hungry = False
        key, begin = self._now, self._at
        stop = key[1] * self.terms.range + size_of(self.terms, key[1])
        end = self._at = min(begin + self.terms.batch, stop)
        if end == stop:
            self._now = None
        return Batch(key, begin, end, end == stop)

    def done(self, key: Key) -> None:
        """A range was used up."""
        size = size_of(self.terms, key[1])
        self.samples_done += size
        self._report(key, size)

    def _report(self, key: Key, samples: int) -> None:
        self._begun.pop(key, None)
        self._over.add(key)
        self._reports.append((*key, samples))

    # -- asking ------------------------------------------------------------------------------------------------------

    def question(self, number: int) -> m.Lease:
        """All that there is to say."""
        done = self._kept + self._reports if self._whole else self._reports
        first = self._acknowledged - (len(self._kept) if self._whole else 0)
        self._over.clear()
        self._asked = m.Lease(
            number,
            self.name,
            self.terms,
            self.epoch,
            self.hungry,
            min(self.want, m.HELD_MAX),
            self.complete,
            pack(self._waiting),
            pack(sorted(self._begun)),
            first,
            list(done),
            self._whole,
        )
        return self._asked

    def answered(self, leased: m.Leased) -> None:
        """What the ledger makes of the last question."""
        asked = self._asked
        if asked is None:
            return
        self._whole = leased.again
        if leased.again:
            return
        counted, self._reports = self._split(leased.known - self._acknowledged)
        self._acknowledged = leased.known
        self.duplicates = leased.duplicates
        self.complete = max(self.complete, leased.complete)
        self._kept = [used for used in (*self._kept, *counted) if used[0] >= self.complete]
        held = set(unpack(leased.held)) - self._over
        self._lose((key for key in unpack(asked.held) if key not in held), begun=False)
        self._lose((key for key in unpack(asked.begun) if key not in held), begun=True)
        self._waiting = collections.deque(sorted(held - self._begun.keys()))
        if asked.hungry and asked.epoch == self.epoch:
            self.ended = leased.ended

    def _split(self, count: int) -> tuple[list[m.Used], list[m.Used]]:
        return self._reports[:count], self._reports[count:]

    def _lose(self, keys: Iterator[Key], *, begun: bool) -> None:
        """What is not ours any more. What had been begun then was done by another: the rest of it is of no use.

        What was begun since then is gone on with; so is what is drawn already.
        """
        for key in keys:
            if key in self._over:
                continue
            if key not in self._begun:
                self.taken_back += 1
            elif begun and key == self._now:
                self._now = None
                self._report(key, self._at - key[1] * self.terms.range)
