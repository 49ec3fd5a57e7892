"""Leases: a worker's share of the samples of each epoch, as arrays of sample numbers."""

import collections
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from windlass._errors import InvalidArgument
from windlass._objects.outputs import shown

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster

Split = Literal["leased", "static"]
Indices = npt.NDArray[np.int64]
_HANDED_MAX = 4096  # batches whose iterations a static split remembers
RANGE_BATCHES = 8  # per lease, if there are enough
RANGES_LEAST = 64  # per epoch, if there are as many batches, so that shares come out even
RANGES_MOST = 1 << 20


class Order:
    """Which sample is at which position of an epoch: the same for every worker, whatever its version of numpy."""

    def __init__(self, samples: int, shuffle: bool, seed: int) -> None:
        self._samples = samples
        self._shuffle = shuffle
        self._seed = seed
        self._known: collections.OrderedDict[int, Indices] = collections.OrderedDict()

    def __call__(self, epoch: int, begin: int, end: int) -> Indices:
        """The samples at these positions; the array is the caller's."""
        if not self._shuffle:
            return np.arange(begin, end, dtype=np.int64)
        if epoch not in self._known:
            self._known[epoch] = permutation(self._samples, self._seed, epoch)
            while len(self._known) > 2:  # this epoch, and what is left of the last
                self._known.popitem(last=False)
        return self._known[epoch][begin:end].copy()


def permutation(samples: int, seed: int, epoch: int) -> Indices:
    """The numbers below `samples` in an order that follows from seed and epoch: by their hashes (splitmix64)."""

    def mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    golden = np.uint64(0x9E3779B97F4A7C15)
    key = mixed(mixed(np.array([seed], np.uint64) * golden) + np.array([epoch + 1], np.uint64) * golden)
    # No two hashes are equal, since each step is invertible: every sort gives the same order.
    return np.argsort(mixed(key + np.arange(1, samples + 1, dtype=np.uint64) * golden)).astype(np.int64, copy=False)


class Lease:
    """A worker's part of the data; made by ``cluster.lease()``. Each iteration over it is one epoch.

    ``for epoch in range(3): for indices in lease: ...``: arrays of at most `batch_size` sample numbers. A worker
    gets what is left to do, so their number differs between workers and epochs.
    """

    def __init__(self, cluster: "Cluster", name: str, samples: int, batch_size: int, epochs: int, order: Order) -> None:
        self._cluster = cluster
        self._order = order
        self._epoch = -1
        self.name = name  #: the name of its ledger
        self.samples = samples  #: in an epoch, for all workers
        self.batch_size = batch_size  #: samples in a batch; the last may have fewer
        self.epochs = epochs  #: how often it can be iterated over

    @property
    def epoch(self) -> int:
        """The current epoch, from 0 on."""
        return max(self._epoch, 0)

    @property
    def samples_done(self) -> int:
        """Samples that this worker was given and whose iterations it has closed, in all epochs."""
        raise NotImplementedError

    @property
    def duplicates(self) -> int:
        """Samples that this worker used and another, too, whose work was counted."""
        return 0

    @property
    def taken_back(self) -> int:
        """Ranges that this worker held and had not begun when they were given to others."""
        return 0

    def __len__(self) -> int:
        """About how many batches of an epoch are this worker's: an even share."""
        each = self.batch_size * self._cluster.world_size
        return (self.samples + each - 1) // each

    def __iter__(self) -> Iterator[Any]:
        self._next_epoch()
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        while (indices := self._draw()) is not None:
            self._hand()
            yield shown(self._cluster, indices)

    def _next_epoch(self) -> None:
        if self._epoch + 1 >= self.epochs:
            what = "its epoch is" if self.epochs == 1 else f"its {self.epochs} epochs are"
            raise InvalidArgument(f"lease {self.name!r}: {what} over; epochs= says how many there are to be")
        self._epoch += 1

    def _draw(self) -> Indices | None:
        """The next batch. None: the epoch is over."""
        raise NotImplementedError

    def _hand(self) -> None:
        """Notes that the user gets the first batch that was drawn and not handed out."""
        raise NotImplementedError

    def _close(self, timeout: float, *, failed: bool) -> None:
        """The worker leaves."""

    def __repr__(self) -> str:
        what = f"{self.samples} samples in batches of {self.batch_size}"
        return f"<Lease {self.name!r}, {what}, epoch {self.epoch} of {self.epochs}>"


