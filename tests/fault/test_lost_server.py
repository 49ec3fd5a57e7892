"""Who is lost is the scheduler's to say; and what a lost server takes along, and what not."""

import socket
import time

import numpy as np
import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass.testing import LocalCluster, Proxy
from windlass.testing.cluster import Process, until

FAILURE_S = 1.0  # failure_timeout


def on_each(cluster: wl.Cluster) -> list[wl.Tensor]:
    """A tensor of one shard on each of two servers."""
    return [cluster.tensor(name, 4, rule=wl.Sum(), dtype=np.int64) for name in ("one", "other")]


ONES = np.ones(4, np.int64)


def test_who_has_lost_a_server_ticks_on_and_another_worker_joins():
    with LocalCluster(servers=2, failure_timeout=FAILURE_S) as cluster, cluster.connect(timeout=PATIENCE_S) as first:
        here, gone = on_each(first)
        for tensor in (here, gone):
            tensor.push(ONES).wait()
        first.tick()
        cluster.servers[1].stop()
        first.tick()  # it is on its way when the server is lost
        cluster.servers[1].kill()
        with pytest.raises(wl.ServerLost):
            gone.pull()
        for _ in range(3):
            assert here.push_pull(ONES)[0] >= 2
            first.tick()
        with cluster.connect(rank=1, world_size=2, timeout=PATIENCE_S) as second:
            assert (second.rank, second.world_size) == (1, 2)
            there = second.tensor("one", 4, rule=wl.Sum(), dtype=np.int64)
            assert there.push_pull(ONES)[0] == 5
            second.tick()
            with pytest.raises(wl.ServerLost, match="open of tensor 'other'"):
                on_each(second)
        first.tick()
        assert here.pull()[0] == 5


class Proxied(LocalCluster):
    """Its one server is told to others as the proxy."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__(servers=1, failure_timeout=FAILURE_S, transport="socket")
        self._proxy = proxy

    def start_server(self, i: int, **more: str) -> Process:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self._proxy.target = address
        return super().start_server(i, WINDLASS_LISTEN=address, WINDLASS_ADVERTISE=self._proxy.address, **more)


@pytest.mark.parametrize("who", ["nobody", "a scheduler", "a server of another cluster"])
def test_a_server_that_its_scheduler_hears_is_waited_for_whoever_is_at_its_address(who: str):
    with (
        Proxy("tcp://127.0.0.1:1") as proxy,
        Proxied(proxy) as cluster,
        LocalCluster(servers=1) as stranger,
        cluster.connect(timeout=PATIENCE_S) as worker,
        stranger.connect(timeout=PATIENCE_S),
    ):
        real = proxy.target
        [other] = stranger.members("server")
        tensor = worker.tensor("w", 4, rule=wl.Sum(), dtype=np.int64)
        tensor.push(ONES).wait()
        if who == "nobody":
            proxy.refuse()
        else:
            proxy.target = stranger.address if who == "a scheduler" else other["address"]
        proxy.cut()
        future = tensor.push(ONES)
        with pytest.raises(wl.Timeout, match="connecting again to"):
            future.wait(timeout=3 * FAILURE_S)
        with pytest.raises(wl.Timeout):
            tensor.pull(timeout=0.1)
        assert len(cluster.members("server")) == 1
        proxy.target = real
        proxy.accept()
        future.wait()
        assert tensor.push_pull(ONES)[0] == 3


def test_a_call_that_waits_for_a_server_ends_when_the_scheduler_gives_it_up():
    with Proxy("tcp://127.0.0.1:1") as proxy, Proxied(proxy) as cluster:
        worker = cluster.connect(timeout=PATIENCE_S)
        tensor = worker.tensor("w", 4, rule=wl.Sum(), dtype=np.int64)
        tensor.push(ONES).wait()
        proxy.refuse()
        proxy.cut()
        future = tensor.push(ONES)
        time.sleep(1.5 * FAILURE_S)
        assert not future.done()
        cluster.servers[0].kill()
        with pytest.raises(wl.ServerLost):
            future.wait()
        with pytest.raises(wl.ServerLost):
            worker.tick()  # it was the only one
        worker.close()


def test_a_range_whose_pushes_have_no_answer_is_not_done():
    with LocalCluster(servers=1, failure_timeout=PATIENCE_S) as cluster, cluster.connect(timeout=PATIENCE_S) as worker:
        seen = worker.tensor("seen", 40, rule=wl.Sum(), dtype=np.int64)
        lease = worker.lease(40, batch_size=4, lease_size=4)
        batches = iter(lease)
        first = next(batches)
        seen[first].push(np.ones(4, np.int64)).wait()
        worker.tick()
        until(lambda: lease.samples_done == 4, "the first range is done", PATIENCE_S)
        cluster.servers[0].stop()
        futures = []
        for _ in range(3):
            futures.append(seen[next(batches)].push(np.ones(4, np.int64)))
            worker.tick()
        assert lease.samples_done == 4  # whoever is killed now loses the others
        cluster.servers[0].cont()
        for future in futures:
            future.wait()
        until(lambda: lease.samples_done == 16, "all that was pushed is done", PATIENCE_S)
        for indices in batches:
            seen[indices].push(np.ones(4, np.int64))
        assert lease.samples_done == 40
        assert (seen.pull() == 1).all()
