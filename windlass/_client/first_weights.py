"""How all workers start from the same weights: the lowest rank puts its own on the servers, the others wait for that.

A flag on the servers has two numbers: a checksum of names, dtypes and shapes, so that workers with different models
notice, and a count of how often weights were put. Weights from earlier workers stay: then nobody puts anything.
"""

import time
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from windlass._errors import InvalidArgument, Timeout
from windlass._rules.rule import Max
from windlass._rules.sync import ASP

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster

_POLL_S_MAX = 0.05


def lowest_rank(cluster: "Cluster") -> int:
    """The lowest rank among the workers that are there."""
    attendance = cluster._attendance
    return 0 if attendance is None else min((peer.index for peer in attendance.view.workers), default=0)


class Agreement:
    """An agreement of the workers of one optimizer or one schedule. `what` names it in errors."""

    def __init__(
        self, cluster: "Cluster", name: str, described: list[tuple[str, str, tuple[int, ...]]], *, what: str
    ) -> None:
        self._cluster = cluster
        self._what = what
        self._ours = 1 + zlib.crc32(repr(described).encode())
        self._described = described
        self._puts = 0
        self._flag = cluster.tensor(f"{name} begun", (2,), rule=Max(), dtype=np.int64, sync=ASP())
        cluster._notes[self._flag.name] = b'{"parameters":[]}'  # nothing of it is exported

    def begin(self, put: Callable[[], None], timeout: float | None = None) -> None:
        """Calls `put` if nobody has put weights before. Returns when they are there."""

        def put_first() -> None:
            if not self._flag.pull()[0]:
                put()
                self._flag.push(np.array([self._ours, 1])).wait()

        theirs, self._puts = self._wait(1, put_first, "for the first weights", timeout)
        if theirs != self._ours:
            listed = ", ".join(f"{name!r} {dtype} {shape}" for name, dtype, shape in self._described[:8])
            more = f" and {len(self._described) - 8} more" if len(self._described) > 8 else ""
            raise InvalidArgument(
                f"{self._what}: other arrays than those it was begun with, by names, dtypes or shapes; "
                f"here: {listed}{more}"
            )

    def again(self, put: Callable[[], None]) -> None:
        """Every worker calls this; it calls `put` at the lowest rank only. Returns when that is done."""
        puts = self._puts + 1

        def put_again() -> None:
            put()
            self._flag.push(np.array([0, puts])).wait()

        _, self._puts = self._wait(puts, put_again, "for the lowest rank to put weights")

    def _wait(self, puts: int, put: Callable[[], None], why: str, timeout: float | None = None) -> tuple[int, int]:
        """Waits until weights were put `puts` times. Puts them once this worker has the lowest rank."""
        seconds = self._cluster._timeout if timeout is None else timeout
        deadline, pause = time.monotonic() + seconds, 0.001
        while True:
            ours, seen = self._flag.pull().tolist()
            if seen >= puts:
                return int(ours), int(seen)
            if time.monotonic() >= deadline:
                raise Timeout(f"{self._what}: waited {why} for {seconds:g} s")
            if self._cluster.rank == lowest_rank(self._cluster):
                put()
                continue
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S_MAX)
