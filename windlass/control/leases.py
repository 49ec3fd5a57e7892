"""The ledger of leased data: which ranges of which epoch are free, held, begun and done. Pure: no time, no I/O.

An epoch is the positions 0 to samples - 1, cut into ranges. Workers map positions to samples by a permutation that
they all can compute, so the ledger never shuffles.

    free  ->  held  ->  begun  ->  done        by the worker's word; a range may have two holders, done counts once
      ^________|__________|                    its holder has died or left
               |->  held by another            nobody else has anything to do, and it was not begun

A worker's question (m.Lease) has all that it knows, and the answer all that it holds, so that both may be lost and
repeated. What a worker says it has begun or done is a fact, whoever the ledger had given the range to: at worst a range
is done twice, which is counted, and it is never lost.
"""

import dataclasses
import heapq
from collections.abc import Iterable, Iterator

import msgspec

from windlass.control import messages as m

EPOCHS_AHEAD_MAX = 4096  # beyond the one a worker is in


class BadLease(Exception):
    """A question that does not fit the ledger's terms."""


def said(terms: m.LeaseTerms) -> str:
    """For people."""
    order = f"shuffled by seed {terms.seed}" if terms.shuffle else "in order"
    cut = f"batches of {terms.batch}, ranges of {terms.range}"
    return f"{terms.samples} samples, {terms.epochs} epochs, {order}, {cut}"


