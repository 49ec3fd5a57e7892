"""BSP: one update per iteration, from what every worker contributed, the same whoever comes first."""

import threading
import time

import numpy as np
import pytest
from crew import together
from helpers import new_app, numbers, rng

import windlass as wl
from windlass.testing import Servers


def gradient(rank: int, clock: int, n: int = 5000) -> np.ndarray:
    return rng(1000 * rank + clock).standard_normal(n, np.float32)


def test_an_update_is_the_mean_of_what_every_worker_pushed(cluster: wl.Cluster) -> None:
    def work(worker: wl.Cluster) -> np.ndarray:
        w = worker.tensor("w", 5000, rule=wl.SGD(lr=0.5), sync=wl.BSP())
        for clock in range(7):
            got = w.push_pull(gradient(worker.rank, clock))
        return np.array(got)

    expected = np.zeros(5000, np.float32)
    for clock in range(7):
        expected -= 0.5 * (sum(gradient(rank, clock) for rank in range(3)) / np.float32(3))
    results = together(cluster, 3, work)
    for got in results:
        np.testing.assert_array_equal(got, results[0])
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def train(cluster: wl.Cluster, world: int, shuffle: int = 0) -> None:
    """A bit of everything, each worker at its own pace."""
    chance = [rng(shuffle * 100 + rank) for rank in range(world)]

    def work(worker: wl.Cluster) -> None:
        rank = worker.rank
        w = worker.tensor("w", (3000, 10), rule=wl.Adam(lr=0.01), init=wl.Normal(std=0.1), sync="bsp")
        total = worker.tensor("total", 100, rule=wl.Sum(), dtype=np.int64, sync="bsp")
        users = worker.table("users", 8, rule=wl.Adagrad(lr=0.1), init=wl.Normal(std=0.1), sync="bsp")
        for clock in range(6):
            if shuffle:
                time.sleep(float(chance[rank].random()) * 0.004)
            keys = rng(clock * 10 + rank).integers(0, 50, 20)
            rows = users.pull(keys)
            users.push(keys, rows * 0.1 + rank)
            if (clock + rank) % 3 != 0:  # not everybody pushes everything
                w.push(gradient(rank, clock, 30000).reshape(3000, 10), weight=rank + 1)
            if clock % 2 == 0:  # and some of it twice
                w[10:20].push(numbers(10, 10, seed=clock + rank))
            total.push(np.full(100, 10**rank))
            worker.tick()
        w.pull()

    together(cluster, world, work)


def test_fingerprints_are_equal_over_servers_transports_and_orders_of_arrival() -> None:
    seen: dict[str, str] = {}

    def note(name: str, cluster: wl.Cluster, shuffle: int) -> None:
        train(cluster, 3, shuffle)
        seen[f"{name}, {shuffle}"] = cluster.fingerprint()

    for shuffle in range(3):
        with wl.connect(threads=2) as cluster:
            note("embedded", cluster, shuffle)
    for count in (1, 2, 3):
        for transport in ("socket", "arena"):
            kind = "tcp" if transport == "socket" else "unix"
            with Servers(count, kind=kind, threads=2) as servers:
                for shuffle in range(2):
                    with servers.connect(transport=transport, app=new_app()) as cluster:
                        # Names are of the app, fingerprints are not; only this app's objects count.
                        train(cluster, 3, shuffle)
                        prints = [
                            cluster.tensor(
                                "w", (3000, 10), rule=wl.Adam(lr=0.01), init=wl.Normal(std=0.1), sync="bsp"
                            ).fingerprint(),
                            cluster.table(
                                "users", 8, rule=wl.Adagrad(lr=0.1), init=wl.Normal(std=0.1), sync="bsp"
                            ).fingerprint(),
                        ]
                        seen[f"{count} {kind}, {shuffle}"] = " ".join(prints)
    with wl.connect() as cluster:
        train(cluster, 3)
        embedded = " ".join(
            [
                cluster.tensor(
                    "w", (3000, 10), rule=wl.Adam(lr=0.01), init=wl.Normal(std=0.1), sync="bsp"
                ).fingerprint(),
                cluster.table("users", 8, rule=wl.Adagrad(lr=0.1), init=wl.Normal(std=0.1), sync="bsp").fingerprint(),
            ]
        )
    whole = {name: value for name, value in seen.items() if name.startswith("embedded")}
    assert len(set(whole.values())) == 1, whole
    rest = {name: value for name, value in seen.items() if not name.startswith("embedded")}
    assert set(rest.values()) == {embedded}, (embedded, rest)


MIB = 1 << 20


@pytest.mark.parametrize("rows", [False, True])
def test_what_waits_for_an_update_is_bounded_over_tcp_and_the_job_still_ends(rows: bool) -> None:
    """Ranks 1 to 3 push 24 MiB each while rank 0, whose turn it is, has not; there is room for 8 MiB."""
    size = 24 * MIB // 4
    begin = threading.Event()

    def work(worker: wl.Cluster) -> float:
        if rows:
            t = worker.table("t", 64, rule=wl.SGD(lr=1.0), sync="bsp")
            keys, g = np.arange(size // 64), np.full((size // 64, 64), worker.rank + 1, np.float32)
        else:
            w = worker.tensor("w", size, rule=wl.SGD(lr=1.0), sync="bsp")
            g = np.full(size, worker.rank + 1, np.float32)
        got = 0.0
        for _ in range(2):
            if worker.rank == 0:
                begin.wait(30)
            if rows:
                t.push(keys, g)
                worker.tick()
                got = float(t.pull(keys[:1])[0, 0])
            else:
                got = float(w.push_pull(g)[-1])
        return got

    with (
        Servers(1, kind="tcp", threads=2, staging_bytes_max=8 * MIB) as servers,
        servers.connect(transport="socket") as cluster,
    ):
        most = 0

        def watch() -> None:
            nonlocal most
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                most = max(most, servers.rss_bytes(0))
                time.sleep(0.01)
            begin.set()

        before = servers.rss_bytes(0)
        watcher = threading.Thread(target=watch)
        watcher.start()
        results = together(cluster, 4, work)
        watcher.join()
        assert results == [-5.0] * 4  # twice the mean of 1, 2, 3, 4
        # What had come by the time that rank 0 began: the weights, what may wait, and a buffer per connection.
        assert most - before < 24 * MIB + 8 * MIB + 24 * MIB, f"{(most - before) / MIB:.0f} MiB"
