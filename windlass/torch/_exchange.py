"""When a step's gradients leave and its weights come back.

Plain     step() sends everything as one request per server and waits
Late      step() sends everything and goes on; the weights are up to `delay` steps old
Overlap   gradients leave during the backward pass (windlass/torch/_overlap.py)
"""

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from windlass._errors import Timeout, WindlassError
from windlass._objects.future import Future
from windlass.torch._buffers import Buffers
from windlass.torch._flat import Flat, Runs, Segment
from windlass.torch._owned_tables import OwnedTables

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster


class Exchange(Protocol):
    """One of the three."""

    hooks: list[Any]  #: of modules

    def arrived(self, flat: Flat, segment: Segment, accumulates: bool) -> None:
        """The backward pass has completed a gradient. `accumulates`: another one will add to it."""

    def check(self) -> None:
        """Whether gradients may still be changed, before somebody does."""

    def step(self, weight: float) -> None:
        """Gradients to the servers; the iteration is closed."""

    def add(self, flats: list[Flat]) -> None:
        """Of a further group; nothing is under way."""

    def finish(self) -> None:
        """Waits for what is under way: the parameters are those after the last step."""


def gather(flats: list[Flat]) -> list[tuple[Flat, Runs]]:
    """All gradients are in their slots, on the host: where there are any."""
    gathered = [(flat, flat.gather()) for flat in flats]
    copies = [flat.fetch(begin, end) for flat, runs in gathered for begin, end in runs]
    for copy in copies:
        if copy is not None:
            copy.synchronize()
    return gathered


class Plain:
    """One request per server and step, whose weights are written into the parameters."""

    def __init__(self, cluster: "Cluster", flats: list[Flat], buffers: Buffers | None, tables: OwnedTables) -> None:
        self._cluster = cluster
        self._flats = flats
        self._buffers = buffers
        self._tables = tables
        self.hooks: list[Any] = []

    def arrived(self, flat: Flat, segment: Segment, accumulates: bool) -> None:
        """It is copied while it is in the cache."""
        flat.take(segment)

    def check(self) -> None:
        """Nothing has left before step()."""

    def step(self, weight: float) -> None:
        """All gradients to the servers, all weights back."""
        partial = []
        gathered = gather(self._flats)
        with self._cluster.step() as step:
            for flat, runs in gathered:
                hyper = flat.hyper()
                if flat.is_whole(runs):
                    grads, weights = flat.grads[0].part(0, flat.n), flat.weights.part(0, flat.n)
                    step.push_pull(flat.tensor, grads, out=weights, weight=weight, **hyper)
                    continue
                if runs or not flat.is_frozen:
                    partial.append(flat)
                for begin, end in runs:
                    step.push(flat.tensor[begin:end], flat.grads[0].part(begin, end), weight=weight, **hyper)
            if self._buffers is not None:
                self._buffers.join(step)
            self._tables.join(step, weight)
        for flat in partial:  # what had no gradient here may have had one elsewhere
            flat.tensor.pull(out=flat.weights.part(0, flat.n))
        for flat in self._flats:
            flat.land(flat.weights, 0, flat.n)
            flat.written()
        if self._buffers is not None:
            self._buffers.land(0)

    def add(self, flats: list[Flat]) -> None:
        """Of a further group."""
        self._flats += flats

    def finish(self) -> None:
        """Nothing is under way."""


class _UnderWay(NamedTuple):
    futures: list[Future[Any]]
    slot: int

    def done(self) -> bool:
        return all(future.done() for future in self.futures)


class Late:
    """Steps that do not wait for their weights: `delay` of them may be under way."""

    def __init__(
        self, cluster: "Cluster", flats: list[Flat], buffers: Buffers | None, tables: OwnedTables, delay: int
    ) -> None:
        self._cluster = cluster
        self._flats = flats
        self._buffers = buffers
        self._tables = tables
        self._delay = delay
        self._under_way: deque[_UnderWay] = deque()
        self.hooks: list[Any] = []

    def arrived(self, flat: Flat, segment: Segment, accumulates: bool) -> None:
        """Into the slot that no request uses."""
        flat.take(segment)

    def check(self) -> None:
        """Nothing has left before step()."""

    def step(self, weight: float) -> None:
        """Sends all gradients; waits for the step `delay` back."""
        self._land(self._delay)  # an error that has come already, before anything is sent
        futures: list[Future[Any]] = []
        partial: list[Flat] = []
        slot = self._flats[0].slot
        for flat, runs in gather(self._flats):
            hyper, grads = flat.hyper(), flat.grads[slot]
            if flat.is_whole(runs):
                out = flat.landings[slot].part(0, flat.n)
                futures.append(flat.tensor.push_pull_async(grads.part(0, flat.n), out=out, weight=weight, **hyper))
                continue
            partial.append(flat)
            for begin, end in runs:
                futures.append(flat.tensor[begin:end].push(grads.part(begin, end), weight=weight, **hyper))
        if self._buffers is not None:
            futures.append(self._buffers.send(slot))
        self._tables.push(weight)
        self._cluster.tick()
        for flat in partial:
            futures.append(flat.tensor.pull_async(out=flat.landings[slot].part(0, flat.n)))
        self._under_way.append(_UnderWay(futures, slot))
        for flat in self._flats:
            flat.next_slot()
        self._land(self._delay)

    def add(self, flats: list[Flat]) -> None:
        """Of a further group, whose slots take turns with those of the others."""
        for flat in flats:
            flat.slot = self._flats[0].slot
        self._flats += flats

    def finish(self) -> None:
        """Waits for everything that is under way."""
        self._tables.finish()
        self._land(0)

    def _land(self, most: int) -> None:
        """Takes in what is done, in order, and waits until at most `most` are under way."""
        landed = None
        try:
            while self._under_way and (len(self._under_way) > most or self._under_way[0].done()):
                oldest = self._under_way[0]
                try:
                    for future in oldest.futures:
                        future.wait()
                except Timeout:  # it goes on, and is waited for again
                    raise
                except WindlassError:
                    self._under_way.popleft()
                    raise
                landed = self._under_way.popleft()
        finally:
            if landed is not None:
                self._take_in(landed.slot)

    def _take_in(self, slot: int) -> None:
        for flat in self._flats:
            flat.land(flat.landings[slot], 0, flat.n)
            flat.written()
        if self._buffers is not None:
            self._buffers.land(slot, late=True)
