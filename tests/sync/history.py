"""R10: what every pull saw, and whether that was fresh enough.

Workers push a one of their own digit to tensors of whole numbers with the rule Sum, so that a value says how many
pushes of each worker are in it, whatever the server says. The slowest takes ten times as long as the others.
"""

import collections
import dataclasses
import time
from collections.abc import Sequence

import numpy as np
from crew import together

import windlass as wl

DIGIT = 20  # bits: a million pushes of each worker, of three
OBJECTS = 8
FAST_SECONDS = 0.0005


def unit(rank: int) -> np.ndarray:
    """What a worker pushes."""
    return np.full(1, 1 << (DIGIT * rank), np.int64)


def pushes_of(value: int, rank: int) -> int:
    """How many of a worker's pushes are in a value."""
    return (value >> (DIGIT * rank)) & ((1 << DIGIT) - 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Pull:
    """One that was answered."""

    rank: int
    what: str
    asked: int
    seen: int
    waited: bool
    value: int


class History:
    """All pulls of a run under a policy."""

    def __init__(self, sync: wl.Sync, world: int) -> None:
        self.sync = sync
        self.world = world
        self.pulls: list[Pull] = []

    @property
    def bound(self) -> int:
        """How many iterations of another worker may be missing."""
        return self.sync.staleness if isinstance(self.sync, wl.SSP) else 0

    def violations(self, live: Sequence[int] | None = None) -> list[str]:
        """What must not be. live: whose pushes have to be there."""
        return [why for pull in self.pulls for why in self._wrong(pull, range(self.world) if live is None else live)]

    def _wrong(self, pull: Pull, live: Sequence[int]) -> list[str]:
        wrong = []
        if pull.asked - pull.seen > self.bound:
            wrong.append(f"{pull}: the server says {pull.asked - pull.seen} behind")
        for rank in live:
            there = pushes_of(pull.value, rank)
            if rank == pull.rank:
                if there != pull.asked:
                    wrong.append(f"{pull}: {there} pushes of its own, not {pull.asked}")
            elif there < pull.asked - self.bound:
                wrong.append(f"{pull}: {there} pushes of rank {rank}")
            elif isinstance(self.sync, wl.BSP) and there != pull.asked:
                wrong.append(f"{pull}: {there} pushes of rank {rank}, more than were closed")
        return wrong

    def waited(self) -> int:
        """How many pulls had to."""
        return sum(pull.waited for pull in self.pulls)

    def __str__(self) -> str:
        behind = collections.Counter(max(pull.asked - pull.seen, 0) for pull in self.pulls)
        return f"{self.sync}: {len(self.pulls)} pulls, {self.waited()} waited; behind by {dict(sorted(behind.items()))}"


def run(cluster: wl.Cluster, sync: wl.Sync, pulls: int, world: int = 3) -> History:
    """So many pulls by threads of a cluster, the last of which is slow."""
    history = History(sync, world)
    iterations = -(-pulls // (world * OBJECTS))

    def work(worker: wl.Cluster) -> list[Pull]:
        rank, notes = worker.rank, []
        objects = [worker.tensor(f"w{i}", 1, dtype=np.int64, rule=wl.Sum(), sync=sync) for i in range(OBJECTS)]
        for _ in range(iterations):
            futures = [w.push_pull_async(unit(rank)) for w in objects]
            for w, future in zip(objects, futures, strict=True):
                value = int(future.wait(60.0)[0])
                seen = future.seen
                notes.append(Pull(rank, w.name, seen.asked, seen.clock, seen.waited_seconds > 0, value))
            time.sleep(FAST_SECONDS * (10 if rank == world - 1 else 1))
        return notes

    for notes in together(cluster, world, work, 3600.0):
        history.pulls += notes
    return history