def ranges_of(terms: m.LeaseTerms) -> int:
    """How many an epoch has."""
    return -(-terms.samples // terms.range)


def size_of(terms: m.LeaseTerms, index: int) -> int:
    """Samples of a range."""
    return min(terms.range, terms.samples - index * terms.range)


def pack(keys: Iterable[tuple[int, int]]) -> list[m.Ranges]:
    """Ranges, in order, as runs."""
    runs: list[m.Ranges] = []
    for epoch, index in keys:
        if runs and runs[-1][0] == epoch and runs[-1][1] + runs[-1][2] == index:
            runs[-1] = (epoch, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((epoch, index, 1))
    return runs


def unpack(runs: Iterable[m.Ranges]) -> Iterator[tuple[int, int]]:
    """The same one by one."""
    return ((epoch, index) for epoch, first, count in runs for index in range(first, first + count))


class Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ledger as a checkpoint has it."""

    terms: m.LeaseTerms
    complete: m.U32  #: epochs
    counted: m.U64  #: samples
    duplicates: m.U64
    done: list[m.Ranges]  #: in epochs that are not complete


class Epoch:
    """The ranges of an epoch that is not done."""

    def __init__(self, ranges: int) -> None:
        self.ranges = ranges
        self.done = bytearray(ranges)
        self.done_count = 0
        self.holders: dict[int, dict[int, bool]] = {}  #: by range: workers, and whether each has begun
        self._next = 0  # from it on nothing was ever given
        self._returned: list[int] = []  # a heap; some may have been given again

    @property
    def open(self) -> int:
        """Ranges that are not done."""
        return self.ranges - self.done_count

    @property
    def free(self) -> int:
        """Ranges that nobody holds."""
        return self.open - len(self.holders)

    def is_free(self, index: int) -> bool:
        """Whether it is to be done, and nobody's."""
        return not self.done[index] and index not in self.holders

    def first_free(self) -> int | None:
        """The lowest that nobody holds."""
        while self._returned:
            if self.is_free(index := heapq.heappop(self._returned)):
                return index
        while self._next < self.ranges:
            self._next += 1
            if self.is_free(self._next - 1):
                return self._next - 1
        return None

    def give_back(self, index: int) -> None:
        """Nobody's again."""
        heapq.heappush(self._returned, index)


@dataclasses.dataclass
class Worker:
    """Who leases."""

    known: int = -1  #: how many reports of it were counted; -1: nothing is known of it
    duplicates: int = 0
    held: dict[int, dict[int, bool]] = dataclasses.field(default_factory=dict)  #: by epoch and range: begun?
    counted: dict[int, list[int]] = dataclasses.field(default_factory=dict)  #: ranges that it was counted for, by epoch

    def count(self) -> int:
        """Ranges that it holds."""
        return sum(map(len, self.held.values()))


class Ledger:
    """See the head of this file. `recalled` has the workers that hold less than they know; whoever asks clears it."""

    def __init__(self, terms: m.LeaseTerms) -> None:
        self.terms = terms
        self.ranges = ranges_of(terms)
        self.complete = 0  #: epochs that are done, from the first on
        self.workers: dict[int, Worker] = {}
        self.recalled: set[int] = set()
        self.counted = 0  #: samples that were done, each of an epoch once
        self.duplicates = 0  #: samples that were done again
        self._epochs: dict[int, Epoch] = {}  # from `complete` on, those that anybody has touched
        self._by_gone: dict[int, list[int]] = {}  # ranges that were done by workers who are gone, by epoch
        self._duplicates_by_gone = 0

    def ask(self, who: int, workers: int, question: m.Lease) -> m.Leased:
        """What a worker holds after what it has said. `workers`: how many there are to share with."""
        self._check(question)
        me = self.workers.setdefault(who, Worker())
        is_new = me.known < 0
        if is_new and question.whole:
            me.known = question.first
        if me.known < question.first:
            return m.Leased([], self.complete, max(me.known, 0), again=True)
        self._complete_up_to(question.complete)
        for epoch, index, samples in question.done[me.known - question.first :]:
            me.known += 1
            if epoch >= self.complete or not question.whole:  # an earlier ledger has counted that
                self._used(who, me, epoch, index, samples)
        for epoch, index in unpack(question.begun):
            self._still_held(who, me, epoch, index, begun=True)
        for epoch, index in unpack(question.held if is_new else ()):  # else we know better
            self._still_held(who, me, epoch, index, begun=False)
        ended = self._give(who, me, max(workers, 1), question)
        held = pack((epoch, index) for epoch in sorted(me.held) for index in sorted(me.held[epoch]))
        return m.Leased(held, self.complete, me.known, ended, duplicates=me.duplicates)

    def left(self, who: int) -> None:
        """A worker is gone: what it has not done is for the others."""
        me = self.workers.pop(who, None)
        self.recalled.discard(who)
        if me is None:
            return
        for epoch, held in me.held.items():
            for index in held:
                self._let_go(who, self._epochs[epoch], index)
        self._duplicates_by_gone += me.duplicates
        for epoch, counted in me.counted.items():
            self._by_gone.setdefault(epoch, []).extend(counted)

    def saved(self) -> "Saved":
        """What is done, for a checkpoint. What somebody holds is to be done again."""
        done = {number: [index for index in range(at.ranges) if at.done[index]] for number, at in self._epochs.items()}
        runs = pack((number, index) for number in sorted(done) for index in done[number])
        return Saved(self.terms, self.complete, self.counted, self.duplicates, runs)

    def kept(self) -> "Saved":
        """What no worker that is there could say again. With their words a ledger of it is this one."""
        done = {epoch: sorted(ranges) for epoch, ranges in sorted(self._by_gone.items())}
        sizes = sum(size_of(self.terms, index) for ranges in done.values() for index in ranges)
        runs = pack((epoch, index) for epoch, ranges in done.items() for index in ranges)
        counted = self.complete * self.terms.samples + sizes
        return Saved(self.terms, self.complete, counted, self._duplicates_by_gone, runs)

    @classmethod
    def restored(cls, saved: "Saved") -> "Ledger":
        """A ledger that goes on where another had got to. Raises BadLease."""
        ledger = cls(saved.terms)
        ledger.take(saved)
        return ledger

    def take(self, saved: "Saved") -> None:
        """A ledger that is new goes on from there. Raises BadLease."""
        if saved.complete > saved.terms.epochs:
            raise BadLease(f"{saved.complete} epochs are done of {saved.terms.epochs}")
        self.complete, self.counted, self.duplicates = saved.complete, saved.counted, saved.duplicates
        self._duplicates_by_gone = saved.duplicates
        for epoch, first, count in saved.done:
            if not saved.complete <= epoch < saved.terms.epochs or first + count > self.ranges:
                raise BadLease(f"ranges {first} to {first + count - 1} of epoch {epoch} are not among {self.ranges}")
            at = self._epoch(epoch)
            assert at is not None
            for index in range(first, first + count):
                if not at.done[index]:
                    at.done_count += 1
                    at.done[index] = 1
                    self._by_gone.setdefault(epoch, []).append(index)
        self._advance()

    def status(self) -> dict[str, int]:
        """For people: ranges of the first epoch that is not done; samples of all epochs."""
        at = self._epochs.get(self.complete) or Epoch(0 if self.complete == self.terms.epochs else self.ranges)
        return {
            "samples": self.terms.samples,
            "epochs": self.terms.epochs,
            "epoch": self.complete,
            "ranges": self.ranges,
            "done": at.done_count,
            "held": len(at.holders),
            "free": at.free,
            "samples_done": self.counted,
            "duplicates": self.duplicates,
        }

    # -- what a worker says ------------------------------------------------------------------------------------------

    def _check(self, question: m.Lease) -> None:
        epochs, ranges = self.terms.epochs, self.ranges
        for epoch, first, count in (*question.held, *question.begun):
            if epoch >= epochs or first + count > ranges or count > m.HELD_MAX:
                raise BadLease(f"ranges {first} to {first + count - 1} of epoch {epoch} are not among {ranges}")
        for epoch, index, used in question.done:
            if epoch >= epochs or index >= ranges or used > size_of(self.terms, index):
                raise BadLease(f"{used} samples of range {index} of epoch {epoch} are not in {ranges} ranges")
        if question.epoch >= epochs or question.complete > epochs:
            raise BadLease(f"epoch {question.epoch}, {question.complete} done: there are {epochs}")

    def _epoch(self, number: int) -> Epoch | None:
        """None: it is done."""
        if number < self.complete:
            return None
        if number not in self._epochs:
            self._epochs[number] = Epoch(self.ranges)
        return self._epochs[number]

    def _used(self, who: int, me: Worker, epoch: int, index: int, used: int) -> None:
        """A worker has used so many samples of a range; all of them: it is done, if it was not."""
        at, size = self._epoch(epoch), size_of(self.terms, index)
        if at is None or at.done[index] or used < size:
            self.duplicates += used
            me.duplicates += used
            if at is not None:
                self._let_go(who, at, index)
                me.held.get(epoch, {}).pop(index, None)
            return
        self.counted += size
        me.counted.setdefault(epoch, []).append(index)
        self._done(epoch, at, index, by=who)
        self._advance()

    def _done(self, epoch: int, at: Epoch, index: int, by: int | None = None) -> None:
        at.done[index] = 1
        at.done_count += 1
        for holder in at.holders.pop(index, {}):
            self.workers[holder].held[epoch].pop(index, None)
            if holder != by:
                self.recalled.add(holder)

    def _advance(self) -> None:
        while (at := self._epochs.get(self.complete)) is not None and at.open == 0:
            self._forget(self.complete)

    def _forget(self, epoch: int) -> None:
        self._epochs.pop(epoch, None)
        self._by_gone.pop(epoch, None)
        self.complete = epoch + 1
        for worker in self.workers.values():
            worker.held.pop(epoch, None)
            worker.counted.pop(epoch, None)

    def _complete_up_to(self, complete: int) -> None:
        """A worker knows of epochs that are done: of a ledger before this one."""
        while self.complete < complete:
            at = self._epochs.get(self.complete)
            done = 0 if at is None else sum(size_of(self.terms, i) for i in range(at.ranges) if at.done[i])
            self.counted += self.terms.samples - done
            self._forget(self.complete)
        self._advance()

    def _still_held(self, who: int, me: Worker, epoch: int, index: int, *, begun: bool) -> None:
        """A worker has a range. It keeps it, unless it is done, or was given to another before it began."""
        at = self._epoch(epoch)
        if at is None or at.done[index]:
            return
        holders = at.holders.get(index, {})
        if who in holders or begun or not holders:
            self._hold(who, me, epoch, index, begun=begun or holders.get(who, False))

    # -- what it gets ------------------------------------------------------------------------------------------------

    def _hold(self, who: int, me: Worker, epoch: int, index: int, *, begun: bool) -> None:
        at = self._epoch(epoch)
        assert at is not None
        at.holders.setdefault(index, {})[who] = begun
        me.held.setdefault(epoch, {})[index] = begun

    def _let_go(self, who: int, at: Epoch, index: int) -> None:
        holders = at.holders.get(index, {})
        holders.pop(who, None)
        if index in at.holders and not holders:
            del at.holders[index]
            at.give_back(index)

    def _give(self, who: int, me: Worker, workers: int, question: m.Lease) -> bool:
        """Gives what is free, within the worker's share of each epoch. Whether its epoch has ended for it."""
        epoch = max(question.epoch, self.complete)
        until = min(self.terms.epochs, epoch + 1 + EPOCHS_AHEAD_MAX)
        missing = question.want - me.count()
        for number in range(self.complete, until):
            at = self._epoch(number)
            assert at is not None
            share = -(-at.open // workers) - len(me.held.get(number, ()))
            for _ in range(min(share, missing, at.free)):
                if (index := at.first_free()) is None:
                    break
                self._hold(who, me, number, index, begun=False)
                missing -= 1
            if missing <= 0:
                break
        if not question.hungry:
            return False
        begun = set(unpack(question.begun))
        waiting = [key for key in self._held(me, question.epoch) if key not in begun]
        if not waiting:
            if not self._feed(who, me, question):
                return True
            waiting = [key for key in self._held(me, question.epoch) if key not in begun]
        self._hold(who, me, *min(waiting), begun=True)  # it will be, at once: nobody is to take it back before
        return False

    def _feed(self, who: int, me: Worker, question: m.Lease) -> bool:
        """Something for a worker that has nothing to do: free, not begun by another, or begun by one other."""
        for number in range(self.complete, question.epoch + 1):
            at = self._epoch(number)
            assert at is not None
            if at.free and (index := at.first_free()) is not None:
                self._hold(who, me, number, index, begun=False)
                return True
        for number in range(self.complete, question.epoch + 1):
            if self._take_back(who, me, number, question.want):
                return True
        return any(self._copy(who, me, number) for number in range(self.complete, question.epoch + 1))

    def _take_back(self, who: int, me: Worker, epoch: int, want: int) -> bool:
        """Half of what the worker with most has not begun, its last ones."""
        at = self._epochs[epoch]
        most: list[int] = []
        victim = None
        for other, worker in self.workers.items():
            held = worker.held.get(epoch, {}) if other != who else {}
            idle = [i for i, begun in held.items() if not begun and len(at.holders[i]) == 1]
            if len(idle) > len(most):
                most, victim = idle, other
        if victim is None:
            return False
        for index in sorted(most)[-min(-(-len(most) // 2), max(want, 1)) :]:
            del at.holders[index][victim], self.workers[victim].held[epoch][index]
            self._hold(who, me, epoch, index, begun=False)
        self.recalled.add(victim)
        return True

    def _copy(self, who: int, me: Worker, epoch: int) -> bool:
        """A range that one other has begun: whoever finishes first counts."""
        for index, holders in self._epochs[epoch].holders.items():
            if len(holders) == 1 and who not in holders:
                self._hold(who, me, epoch, index, begun=False)
                return True
        return False

    @staticmethod
    def _held(me: Worker, epoch: int) -> Iterator[tuple[int, int]]:
        """What a worker holds, up to an epoch."""
        return ((number, index) for number, held in me.held.items() if number <= epoch for index in held)
