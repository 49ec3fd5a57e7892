"""Leased data for torch: a loader, and a sampler for a DataLoader of one's own."""

from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import DataLoader, Sampler, TensorDataset

from windlass._client.cluster import Cluster
from windlass._client.open_clusters import default_cluster
from windlass._data.lease import Lease, Split
from windlass._errors import InvalidArgument

_OURS = ("batch_size", "batch_sampler", "drop_last", "sampler", "shuffle")


class LeasedSampler(Sampler[list[int]]):  # type: ignore[misc]
    """Batches of sample numbers that are leased, for ``DataLoader(dataset, batch_sampler=...)``.

    prefetched: how many batches the loader draws before it gives them to the loop: num_workers * prefetch_factor. So
    many batches later a batch counts as used; ``leased()`` knows it exactly.
    """

    def __init__(
        self,
        data: int | Sized,
        batch_size: int,
        *,
        cluster: Cluster | None = None,
        epochs: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        split: Split = "leased",
        name: str = "data",
        ahead_seconds: float = 45.0,
        lease_size: int | None = None,
        prefetched: int = 0,
    ) -> None:
        if isinstance(prefetched, bool) or not isinstance(prefetched, int) or prefetched < 0:
            raise InvalidArgument(f"lease {name!r}: prefetched must be a whole number, not {prefetched!r}")
        self.lease: Lease = (default_cluster() if cluster is None else cluster).lease(
            data if isinstance(data, int) else len(data),
            batch_size,
            name=name,
            epochs=epochs,
            shuffle=shuffle,
            seed=seed,
            split=split,
            ahead_seconds=ahead_seconds,
            lease_size=lease_size,
        )
        self._prefetched = prefetched
        self._in_flight = 0
        self._exhausted = False

    def __len__(self) -> int:
        """About how many batches of an epoch are this worker's."""
        return len(self.lease)

    def __iter__(self) -> Iterator[list[int]]:
        while self._in_flight and self._exhausted:  # the loader has given them all to the loop
            self._hand()
        self._in_flight, self._exhausted = 0, False
        self.lease._next_epoch()
        return self._batches()

    def _batches(self) -> Iterator[list[int]]:
        while (indices := self.lease._draw()) is not None:
            self._in_flight += 1
            if self._in_flight > self._prefetched:
                self._hand()
            yield indices.tolist()
        self._exhausted = True

    def _hand(self) -> None:
        self.lease._hand()
        self._in_flight -= 1


class _Drawn(Sampler[Any]):  # type: ignore[misc]
    """Draws only: the loader around it says when a batch is handed out. Arrays, or lists."""

    def __init__(self, lease: Lease, arrays: bool) -> None:
        self._lease = lease
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._lease)

    def __iter__(self) -> Iterator[Any]:
        while (indices := self._lease._draw()) is not None:
            yield indices if self._arrays else indices.tolist()


class LeasedLoader:
    """A loader of leased batches; made by ``leased()``. Each iteration over it is one epoch."""

    def __init__(self, dataset: Any, lease: Lease, **loader_arguments: Any) -> None:
        at_once = type(dataset) is TensorDataset and loader_arguments.get("collate_fn") is None
        drawn = _Drawn(lease, arrays=at_once)
        how = {"sampler": drawn, "batch_size": None} if at_once else {"batch_sampler": drawn}
        self.dataset = dataset
        self.lease = lease  #: counters: duplicates, taken_back, samples_done, epoch
        self._loader: DataLoader[Any] = DataLoader(dataset, **how, **loader_arguments)

    def __len__(self) -> int:
        """About how many batches of an epoch are this worker's."""
        return len(self.lease)

    def __iter__(self) -> Iterator[Any]:
        self.lease._next_epoch()
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        for batch in self._loader:
            self.lease._hand()
            yield batch


def leased(
    dataset: Any,
    batch_size: int,
    *,
    cluster: Cluster | None = None,
    epochs: int = 1,
    shuffle: bool = True,
    seed: int = 0,
    split: Split = "leased",
    name: str = "data",
    ahead_seconds: float = 45.0,
    lease_size: int | None = None,
    **loader_arguments: Any,
) -> LeasedLoader:
    """A loader whose samples are leased: what a worker that dies had not done is done by the others.

    Like a DataLoader, and ``loader_arguments`` are passed to one (num_workers, collate_fn, pin_memory, ...). It can be
    iterated over `epochs` times; ``len()`` is an estimate. Batches of a TensorDataset are indexed at once.

    cluster: whose worker this is (default: the one that ``connect()`` made in this process). For the others, see
    ``cluster.lease()``.
    """
    if wrong := [argument for argument in _OURS if argument in loader_arguments]:
        raise InvalidArgument(f"lease {name!r}: {', '.join(wrong)} cannot be given: samples and batches are leased")
    if loader_arguments.get("in_order", True) is not True:
        raise InvalidArgument(f"lease {name!r}: batches come in the order in which they were drawn: in_order=True")
    lease = (default_cluster() if cluster is None else cluster).lease(
        len(dataset),
        batch_size,
        name=name,
        epochs=epochs,
        shuffle=shuffle,
        seed=seed,
        split=split,
        ahead_seconds=ahead_seconds,
        lease_size=lease_size,
    )
    return LeasedLoader(dataset, lease, **loader_arguments)
