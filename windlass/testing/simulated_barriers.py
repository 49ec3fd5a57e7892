"""Barriers in the simulation: workers that arrive, die, stand still and are not heard.

Each worker notes where it stands before it says so. What is checked is the promise: when a barrier is passed, every
worker of the view stood at it and nobody was waited for; and once faults stop, everybody gets through. Every second
barrier is an all-reduce: its result is the sum over the workers of the view when it was passed, and all get that.
"""

import random
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from windlass.control import messages as m
from windlass.control.all_reduce import Given
from windlass.control.barrier import Barrier
from windlass.control.model import App
from windlass.control.state import WORLD_MAX

if TYPE_CHECKING:
    from windlass.testing.simulation import Worker, World

RETRY_SECONDS = 0.5
PACE_SECONDS = 0.5  # between barriers, on average
FIRST_QUESTION = 1 << 32  # smaller numbers are of other questions


class Hasty(Barrier):
    """Does not wait for the replacement of a worker that was lost."""

    def _pass_if_complete(self) -> None:
        self._waited = set()
        super()._pass_if_complete()


class Stubborn(Barrier):
    """Looks whether all have arrived when somebody does, and not when somebody is gone."""

    def follow(self, workers: Mapping[int, int], waited: Collection[int] = ()) -> None:
        self._workers, self._waited = dict(workers), set(waited)
        self._arrived = {who: given for who, given in self._arrived.items() if who in workers.values()}


class Deaf(Barrier):
    """Takes a repeated arrival for one at the current barrier."""

    def arrive(self, who: int, number: int, given: Given = None) -> None:
        super().arrive(who, self.number, given)


class Haunted(Barrier):
    """Adds up what workers gave that are gone, too."""

    def __init__(self) -> None:
        super().__init__()
        self._gone: dict[int, Given] = {}

    def follow(self, workers: Mapping[int, int], waited: Collection[int] = ()) -> None:
        self._gone |= {who: given for who, given in self._arrived.items() if who not in workers.values()}
        super().follow(workers, waited)

    def _by_rank(self) -> dict[int, Given]:
        gone = {WORLD_MAX + i: given for i, given in enumerate(self._gone.values())}
        self._gone.clear()
        return super()._by_rank() | gone


#: By what is broken.
BARRIERS = {"replacement": Hasty, "departure": Stubborn, "repeats": Deaf, "sums": Haunted}


def given_by(incarnation: int, number: int) -> Given:
    """What a worker gives at a barrier."""
    if number % 2:
        return None
    return m.Numbers("sum", "int64", [2], np.array([1, incarnation % (1 << 40)], "<i8").tobytes())


def sum_of(workers: Collection[int], number: int) -> m.Reduced | None:
    """What these workers are to get there."""
    if number % 2:
        return None
    total = np.array([len(workers), sum(who % (1 << 40) for who in workers)], "<i8")
    return m.Reduced(len(workers), "int64", total.tobytes())


class Arriving:
    """One process of a worker that goes from barrier to barrier."""

    def __init__(self, worker: "Worker", number: int) -> None:
        self.world, self.worker, self.incarnation = worker.world, worker, worker.incarnation
        self.number = number  # of the next barrier
        self.passed = 0
        self.reduced: m.Reduced | None = None  # what the last one gave
        self._random = random.Random(self.incarnation)  # the rest of the history does not depend on it
        self._waits = False
        self._asked_over = 0  # the number of the connection; 0: not yet

    def begin(self) -> None:
        """It has its first view."""
        self._pause()
        self._retry()

    def _alive(self) -> bool:
        return self.worker.alive and not self.worker.out and self.worker.incarnation == self.incarnation

    def _pause(self) -> None:
        self.world.after(self._random.expovariate(1 / PACE_SECONDS), self._arrive)

    def _arrive(self) -> None:
        if self._alive():
            self._waits, self._asked_over = True, 0
            self.world.stands[self.incarnation] = self.number
            self._send()

    def _send(self) -> None:
        if self.worker.reachable():
            self._asked_over = self.worker.connections
            numbers = given_by(self.incarnation, self.number)
            self.worker.tell(m.Arrive(FIRST_QUESTION + self.number, self.number, numbers=numbers))

    def _retry(self) -> None:
        """What has no answer is asked again over a connection that was re-made; what has one, now and then, too."""
        if not self._alive():
            return
        if self._waits and self._asked_over != self.worker.connections:
            self.world.counts["arrivals asked for again"] += 1
            self._send()
        elif not self._waits and self.passed and self._random.random() < 0.5:
            self.world.counts["arrivals repeated"] += 1
            numbers = given_by(self.incarnation, self.number - 1)
            self.worker.tell(m.Arrive(FIRST_QUESTION, self.number - 1, numbers=numbers))
        self.world.after(RETRY_SECONDS, self._retry)

    def heard(self, answer: m.Answer) -> None:
        """From the scheduler."""
        if answer.error:
            self.world.violated(f"{self.worker.name} arrived at a barrier: {answer.error} {answer.why}")
        if self._waits and answer.number == FIRST_QUESTION + self.number:
            if answer.reduced not in self.world.reduced[self.number]:
                self.world.violated(f"{self.worker.name} got {answer.reduced} at {self.number}, which nobody made")
            self.world.counts["all-reduces"] += answer.reduced is not None
            self._waits = False
            self.reduced = answer.reduced
            self.number += 1
            self.passed += 1
            self.world.counts["barriers"] += 1
            self._pause()


def check_passing(world: "World", app: App, before: int) -> None:
    """Whether all stand at a barrier that was passed just now; `before`: the number of the current one before that."""
    if app.started and app.workers and not app.barrier.missing():
        world.violated(f"all have arrived at barrier {app.barrier.number}, and nobody passes")
    if not app.started or app.barrier.number <= before:
        return
    late = [rank for rank, who in app.workers.items() if world.stands.get(who, 0) < app.barrier.number - 1]
    if late or app.waited:
        world.violated(f"barrier {before} is passed without ranks {late}, {sorted(app.waited)} being waited for")
    reduced, expected = app.barrier.reduced(before), sum_of(app.workers.values(), before)
    if reduced != expected:
        world.violated(f"the result of barrier {before} is {reduced}, expected {expected}")
    world.reduced[before].append(reduced)
    world.counts["barriers passed"] += 1


def check_barriers(world: "World", before: dict[int, int]) -> None:
    """Nobody waits for ever, and all are at the same barrier or on their way to it."""
    numbers = set()
    for worker in world.workers:
        arriving = worker.arriving
        if arriving is None or not worker.alive or worker.out or worker.incarnation not in before:
            continue
        if arriving.passed == before[worker.incarnation]:
            world.violated(f"{worker.name} waits for ever at barrier {arriving.number}")
        numbers.add(arriving.number)
        world.counts["workers that pass barriers"] += 1
    if numbers and max(numbers) > min(numbers) + 1:
        world.violated(f"workers are at barriers {sorted(numbers)}")
