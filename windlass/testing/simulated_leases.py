"""Leased data in the simulation: workers that use batches, close iterations, die, stand still and are not heard.

The ledger and what a worker holds of it are the very code that ships. What is checked is the promise, by what the
workers themselves have noted: every range of an epoch that is done was used up by somebody, it was counted once, and
everything else that was reported is a duplicate; and once faults stop, all epochs get done.
"""

from typing import TYPE_CHECKING

from windlass.control import messages as m
from windlass.control.holding import Holding, Key
from windlass.control.leases import Ledger, size_of

if TYPE_CHECKING:
    from windlass.testing.simulation import Worker, World

TERMS = m.LeaseTerms(samples=57, batch=5, range=10, epochs=25, shuffle=True, seed=0)
NAME = "data"
RETRY_SECONDS = 0.5
PACE_SECONDS = (0.1, 0.2, 0.2, 1.0)  # what a batch takes, one of these; the first once faults have stopped
FIRST_QUESTION = 1000  # smaller numbers are of other questions


class NotedLedger(Ledger):
    """One that keeps who asked, and how much of what each has reported was heard."""

    def __init__(self, terms: m.LeaseTerms) -> None:
        super().__init__(terms)
        self.heard: dict[int, int] = {}  # reports, by worker

    def ask(self, who: int, workers: int, question: m.Lease) -> m.Leased:
        leased = super().ask(who, workers, question)
        if not leased.again:
            self.heard[who] = leased.known
        return leased


class Once(NotedLedger):
    """Gives every range once, for good: what is wrong with it is that workers die."""

    def left(self, who: int) -> None:
        pass

    def _take_back(self, *_: object) -> bool:
        return False

    def _copy(self, *_: object) -> bool:
        return False


class Deaf(NotedLedger):
    """Counts a report whenever it is said, and it may be said twice."""

    def ask(self, who: int, workers: int, question: m.Lease) -> m.Leased:
        if who in self.workers:
            self.workers[who].known = min(self.workers[who].known, question.first)
        return super().ask(who, workers, question)


LEDGERS = {"leases": Once, "reports": Deaf}  # by what is broken


class NotedHolding(Holding):
    """One that keeps all reports."""

    def __init__(self) -> None:
        super().__init__(NAME, TERMS)
        self.noted: list[m.Used] = []

    def _report(self, key: Key, samples: int) -> None:
        super()._report(key, samples)
        self.noted.append((*key, samples))


class Leasing:
    """One process of a worker that goes through the epochs."""

    def __init__(self, worker: "Worker") -> None:
        self.world, self.worker, self.incarnation = worker.world, worker, worker.incarnation
        self.holding = NotedHolding()
        self.holding.want = self.world.random.randrange(2, 7)
        self._pace_seconds = self.world.random.choice(PACE_SECONDS)
        self._open: list[Key] = []  # used up, in an iteration that is not closed
        self._number = FIRST_QUESTION
        self._asked_at: float | None = None
        self._turned = False
        self.over = False

    def begin(self) -> None:
        """It has its first view."""
        self._step()
        self._retry()

    def _alive(self) -> bool:
        return self.worker.alive and not self.worker.out and self.worker.incarnation == self.incarnation

    def _step(self) -> None:
        """One batch, if there is one."""
        if not self._alive() or self.over:
            return
        pause = 0.1
        if not self.worker.still:
            for key in self._open:  # the loop comes back for more: what it had is closed
                self.holding.done(key)
            self._open.clear()
            batch = self.holding.draw()
            if batch is not None:
                pause = self._pace_seconds if self.world.faulty else PACE_SECONDS[0]
                self.world.counts["batches"] += 1
                if batch.last:
                    self._open.append(batch.key)
                if batch.begin % TERMS.range == 0:
                    self._ask()
            elif self.holding.ended:
                self._next_epoch()
            else:
                self._ask()
        self.world.after(pause, self._step)

    def _next_epoch(self) -> None:
        if self.holding.epoch + 1 == TERMS.epochs:
            self.over = True
            self._ask()
        else:
            self.holding.enter(self.holding.epoch + 1)

    def _ask(self) -> None:
        self._turned = True
        if self._asked_at is None:
            self._send()

    def _send(self) -> None:
        self._turned = False
        self._number += 1
        self._asked_at = self.world.now
        self.worker.tell(self.holding.question(self._number))

    def _retry(self) -> None:
        """What has no answer is asked again."""
        if not self._alive():
            return
        if self._asked_at is not None and self.world.now - self._asked_at > RETRY_SECONDS:
            self.world.counts["leases asked for again"] += 1
            self._send()
        self.world.after(RETRY_SECONDS, self._retry)

    def heard(self, message: m.Message) -> None:
        """From the scheduler."""
        match message:
            case m.Recall():
                self.world.counts["recalls"] += 1
                self._ask()
            case m.Answer(number, error, why, _, leased) if number == self._number and self._asked_at is not None:
                if leased is None:
                    self.world.violated(f"{self.worker.name} asked for leases: {error} {why}")
                    return
                self.holding.answered(leased)
                self._asked_at = None
                if self._turned or leased.again:
                    self._send()


def check_leases(world: "World", app: str) -> None:
    """Whether what the ledger says is so."""
    ledger = world.brain.state.ledgers.get((app, NAME))
    if not isinstance(ledger, NotedLedger):
        return
    noted = {leasing.incarnation: leasing.holding.noted for leasing in world.leasing}
    if world.brain.lives > 1:
        _check_restored(world, ledger)
        return
    heard = [used for who, count in ledger.heard.items() for used in noted[who][:count]]
    whole = {(epoch, index) for epoch, index, used in heard if used == size_of(TERMS, index)}
    for epoch in range(ledger.complete):
        for index in range(ledger.ranges):
            if (epoch, index) not in whole:
                world.violated(f"range {index} of epoch {epoch} counts as done, and nobody has used it up")
    counted = sum(size_of(TERMS, index) for _, index in whole)
    if counted != ledger.counted:
        world.violated(f"{ledger.counted} samples are counted as done, and {counted} are")
    again = sum(used for _, _, used in heard) - counted
    if again != ledger.duplicates:
        world.violated(f"{ledger.duplicates} samples are counted as duplicates, and {again} are")
    if ledger.complete < TERMS.epochs:
        world.violated(f"{ledger.complete} of {TERMS.epochs} epochs are done: {ledger.status()}")
    world.counts["ledgers checked"] += 1
    world.counts["duplicates"] += again
    world.counts["ranges taken back"] += sum(leasing.holding.taken_back for leasing in world.leasing)


def _check_restored(world: "World", ledger: Ledger) -> None:
    """Of a ledger that was made again, from the words of workers and what was kept of those that are gone: whatever was
    done was done by somebody, and nothing was forgotten that is still to be done. Duplicates may have been."""
    noted = {used for leasing in world.leasing for used in leasing.holding.noted}
    for epoch in range(ledger.complete):
        for index in range(ledger.ranges):
            if (epoch, index, size_of(TERMS, index)) not in noted:
                world.violated(f"range {index} of epoch {epoch} counts as done, and nobody has used it up")
    if ledger.complete < TERMS.epochs:
        world.violated(f"{ledger.complete} of {TERMS.epochs} epochs are done: {ledger.status()}")
    if ledger.counted != TERMS.epochs * TERMS.samples:
        world.violated(f"{ledger.counted} samples are counted as done, of {TERMS.epochs * TERMS.samples}")
    world.counts["ledgers made again"] += 1
