"""Policies in a cluster with a scheduler: shards that move, workers that are killed and replaced, apps and readers."""

import random
import threading
import time
from typing import Any

import numpy as np
import pytest
from helpers import PATIENCE_S, rng

import windlass as wl
from windlass.testing import LocalCluster

SIZE = 200_000
CLOCKS = 30


def run_threads(*functions: Any) -> list[Any]:
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = functions[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"
    return results


def objects(worker: wl.Cluster) -> tuple[wl.Tensor, wl.Table]:
    return (
        worker.tensor("w", SIZE, rule=wl.Adam(lr=0.01), init=wl.Normal(std=0.1), sync="bsp"),
        worker.table("t", 8, rule=wl.Adagrad(lr=0.1), init=wl.Normal(std=0.1), sync="bsp"),
    )


def train(cluster: LocalCluster, rank: int, transport: str) -> None:
    with cluster.connect(rank=rank, world_size=2, transport=transport) as worker:
        w, t = objects(worker)
        for clock in range(CLOCKS):
            draw = rng(100 * rank + clock)
            keys = draw.integers(0, 3000, 400)
            t.push(keys, t.pull(keys) * 0.5, weight=rank + 1)
            w.push_pull(draw.standard_normal(SIZE, np.float32))
            worker.tick()


def trained(cluster: LocalCluster, transport: str) -> tuple[str, str]:
    """What two workers leave behind."""
    run_threads(*[lambda rank=rank: train(cluster, rank, transport) for rank in range(2)])
    with cluster.connect(reader=True) as reader:
        w, t = objects(reader)
        return w.fingerprint(), t.fingerprint()


@pytest.mark.parametrize("transport", ["socket", "auto"])
def test_bsp_is_bit_identical_while_shards_move(transport: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    with LocalCluster(servers=2) as cluster:
        expected = trained(cluster, transport)
    with LocalCluster(servers=3) as cluster:
        over, moves = threading.Event(), 0

        def move() -> None:
            nonlocal moves
            with cluster.operator() as operator:
                while not over.is_set():
                    name, shards = draw.choice([("default/w", 13), ("default/t", 256)])
                    try:
                        operator.move(name, draw.randrange(shards), draw.randrange(3), 20)
                        moves += 1
                    except wl.NotFound:
                        time.sleep(0.01)  # nobody has opened it yet

        mover = threading.Thread(target=move)
        mover.start()
        try:
            result = trained(cluster, transport)
        finally:
            over.set()
            mover.join(30)
    print(f"{moves} moves")
    assert moves > 10
    assert result == expected


WORKER = """
import sys, time, numpy as np, windlass as wl
with wl.connect() as c:
    w = c.tensor("w", 4, rule=wl.SGD(lr=1.0), sync="bsp")
    while c.clock < 40:
        if c.rank == 1 and c.clock == 5 and "victim" in sys.argv:
            print("here", flush=True)
            time.sleep(1000)
        w.push_pull(np.full(4, c.rank + 1, np.float32))
        c.tick()
        if c.clock == 6:
            print("goes on", flush=True)
    print("end", w.pull()[0], c.clock, flush=True)
"""


def script(cluster: LocalCluster, rank: int, *arguments: str) -> Any:
    code = f"import sys; sys.argv[1:] = {list(arguments)!r}\n{WORKER}"
    return cluster.worker(code, rank, 2)


def test_the_others_go_on_without_a_killed_worker() -> None:
    with LocalCluster(servers=2, failure_timeout=3.0) as cluster:
        first, second = script(cluster, 0), script(cluster, 1, "victim")
        until_text(second, "here")
        second.kill()
        killed = time.monotonic()
        until_text(first, "goes on")
        assert time.monotonic() - killed < 3.0 + 1.0  # known dead at the latest
        assert first.wait(PATIENCE_S) == 0
        # Five iterations of both, then rank 0 alone.
        assert f"end {-(5 * 1.5 + 35 * 1.0)} 40" in first.output()


def test_a_replacement_takes_the_place_of_a_killed_worker() -> None:
    with LocalCluster(servers=2, failure_timeout=3.0, on_worker_loss="wait") as cluster:
        first, second = script(cluster, 0), script(cluster, 1, "victim")
        until_text(second, "here")
        second.kill()
        until_text(cluster.scheduler, "waits for a replacement of worker 1")
        time.sleep(0.5)
        assert "end" not in first.output()  # it waits
        again = script(cluster, 1)
        assert first.wait(PATIENCE_S) == 0
        assert again.wait(PATIENCE_S) == 0
        for worker in (first, again):
            assert f"end {-40 * 1.5} 40" in worker.output()  # every iteration is of both


HALF_WAY = """
import sys, time, numpy as np, windlass as wl
with wl.connect() as c:
    a, b = (c.tensor(name, 4, rule=wl.Sum(), sync=sys.argv[1]) for name in "ab")
    one = np.full(4, c.rank + 1, np.float32)
    while c.clock < 20:
        a.push_pull(one)
        if c.rank == 1 and c.clock == 5 and "victim" in sys.argv:
            print("here", flush=True)
            time.sleep(1000)
        b.push_pull(one)
        c.tick()
        if c.clock == 6:
            print("goes on", flush=True)
    print("end", flush=True)
"""


@pytest.mark.parametrize("sync", ["bsp", "ssp:1", "maxdelay:0.5"])
def test_what_a_killed_worker_has_closed_is_not_applied_again(sync: str) -> None:
    def worker(rank: int, *arguments: str) -> Any:
        return cluster.worker(f"import sys; sys.argv[1:] = {[sync, *arguments]!r}\n{HALF_WAY}", rank, 2)

    with LocalCluster(servers=2, failure_timeout=3.0, on_worker_loss="wait") as cluster:
        first, second = worker(0), worker(1, "victim")
        until_text(second, "here")
        second.kill()
        until_text(cluster.scheduler, "waits for a replacement of worker 1")
        again = worker(1)
        assert first.wait(PATIENCE_S) == 0
        assert again.wait(PATIENCE_S) == 0
        with cluster.connect(reader=True) as reader:
            a, b = (reader.tensor(name, 4, rule=wl.Sum(), sync=sync).pull()[0] for name in "ab")
        assert (a, b) == (60, 60)  # it had closed iteration 5 of a, and not of b


def until_text(process: Any, text: str, seconds: float = PATIENCE_S) -> None:
    end = time.monotonic() + seconds
    while text not in process.output():
        assert time.monotonic() < end, process.output()
        time.sleep(0.02)


def test_readers_look_and_apps_have_clocks_of_their_own() -> None:
    with LocalCluster(servers=2) as cluster:
        one = np.ones(4, np.float32)
        with (
            cluster.connect(app="a") as a,
            cluster.connect(app="b") as b,
            cluster.connect(app="a", reader=True) as reader,
        ):
            w = a.tensor("w", 4, rule=wl.Sum(), sync="bsp")
            v = b.tensor("w", 4, rule=wl.Sum(), sync="bsp")
            for clock in range(5):
                assert w.push_pull(one)[0] == clock + 1
            assert v.push_pull(one)[0] == 1
            w.push(one)
            assert reader.tensor("w", 4, rule=wl.Sum(), sync="bsp").pull()[0] == 5  # the last one waits for its tick
            assert b.tensor("a/w", 4, rule=wl.Sum(), sync="bsp").pull()[0] == 5
            a.tick()
            assert w.pull()[0] == 6


def test_the_status_says_how_stale_pulls_were_and_who_was_waited_for() -> None:
    with LocalCluster(servers=1) as cluster:
        one = np.ones(4, np.float32)

        def work(rank: int) -> None:
            with cluster.connect(rank=rank, world_size=2) as worker:
                w = worker.tensor("w", 4, rule=wl.Sum(), sync="ssp:1")
                for _ in range(12):
                    if rank == 1:
                        time.sleep(0.05)
                    w.push_pull(one)
                time.sleep(1.5)  # a report comes once a second

        done = threading.Thread(target=lambda: run_threads(lambda: work(0), lambda: work(1)))
        done.start()
        end = time.monotonic() + 20
        sync: dict[str, Any] = {}
        while time.monotonic() < end and sync.get("pulls", 0) < 24:
            apps = [app for app in cluster.status()["apps"] if app["name"] == "default"]
            sync = (apps[0]["sync"] if apps else None) or {}
            time.sleep(0.1)
        done.join(30)
        assert sync["pulls"] >= 24
        assert sync["waits"] >= 5
        assert sync["staleness"][1] >= 5
        assert sum(sync["staleness"][2:]) == 0
