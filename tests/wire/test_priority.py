"""Of requests that wait to be sent, those of higher priority go first."""

import time

import numpy as np
import pytest
from helpers import PATIENCE_S, new_app

import windlass as wl
from windlass.testing import Faults, Proxy, Servers

LARGE = 4 << 20  # float32: 16 MiB, more than sockets hold
SMALL = 64 << 10  # of the same lane
FRAME_MS = 20  # that a frame takes on a slow link: the ends of large pushes are far apart, whoever wakes up first


def order_of_ends(futures: dict[str, wl.types.Future[object]]) -> list[str]:
    """The names in the order in which they were done; of those that are done at once, in the order given."""
    ended: list[str] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(ended) < len(futures) and time.monotonic() < deadline:
        ended += [name for name, future in futures.items() if name not in ended and future.done]
        time.sleep(0.001)
    for future in futures.values():
        future.wait(PATIENCE_S)
    return ended


@pytest.mark.parametrize("priority", [0, 7])
def test_a_small_request_of_high_priority_overtakes_large_ones_on_a_slow_link(
    monkeypatch: pytest.MonkeyPatch, priority: int
) -> None:
    monkeypatch.setenv("WINDLASS_TRANSPORT", "socket")
    with (
        Servers(1, kind="tcp", threads=2) as servers,
        Proxy(servers.addresses[0], Faults(delay=1, delay_ms=(FRAME_MS, FRAME_MS), directions="up")) as proxy,
        wl.connect(servers=[proxy.address], app=new_app(), timeout=60) as cluster,
    ):
        large = [cluster.tensor(f"large{i}", LARGE, rule=wl.Sum()) for i in range(4)]
        small = cluster.tensor("small", SMALL, rule=wl.Sum())
        grads = [cluster.empty(LARGE, np.float32) for _ in large]
        out = cluster.empty(SMALL, np.float32)
        for grad in grads:
            grad[...] = 1
        small.push(np.ones(SMALL, np.float32)).wait()  # the lane is there
        proxy.pause()
        futures = {f"large{i}": w.push(g) for i, (w, g) in enumerate(zip(large, grads, strict=True))}
        futures["small"] = small.push_pull_async(np.ones(SMALL, np.float32), out=out, priority=priority)
        proxy.resume()
        small_first = dict(sorted(futures.items(), key=lambda one: (one[0] == "small") != bool(priority)))
        ended = order_of_ends(small_first)
        assert sorted(ended) == sorted(futures)
        # The first large one was on its way, and of the others none was.
        assert ended.index("small") <= (1 if priority else 4)
        if not priority:
            assert ended.index("small") >= 3
        assert (out == 2).all()
        assert all((w.pull() == 1).all() for w in large)


def test_requests_about_one_shard_keep_their_order(cluster: wl.Cluster) -> None:
    """A high priority takes what it must follow along."""
    w = cluster.tensor("w", 1 << 20, rule=wl.Assign())
    values = [np.full(1 << 20, i, np.float32) for i in range(12)]
    futures = [w.push(value, priority=(37 * i) % 256) for i, value in enumerate(values)]
    assert (w.pull_async(priority=255).wait() == 11).all()
    for future in futures:
        future.wait()


@pytest.mark.parametrize("priority", [-1, 256, 1.0, True, None])
def test_a_priority_is_a_whole_number_of_one_byte(cluster: wl.Cluster, priority: object) -> None:
    w = cluster.tensor("w", 4, rule=wl.Sum())
    ones = np.ones(4, np.float32)
    for call in (
        lambda: w.push(ones, priority=priority),
        lambda: w.push_pull_async(ones, priority=priority),
        lambda: w.pull_async(priority=priority),
    ):
        with pytest.raises(wl.InvalidArgument, match="tensor 'w': priority must be a whole number from 0 to 255"):
            call()
    assert (w.pull() == 0).all()


@pytest.mark.parametrize("priority", [0, 7])
def test_a_tables_request_of_high_priority_overtakes_its_large_ones(
    monkeypatch: pytest.MonkeyPatch, priority: int
) -> None:
    monkeypatch.setenv("WINDLASS_TRANSPORT", "socket")
    rows, dim = 8192, 512  # 16 MiB
    with (
        Servers(1, kind="tcp", threads=2) as servers,
        Proxy(servers.addresses[0], Faults(delay=1, delay_ms=(FRAME_MS, FRAME_MS), directions="up")) as proxy,
        wl.connect(servers=[proxy.address], app=new_app(), timeout=60) as cluster,
    ):
        large = [cluster.table(f"large{i}", dim, rule=wl.Sum()) for i in range(4)]
        small = cluster.table("small", dim, rule=wl.Sum())
        keys, few = np.arange(rows), np.arange(128)
        grads, out = [cluster.empty((rows, dim)) for _ in large], cluster.empty((len(few), dim))
        for grad in grads:
            grad[...] = 1
        small.push(few, np.ones((len(few), dim))).wait()  # the lane is there
        proxy.pause()
        futures = {f"large{i}": t.push(keys, g) for i, (t, g) in enumerate(zip(large, grads, strict=True))}
        ones = np.ones((len(few), dim), np.float32)
        futures["small"] = small.push_pull_async(few, ones, out=out, priority=priority)
        proxy.resume()
        small_first = dict(sorted(futures.items(), key=lambda one: (one[0] == "small") != bool(priority)))
        ended = order_of_ends(small_first)
        assert sorted(ended) == sorted(futures)
        assert ended.index("small") <= (1 if priority else 4)
        if not priority:
            assert ended.index("small") >= 3
        assert (out == 2).all()


def test_a_tables_requests_about_one_key_keep_their_order(cluster: wl.Cluster) -> None:
    t = cluster.table("t", 2, rule=wl.Assign())
    futures = [t.push([5], [[i, i]], priority=(37 * i) % 256) for i in range(12)]
    assert t.pull_async([5], priority=255).wait().tolist() == [[11, 11]]
    for future in futures:
        future.wait()


@pytest.mark.parametrize("priority", [-1, 256, 1.0, True, None])
def test_a_tables_priority_is_a_whole_number_of_one_byte(cluster: wl.Cluster, priority: object) -> None:
    t, ones = cluster.table("t", 2, rule=wl.Sum()), np.ones((1, 2), np.float32)
    for call in (
        lambda: t.push([1], ones, priority=priority),
        lambda: t.push_pull_async([1], ones, priority=priority),
        lambda: t.pull_async([1], priority=priority),
    ):
        with pytest.raises(wl.InvalidArgument, match="table 't': priority must be a whole number from 0 to 255"):
            call()
    assert len(t) == 0
