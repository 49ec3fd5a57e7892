"""Barriers: who has arrived at the current one, and who is missing. No time, no I/O.

The barriers of an app are numbered from 1 on, and each worker says at which number it stands. So a repeated message
changes nothing, and a worker that is still on its way back from barrier 3 has not arrived at 4:

    number 3    rank 0: arrived    rank 1: on its way    rank 2: lost, its replacement is waited for

Workers may give arrays, all at the same barrier: then it is an all-reduce, and whoever passes it gets the result
(control/all_reduce.py). That of the last one is kept, since an answer may be lost and asked for again; nobody asks for
an older one, as all of its workers have said since that they stand at the next.

A barrier is passed when every worker of the view stands at it. Whoever joins begins at the current one, which cannot be
passed without it. The arrival of a worker that is gone does not count: its replacement arrives for itself.
"""

from collections.abc import Collection, Mapping

from windlass.control import messages as m
from windlass.control.all_reduce import LOST, Given, nbytes, reduced_of

NAMED_MAX = 16  # ranks that a message lists before it only counts


def named(ranks: Collection[int], what: str = "worker") -> str:
    """Ranks, for people; of many, the first."""
    first = sorted(ranks)[:NAMED_MAX]
    text = f"{what}{'s' if len(ranks) > 1 else ''} {', '.join(map(str, first))}"
    return f"{text} and {len(ranks) - len(first)} more" if len(ranks) > len(first) else text


class Barrier:
    """The current barrier of an app. A worker is known by a number of its own, since ranks are reused."""

    def __init__(self) -> None:
        self.number = 1  #: of the current one; those before it are passed
        self._arrived: dict[int, Given] = {}  # workers that stand at it, and what they give
        self._made = False  # whether the one before it was passed here
        self._reduced: m.Reduced | None = None  # its result
        self._workers: dict[int, int] = {}  # of the view, by rank
        self._waited: set[int] = set()  # ranks that have no worker and are waited for

    def follow(self, workers: Mapping[int, int], waited: Collection[int] = ()) -> None:
        """The view has changed: its workers by rank, and ranks that are waited for."""
        self._workers, self._waited = dict(workers), set(waited)
        there = set(workers.values())
        self._arrived = {who: given for who, given in self._arrived.items() if who in there}
        self._pass_if_complete()

    def arrive(self, who: int, number: int, given: Given = None) -> None:
        """A worker of the view stands at that barrier. May be said again."""
        if number > self.number:  # all had passed those before it, and whoever counted them is gone
            self.number = number
            self._arrived.clear()
            self._made, self._reduced = False, None
        if number == self.number:
            self._arrived[who] = given
            self._pass_if_complete()

    def came_back(self, number: int, reduced: m.Reduced | None) -> None:
        """A worker of an earlier scheduler's stands before this one, and got that at the last; others will, too."""
        if number > self.number:
            self.number = number
            self._arrived.clear()
            self._made, self._reduced = True, reduced

    def _pass_if_complete(self) -> None:
        if self._workers and not self._waited and len(self._arrived) == len(self._workers):
            self._made, self._reduced = True, reduced_of(self._by_rank())
            self.number += 1
            self._arrived.clear()

    def _by_rank(self) -> dict[int, Given]:
        return {rank: self._arrived[who] for rank, who in self._workers.items()}

    def reduced(self, number: int, given: Given = None) -> m.Reduced | None:
        """The result of a barrier that is passed, for a worker that gave this there. None: there is none."""
        if number == self.number - 1 and self._made:
            return self._reduced
        return None if given is None else LOST

    @property
    def held_bytes(self) -> int:
        """What arrays take here."""
        last = 0 if self._reduced is None else len(self._reduced.data)
        return last + sum(map(nbytes, self._arrived.values()))

    def missing(self) -> list[int]:
        """Ranks that have not arrived."""
        return sorted(self._waited.union(rank for rank, who in self._workers.items() if who not in self._arrived))

    def complaint(self) -> str:
        """Who is missing, for people."""
        missing = self.missing()
        count = len(self._workers) + len(self._waited)
        return f"{count - len(missing)} of {count} workers have arrived; missing: {named(missing, 'rank')}"
