"""windlass.torch.leased() and LeasedSampler: like a DataLoader, and what the user has not had is not done."""

import collections
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from helpers import PATIENCE_S
from torch.utils.data import DataLoader, Dataset, TensorDataset

import windlass as wl

SAMPLES, BATCH = 100, 8


class Squares(Dataset):  # type: ignore[type-arg]
    """Samples one by one."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(i)]), i * i


def tensors() -> TensorDataset:
    x = torch.arange(SAMPLES)
    return TensorDataset(x[:, None].float(), x * x)


def numbers(batches: Any) -> collections.Counter[int]:
    """Which samples there were, each with its own square."""
    found: collections.Counter[int] = collections.Counter()
    for x, y in batches:
        assert torch.equal(x[:, 0].long() ** 2, y)
        found.update(x[:, 0].long().tolist())
    return found


ALL = collections.Counter(range(SAMPLES))


@pytest.fixture
def cluster() -> Any:
    with wl.connect(threads=1) as cluster:
        yield cluster


def samples_done(cluster: wl.Cluster) -> int:
    return cluster._near.ledgers.status()["data"]["samples_done"]


@pytest.mark.parametrize("data", [Squares(), tensors()], ids=["one by one", "at once"])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_epoch_has_every_sample(cluster: wl.Cluster, data: Any, workers: int):
    loader = wl.torch.leased(data, BATCH, cluster=cluster, epochs=2, num_workers=workers)
    assert len(loader) == 13
    for epoch in range(2):
        batches = list(loader)
        assert isinstance(batches[0], list)
        assert [len(x) for x, _ in batches] == [8] * 12 + [4]
        assert numbers(batches) == ALL
        assert loader.lease.epoch == epoch
    cluster.tick()
    assert loader.lease.samples_done == 2 * SAMPLES
    with pytest.raises(wl.InvalidArgument, match="2 epochs are over"):
        iter(loader)


def test_a_tensor_dataset_gives_what_a_data_loader_gives(cluster: wl.Cluster):
    ours = list(wl.torch.leased(tensors(), BATCH, cluster=cluster, shuffle=False))
    theirs = list(DataLoader(tensors(), BATCH))
    for (x, y), (u, v) in zip(ours, theirs, strict=True):
        assert torch.equal(x, u)
        assert torch.equal(y, v)
        assert x.dtype == u.dtype


def test_a_function_that_collates_is_used(cluster: wl.Cluster):
    loader = wl.torch.leased(tensors(), BATCH, cluster=cluster, collate_fn=len)
    assert list(loader) == [8] * 12 + [4]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_fetched_ahead_and_not_given_to_the_loop_is_not_done(cluster: wl.Cluster, workers: int):
    loader = wl.torch.leased(Squares(), BATCH, cluster=cluster, epochs=2, lease_size=BATCH, num_workers=workers)
    batches = iter(loader)
    first = []
    for i in range(3):
        first.append(next(batches))
        assert loader.lease.samples_done == i * BATCH
        cluster.tick()
    assert loader.lease.samples_done == 3 * BATCH
    del batches
    again = numbers(first) + numbers(loader)  # with what the first epoch has left
    assert again == ALL + ALL
    cluster.tick()
    assert loader.lease.samples_done == 2 * SAMPLES


def test_a_sampler_works_in_a_data_loader_of_ones_own(cluster: wl.Cluster):
    sampler = wl.torch.LeasedSampler(Squares(), BATCH, cluster=cluster, epochs=2)
    loader = DataLoader(Squares(), batch_sampler=sampler)
    assert len(loader) == len(sampler) == 13
    for _ in range(2):
        assert numbers(loader) == ALL
    assert samples_done(cluster) == 2 * SAMPLES


def test_a_sampler_counts_what_is_prefetched_as_used_later(cluster: wl.Cluster):
    sampler = wl.torch.LeasedSampler(SAMPLES, BATCH, cluster=cluster, epochs=2, lease_size=BATCH, prefetched=4)
    drawn = iter(sampler)
    for _ in range(6):
        next(drawn)
    cluster.tick()
    assert sampler.lease.samples_done == 2 * BATCH
    list(drawn)
    cluster.tick()
    assert sampler.lease.samples_done == SAMPLES - 3 * BATCH - 4  # the loader still has four of them
    assert collections.Counter(i for batch in sampler for i in batch) == ALL
    cluster.tick()
    assert sampler.lease.samples_done >= SAMPLES


def test_the_static_split_needs_no_ledger(cluster: wl.Cluster):
    found: collections.Counter[int] = collections.Counter()
    for rank in range(2):
        loader = wl.torch.leased(tensors(), BATCH, cluster=cluster.worker(rank, 2), split="static")
        batches = list(loader)
        assert len(batches) == len(loader)
        found += numbers(batches)
    assert found == ALL
    assert not cluster._near.ledgers.status()


@pytest.mark.parametrize("argument", ["sampler", "batch_sampler", "drop_last"])
def test_what_is_leased_cannot_be_given(cluster: wl.Cluster, argument: str):
    with pytest.raises(wl.InvalidArgument, match=f"{argument} cannot be given"):
        wl.torch.leased(tensors(), BATCH, cluster=cluster, **{argument: None})


def test_torch_is_imported_only_when_it_is_used():
    code = """
        import sys
        import windlass as wl
        assert "torch" not in sys.modules
        assert callable(wl.torch.leased)
        try:
            wl.nothing
        except AttributeError as error:
            assert "nothing" in str(error)
        else:
            raise AssertionError
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("use", "who"),
    [
        ("wl.torch", "windlass.torch"),
        ("from windlass.torch import ServerOptimizer", "windlass.torch"),
        ("wl.TorchRule('Adam', lr=0.1)", "TorchRule"),
    ],
)
def test_without_torch_the_error_says_what_to_install(use: str, who: str):
    code = f"""
        import sys
        sys.modules["torch"] = None
        import windlass as wl
        try:
            {use}
        except ImportError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], timeout=PATIENCE_S, capture_output=True, text=True
    )
    assert done.stdout == f"{who} needs torch: pip install 'windlass[torch]'\n", done.stderr
