"""Which shards move so that servers have about as many bytes. Pure.

    bytes had   A ##########      to move   A -> C  the largest shards that fit
                B ########                  B -> C
                C                           until nobody has more than 10 % beyond the mean, or would gain by giving

What goes together (shards of tensors that are alike) is one item. A server that is drained gives everything. Few moves
matter more than the last percent: from the fullest server the largest item goes that the emptiest takes without rising
above the mean, else the smallest that makes the two more even.
"""

import bisect
import dataclasses
from collections.abc import Iterable, Mapping

TOLERANCE = 0.10  # of the mean


@dataclasses.dataclass(frozen=True, order=True)
class Item:
    """Shards that move together."""

    bytes: int
    key: tuple[str, int]  #: what they are, for the caller


@dataclasses.dataclass(frozen=True)
class Step:
    """One of the moves."""

    item: Item
    source: int
    target: int


def is_even(loads: Mapping[int, int]) -> bool:
    """Whether every server is within the tolerance of the mean."""
    if not loads:
        return True
    mean = sum(loads.values()) / len(loads)
    return all(abs(load - mean) <= TOLERANCE * mean for load in loads.values())


def plan(items: Mapping[int, Iterable[Item]], drained: Iterable[int] = ()) -> list[Step]:
    """Moves, in order, after which servers are as even as whole items allow.

    items: what each server has, by its number; one that has nothing is there, too. drained: those that give everything.
    """
    leaving = set(drained)
    there = {server: sorted(of) for server, of in items.items()}
    loads = {server: sum(item.bytes for item in of) for server, of in there.items() if server not in leaving}
    if not loads:
        return []
    steps: list[Step] = []

    def move(item: Item, source: int, target: int) -> None:
        there[source].remove(item)
        bisect.insort(there[target], item)
        if source in loads:
            loads[source] -= item.bytes
        loads[target] += item.bytes
        steps.append(Step(item, source, target))

    counts = {server: len(there[server]) for server in loads}
    for source in sorted(leaving & there.keys()):
        for item in list(reversed(there[source])):  # the largest first, each to whoever has least
            target = min(loads, key=lambda server: (loads[server], counts[server], server))
            move(item, source, target)
            counts[target] += 1
    mean = sum(loads.values()) / len(loads)
    while not is_even(loads):
        chosen = _next(there, loads, mean)
        if chosen is None:
            break
        move(*chosen)
    return steps


def _next(there: Mapping[int, list[Item]], loads: Mapping[int, int], mean: float) -> tuple[Item, int, int] | None:
    """The next move. None: nothing would make it more even."""
    fullest = sorted(loads, key=lambda server: (-loads[server], server))
    emptiest = sorted(loads, key=lambda server: (loads[server], server))
    for source in fullest:
        for target in emptiest:
            gap = loads[source] - loads[target]
            if gap <= 0 or (loads[source] <= mean * (1 + TOLERANCE) and loads[target] >= mean * (1 - TOLERANCE)):
                break
            of = there[source]
            room = min(loads[source] - mean, mean - loads[target])
            at = bisect.bisect_right(of, room, key=lambda item: item.bytes)
            if at > 0 and of[at - 1].bytes > 0:
                return of[at - 1], source, target
            if at < len(of) and of[at].bytes < gap:  # the two come closer to each other
                return of[at], source, target
    return None