class StaticLease(Lease):
    """A fixed split: batches rank, rank + world_size, ... of each epoch."""

    def __init__(self, cluster: "Cluster", name: str, samples: int, batch_size: int, epochs: int, order: Order) -> None:
        super().__init__(cluster, name, samples, batch_size, epochs, order)
        self._rank, self._world_size = cluster.rank, cluster.world_size
        self._at = 0
        self._drawn: collections.deque[int] = collections.deque()
        self._samples_done = 0
        self._begins = 0, 0  # the epoch, and how many batches of it were used before
        self._lock = threading.Lock()  # of what follows: who takes a checkpoint asks from another thread
        self._used = 0, 0  # the epoch, and how many batches of it were handed out
        self._handed: collections.deque[tuple[int, int, int]] = collections.deque(maxlen=_HANDED_MAX)

    def _begin_at(self, epoch: int, batches: int) -> None:
        """Where a checkpoint was cut: there is nothing in earlier epochs, and nothing before this batch."""
        self._begins = self._used = epoch, batches

    def _used_before(self, clock: int) -> tuple[int, int]:
        """The epoch, and how many batches of it were used in iterations before this one. May be too few."""
        with self._lock:
            for at, (handed_at, epoch, before) in enumerate(self._handed):
                if handed_at >= clock:  # where nobody remembers what was before, the epoch begins again
                    return epoch, before if at or len(self._handed) < _HANDED_MAX else 0
            return self._used

    @property
    def samples_done(self) -> int:
        """Samples that this worker was given, in all epochs."""
        return self._samples_done

    def __len__(self) -> int:
        batches = -(-self.samples // self.batch_size)
        return len(range(self._rank, batches, self._world_size))

    def _next_epoch(self) -> None:
        super()._next_epoch()
        self._drawn.clear()
        epoch, batches = self._begins
        before = batches if self._epoch == epoch else 0
        self._at = (self._rank + before * self._world_size) * self.batch_size
        if self._epoch < epoch:
            self._at = self.samples
        else:
            with self._lock:
                self._used = self._epoch, before

    def _draw(self) -> Indices | None:
        if self._at >= self.samples:
            return None
        begin, self._at = self._at, self._at + self._world_size * self.batch_size
        indices = self._order(self._epoch, begin, min(begin + self.batch_size, self.samples))
        self._drawn.append(len(indices))
        return indices

    def _hand(self) -> None:
        self._samples_done += self._drawn.popleft()
        clock = self._cluster._session.iteration
        with self._lock:
            epoch, before = self._used
            self._handed.append((clock, epoch, before))
            self._used = epoch, before + 1
        self._cluster._places.look()


def range_of(samples: int, batch: int) -> int:
    """How many samples one lease has. It must not depend on the number of workers, since more may join later."""
    batches = -(-samples // batch)
    least = -(-batches // RANGES_MOST)
    return batch * max(min(RANGE_BATCHES, batches // RANGES_LEAST), least, 1)


def make_lease(
    cluster: "Cluster",
    samples: int,
    batch_size: int,
    *,
    name: str,
    epochs: int,
    shuffle: bool,
    seed: int,
    split: Split,
    ahead_seconds: float,
    lease_size: int | None,
) -> Lease:
    """Checks the arguments of ``cluster.lease()`` and makes the lease."""
    what = f"lease {name!r}"
    if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= 256:
        raise InvalidArgument(f"{what}: the name must be 1 to 256 printable characters")
    for argument, value, least, most in (
        ("samples", samples, 1, 2**48 - 1),
        ("batch_size", batch_size, 1, 2**48 - 1),
        ("epochs", epochs, 1, 2**20),
        ("seed", seed, 0, 2**63 - 1),
        ("lease_size", batch_size if lease_size is None else lease_size, 1, 2**48 - 1),
    ):
        _check_whole(f"{what}: {argument}", value, least, most)
    if split not in ("leased", "static"):
        raise InvalidArgument(f'{what}: split must be "leased" or "static", not {split!r}')
    if not ahead_seconds >= 0:
        raise InvalidArgument(f"{what}: ahead_seconds must be at least 0, not {ahead_seconds!r}")
    if lease_size is not None and lease_size % batch_size:
        raise InvalidArgument(f"{what}: lease_size must be a multiple of batch_size={batch_size}, not {lease_size}")
    if name in cluster._leases:
        raise InvalidArgument(f"{what}: this worker has made it already; iterate over that one, or give another name")
    order = Order(int(samples), bool(shuffle), int(seed))
    if split == "static":
        split_up = StaticLease(cluster, name, int(samples), int(batch_size), int(epochs), order)
        cluster._places.add(split_up, bool(shuffle), int(seed))
        made: Lease = split_up
    else:
        from windlass._data.ledger_lease import leased_by

        made = leased_by(cluster, name, samples, batch_size, epochs, order, shuffle, seed, ahead_seconds, lease_size)
    cluster._leases[name] = made
    return made


def _check_whole(what: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value <= most:
        raise InvalidArgument(f"{what} must be a whole number between {least} and {most}, not {value!r}")
