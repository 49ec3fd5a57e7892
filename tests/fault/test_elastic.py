"""R11: servers are drained while workers train: nothing is lost, under BSP the bits are those of an undisturbed run."""

import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass.testing import LocalCluster
from windlass.testing.cluster import until

FAILURE_S = 5.0
ELEMENTS = 700_000  # 43 shards: enough to be even


def train(cluster: wl.Cluster, until_: Callable[[int], bool], pause_s: float, stalls: list[float]) -> str:
    """BSP on a tensor, one like it, and a table, until it is told to stop. The fingerprint at the end."""
    w = cluster.tensor("w", ELEMENTS, rule=wl.Adam(lr=0.01), init=wl.Normal(std=0.1), sync="bsp")
    d = cluster.tensor("d", like=w, rule=wl.SGD(lr=0.1), sync="bsp")
    rows = cluster.table("rows", dim=8, rule=wl.Adagrad(lr=0.1), init=wl.Normal(std=0.1), sync="bsp")
    random = np.random.default_rng(7)
    while not until_(len(stalls)):
        grad = random.standard_normal(ELEMENTS).astype(np.float32)
        keys = random.integers(0, 5000, 200)
        begun = time.monotonic()
        w.push_pull(grad)
        d.push_pull(grad)
        pushed = rows.push(keys, random.standard_normal((200, 8)).astype(np.float32))
        cluster.tick()
        pushed.wait()
        stalls.append(time.monotonic() - begun)
        time.sleep(pause_s)
    return cluster.fingerprint()


def drained(cluster: LocalCluster, index: int) -> None:
    """By an operator."""
    with cluster.operator(PATIENCE_S) as operator:
        operator.drain(index, PATIENCE_S)


def told_to_end(cluster: LocalCluster, index: int) -> None:
    """By SIGTERM, which it alone gets."""
    cluster.servers[index].process.send_signal(signal.SIGTERM)


def test_servers_join_and_are_drained_while_bsp_training_goes_on_with_the_same_bits():
    with (
        LocalCluster(servers=2, failure_timeout=FAILURE_S, keeps=True) as cluster,
        cluster.connect(timeout=PATIENCE_S) as worker,
    ):
        stalls: list[float] = []
        gone: list[int] = []
        seen: list[str] = []
        enough = lambda step: bool(gone) and step > gone[0] + 5  # noqa: E731
        thread = threading.Thread(target=lambda: seen.append(train(worker, enough, 0.02, stalls)))
        thread.start()
        until(lambda: len(stalls) >= 5, "it trains", PATIENCE_S)
        for _ in range(2):
            cluster.servers.append(cluster.start_server(None))
        level = lambda: cluster.status()["level"]  # noqa: E731
        held = lambda: [member["shards"] for member in cluster.members("server")]  # noqa: E731
        until(lambda: len(held()) == 4 and all(held()) and not level()["joins"], "shards have moved", PATIENCE_S)
        assert level()["furthest"] < 0.2, "as even as shards of a table allow that grows meanwhile"
        for index, end in ((2, drained), (0, told_to_end)):
            end(cluster, index)
            process = next(x for x in cluster.servers if f"server {index} of cluster" in x.output())
            assert process.wait(PATIENCE_S) == 0, process.output()
        gone.append(len(stalls))
        thread.join(PATIENCE_S)
        with wl.connect() as alone:
            assert seen == [train(alone, lambda step: step == len(stalls), 0.0, [])]
        status = cluster.status()
        print(f"all was over at step {gone[0]}; the longest step took {max(stalls):.3f} s")
        assert sorted(status["servers_retired"]) == ["0", "2"]
        assert status["servers_lost"] == {}
        assert all(set(one["servers"]) == {1, 3} for one in status["objects"])
        new = worker.tensor("new", 1 << 18, rule=wl.Sum())
        assert new.push_pull(np.ones(1 << 18, np.float32)).min() == 1


def test_a_worker_that_came_late_is_waited_for_at_a_server_that_came_later():
    """Under BSP, with a worker that joins the app before the server joins the cluster."""
    code = """
import time, numpy as np, windlass as wl
with wl.connect(timeout=300) as c:
    w = c.tensor("w", 200_000, rule=wl.Sum(), dtype=np.int64, sync="bsp")
    while True:
        w.push_pull(np.ones(200_000, np.int64))
        c.tick()
        time.sleep(0.01)
        print("closed", c.clock, flush=True)
"""
    with LocalCluster(servers=1, failure_timeout=FAILURE_S) as cluster:
        workers = [cluster.worker(code, 0, 1)]

        def go_on(steps: int) -> None:
            before = [worker.output().count("closed") for worker in workers]
            for worker, count in zip(workers, before, strict=True):
                until(lambda: worker.output().count("closed") > count + steps, "all go on", PATIENCE_S)  # noqa: B023

        go_on(3)
        workers.append(cluster.worker(code, 1, 2))
        go_on(3)
        cluster.servers.append(cluster.start_server(None))
        moved = lambda: [one["shards"] > 0 for one in cluster.members("server")] == [True, True]  # noqa: E731
        until(lambda: moved() and not cluster.status()["level"]["joins"], "shards have moved", PATIENCE_S)
        go_on(20)
        sync = lambda: next(app["sync"] for app in cluster.status()["apps"] if app["name"] == "default")  # noqa: E731
        until(lambda: sync() is not None and sync()["pulls"] > 0, "servers have reported", PATIENCE_S)
        assert sync()["late"] == 0, "no push came after its update"


@pytest.mark.parametrize("index", [0, 1])
def test_the_last_server_is_not_drained_and_stays(index: int):
    with LocalCluster(servers=2, failure_timeout=FAILURE_S) as cluster, cluster.connect(timeout=PATIENCE_S) as worker:
        w = worker.tensor("w", 1000, rule=wl.Sum())
        w.push(np.ones(1000, np.float32)).wait()
        drained(cluster, index)
        with pytest.raises(wl.InvalidArgument, match="it is the last one"):
            drained(cluster, 1 - index)
        assert (w.pull() == 1).all()
        late = cluster.worker("import windlass as wl\nwith wl.connect() as c: print(c.tensor('w').pull().sum())", 1, 2)
        assert late.wait(PATIENCE_S) == 0, late.output()
        assert "1000" in late.output()
