"""Barriers inside the process, for threads that act as workers. Elsewhere the scheduler has them."""

import itertools
import threading
import time
from collections.abc import Callable

from windlass._errors import Closed, Timeout
from windlass.control.barrier import Barrier
from windlass.control.messages import Numbers, Reduced

_WORLD_MAX = 1 << 20


class _World:
    """Workers that count the same world_size: each is waited for until it leaves, whether it has come yet or not."""

    def __init__(self, size: int) -> None:
        self.barrier = Barrier()
        self.workers: dict[int, int] = {}  # by rank
        self.waited = set(range(size))


class Barriers:
    """Those of an engine inside the process."""

    def __init__(self) -> None:
        self.changed = threading.Condition()  # of what follows
        self._worlds: dict[int, _World] = {}  # by size
        self._numbers = itertools.count(1)

    def enter(self, rank: int, size: int) -> "NearBarrier | None":
        """For one more worker, which takes the place of an earlier one of its rank. None: its world is too large."""
        if size > _WORLD_MAX:
            return None
        with self.changed:
            if size not in self._worlds:
                self._worlds[size] = _World(size)
            world = self._worlds[size]
            who = world.workers[rank] = next(self._numbers)
            world.waited.discard(rank)
            self._follow(world)
            return NearBarrier(self, world, rank, who)

    def leave(self, world: _World, rank: int, who: int) -> None:
        """A worker is not waited for any more. When all have left, the next one begins a new world."""
        with self.changed:
            if world.workers.get(rank) == who:
                del world.workers[rank]
                self._follow(world)
            if not world.workers and not world.waited:
                self._worlds = {size: there for size, there in self._worlds.items() if there is not world}

    def _follow(self, world: _World) -> None:
        world.barrier.follow(world.workers, world.waited)
        self.changed.notify_all()

    def wake(self) -> None:
        """Whoever waits looks whether it should."""
        with self.changed:
            self.changed.notify_all()


class NearBarrier:
    """A worker at the barriers of its process."""

    def __init__(self, barriers: Barriers, world: _World, rank: int, who: int) -> None:
        self._barriers, self._world, self._rank, self._who = barriers, world, rank, who
        self._number = world.barrier.number

    def arrive(self, deadline: float, check: Callable[[], None], numbers: Numbers | None) -> Reduced | None:
        """Waits until all have arrived. The result of what they gave, where that made one."""
        barrier, changed = self._world.barrier, self._barriers.changed
        what = "barrier" if numbers is None else "all_reduce"
        with changed:
            self._check_place()
            barrier.arrive(self._who, self._number, numbers)
            changed.notify_all()
            while self._number == barrier.number:
                check()
                self._check_place()
                if (left := deadline - time.monotonic()) <= 0:
                    raise Timeout(f"{what} {self._number}: {barrier.complaint()}")
                changed.wait(min(left, 1.0))
            reduced = barrier.reduced(self._number, numbers)
            self._number += 1
            return reduced

    def _check_place(self) -> None:
        if self._world.workers.get(self._rank) != self._who:
            raise Closed(f"barrier: this worker has left, or another has taken its rank {self._rank}")

    def leave(self) -> None:
        """This worker is not waited for any more."""
        self._barriers.leave(self._world, self._rank, self._who)
