"""How far a worker has got with its static splits: what checkpoints note, and where splits go on.

Under BSP a checkpoint that is cut at clock C has the updates before C, so a split goes on with the batch that was
handed out first in iteration C or later. Under other policies it goes on with the first whose pushes may have no answer
yet: those that have one are in every shard that is captured afterwards.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from windlass.control import messages as m

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster
    from windlass._data.lease import StaticLease

_log = logging.getLogger("windlass")


class Places:
    """Those of one worker. Splits are made and used in its threads; checkpoints ask from another."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster
        self._lock = threading.Lock()  # of what follows
        self._splits: dict[str, tuple[StaticLease, bool, int]] = {}  # with shuffle and seed
        self._wanted: list[tuple[int, Callable[[dict[str, m.SplitPlace]], object]]] = []
        self.resumed: Mapping[str, m.SplitPlace] = {}  #: where the checkpoint that the cluster began with had them
        self.why = ""  #: why they begin their epochs again, if they do
        self.announce: Callable[[], object] = lambda: None  #: called when there is a split

    def __bool__(self) -> bool:
        return bool(self._splits)

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for this worker to get somewhere."""
        return bool(self._wanted)

    def add(self, split: "StaticLease", shuffle: bool, seed: int) -> None:
        """One more, which goes on where the checkpoint had it."""
        if (place := self.resumed.get(split.name)) is not None:
            self._go_on(split, place, shuffle, seed)
        with self._lock:
            self._splits[split.name] = split, shuffle, seed
        self.announce()

    def _go_on(self, split: "StaticLease", place: m.SplitPlace, shuffle: bool, seed: int) -> None:
        there = (place.samples, place.batch, place.shuffle, place.seed)
        here = (split.samples, split.batch_size, shuffle, seed)
        why = self.why
        if there != here:
            why = f"it had {place.samples} samples in batches of {place.batch} there, or another order"
        batches = 0 if why else place.batches
        if why and place.epoch < split.epochs:
            _log.warning('lease %r: split="static" begins epoch %d again: %s', split.name, place.epoch, why)
        split._begin_at(place.epoch, batches)

    def at(self, clock: int) -> dict[str, m.SplitPlace] | None:
        """At a cut. None: this worker has yet to get there."""
        with self._lock:
            splits = list(self._splits.values())
        if not splits:
            return {}
        session = self._cluster._session
        if not session.only_rounds:
            clock = min(clock, session.settled_clock)
        elif session.iteration < clock:
            return None
        return {split.name: self._place(split, shuffle, seed, clock) for split, shuffle, seed in splits}

    @staticmethod
    def _place(split: "StaticLease", shuffle: bool, seed: int, clock: int) -> m.SplitPlace:
        epoch, batches = split._used_before(clock)
        return m.SplitPlace(split.samples, split.batch_size, split.epochs, shuffle, seed, epoch, batches)

    def tell(self, clock: int, told: Callable[[dict[str, m.SplitPlace]], object]) -> bool:
        """Calls `told` with the places at a cut, now or when this worker gets there. Whether it was now."""
        with self._lock:
            self._wanted.append((clock, told))
        self.look()
        with self._lock:
            return all(one is not told for _, one in self._wanted)

    def look(self) -> None:
        """Tells whoever waits for a clock that is reached."""
        if not self._wanted:
            return
        with self._lock:
            wanted = list(self._wanted)
        for one in wanted:
            clock, told = one
            if (places := self.at(clock)) is not None:
                with self._lock:
                    if one not in self._wanted:
                        continue  # another thread was quicker
                    self._wanted.remove(one)
                told(places)
