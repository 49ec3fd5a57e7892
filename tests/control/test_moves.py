"""Shards that move while workers push and pull, by order of the scheduler."""

import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass.testing import LocalCluster
from windlass.testing.cluster import until

SIZE = 200_000  # int64: 25 shards
MOVES, MOVES_LONG = 40, 1000


class Load:
    """A worker in a thread that adds ones, pipelined, and looks at what it has added."""

    def __init__(self, cluster: LocalCluster, rank: int, workers: int, transport: str) -> None:
        self.cluster, self.rank, self.workers, self.transport = cluster, rank, workers, transport
        self.pushes = 0
        self.trouble: list[str] = []
        self.stop = threading.Event()
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        try:
            with self.cluster.connect(rank=self.rank, world_size=self.workers, transport=self.transport) as worker:
                w = worker.tensor("witness", SIZE, rule=wl.Sum(), dtype="int64")
                t = worker.table("counts", 4, rule=wl.Sum())
                one, keys, rows = np.ones(SIZE, np.int64), np.arange(500), np.ones((500, 4), np.float32)
                self.ready.set()
                while not self.stop.is_set():
                    under_way = [w.push(one), w.push(one), t.push(keys, rows), t.push(keys, rows)]
                    for future in under_way:
                        future.wait(timeout=30)
                    self.pushes += 2
                    seen, counted = w.pull(timeout=30).min(), t.pull(keys, timeout=30).min()
                    if min(seen, counted) < self.pushes:
                        self.trouble.append(f"pushed {self.pushes}, sees {seen} and {counted}")
        except Exception as error:
            self.trouble.append(repr(error))
        finally:
            self.ready.set()

    def end(self) -> int:
        self.stop.set()
        self.thread.join(60)
        assert not self.thread.is_alive()
        assert not self.trouble, self.trouble
        return self.pushes


@pytest.mark.parametrize("transport", ["socket", "auto"])
def test_the_witness_stays_exact_while_shards_move(transport: str, accurate: bool):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, moves = random.Random(seed), MOVES_LONG if accurate else MOVES
    with LocalCluster(servers=3, failure_timeout=5.0) as cluster:
        loads = [Load(cluster, rank, 2, transport) for rank in range(2)]
        for load in loads:
            assert load.ready.wait(30)
        took = []
        with cluster.operator() as operator:
            for _ in range(moves):
                name, shards = rng.choice([("default/witness", 25), ("default/counts", 256)])
                begun = time.monotonic()
                operator.move(name, rng.randrange(shards), rng.randrange(3), 20)
                took.append(time.monotonic() - begun)
        total = sum(load.end() for load in loads)
        print(f"{moves} moves, {max(took) * 1e3:.0f} ms at most; {total} pushes")
        assert total > 20
        with cluster.connect(app="default", reader=True) as reader:
            assert (reader.tensor("witness", SIZE, rule=wl.Sum(), dtype="int64").pull() == total).all()
            assert (reader.table("counts", 4, rule=wl.Sum()).pull(np.arange(500)) == total).all()


def test_a_move_is_a_command_and_the_status_shows_it():
    with LocalCluster(servers=2) as cluster, cluster.connect() as worker:
        w = worker.tensor("w", 1 << 20, rule=wl.Adam())
        w.push(np.ones(1 << 20, np.float32)).wait()
        before, placed = worker.fingerprint(), [x["placed_bytes"] for x in cluster.members("server")]

        def move(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "windlass", "move", *arguments, "--address", cluster.address]
            return subprocess.run(
                command, capture_output=True, text=True, env=cluster.environment(), timeout=PATIENCE_S
            )

        done = move("w", "0", "1")
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"cluster at {cluster.address}: shard 0 of w is on server 1\n"
        assert worker.fingerprint() == before
        after = [x["placed_bytes"] for x in cluster.members("server")]
        assert after[0] < placed[0]
        assert sum(after) == sum(placed)
        for arguments, complaint in [
            (("x", "0", "1"), "there is no such object"),
            (("w", "999", "1"), "it has shards 0 to"),
            (("w", "0", "5"), "there is no server 5"),
        ]:
            failed = move(*arguments)
            assert failed.returncode != 0
            assert complaint in re.sub(r"[│\s]+", " ", failed.stderr)


def test_a_worker_that_comes_later_finds_shards_where_they_are_now():
    with LocalCluster(servers=2) as cluster, cluster.connect(app="a") as first, cluster.operator() as operator:
        first.tensor("w", SIZE, rule=wl.Sum(), dtype="int64").push(np.ones(SIZE, np.int64)).wait()
        for shard in range(0, 25, 2):
            operator.move("a/w", shard, shard // 2 % 2, 20)
        with cluster.connect(app="b") as second:
            w = second.tensor("a/w", SIZE, rule=wl.Sum(), dtype="int64")
            w.push(np.ones(SIZE, np.int64)).wait()
            assert (w.pull() == 2).all()


def between(worker: wl.Cluster, do: Callable[[], None]) -> None:
    """Does it once: when the catalogue has said where an object is, and the worker has not told the servers yet."""
    attendance = worker._attendance
    assert attendance is not None
    assert attendance.links is not None
    left = [do]

    def catalogue(operation: int, body: bytes, seconds: float) -> tuple[int, list[bytes]]:
        answer = attendance.catalogue(operation, body, seconds)
        if left:
            left.pop()()
        return answer

    attendance.links.set_catalogue(catalogue)


def test_an_object_moves_before_any_server_has_been_told_of_it():
    with LocalCluster(servers=2) as cluster, cluster.connect() as worker, cluster.operator() as operator:
        for name, shards in [("witness", 25), ("counts", 256)]:

            def swap(name: str = f"default/{name}", last: int = shards - 1) -> None:
                operator.move(name, 0, 1, 20)
                operator.move(name, last, 0, 20)

            between(worker, swap)
            if name == "witness":
                w = worker.tensor(name, SIZE, rule=wl.Sum(), dtype="int64")
                w.push(np.ones(SIZE, np.int64)).wait()
                assert (w.pull() == 1).all()
            else:
                t = worker.table(name, 4, rule=wl.Sum())
                t.push(np.arange(2000), np.ones((2000, 4), np.float32)).wait()
                assert (t.pull(np.arange(2000)) == 1).all()
        assert cluster.scheduler.output().count(" moved from server ") == 4


def test_an_object_opens_that_has_left_a_server_which_is_gone_since_the_client_asked():
    with (
        LocalCluster(servers=2) as cluster,
        cluster.connect(app="a") as first,
        cluster.connect(app="b") as second,
        cluster.operator() as operator,
    ):
        first.tensor("w", SIZE, rule=wl.Sum(), dtype="int64").push(np.ones(SIZE, np.int64)).wait()

        def leave() -> None:
            for shard in range(25):
                operator.move("a/w", shard, 1, 20)
            cluster.servers[0].kill()

        between(second, leave)
        w = second.tensor("a/w", SIZE, rule=wl.Sum(), dtype="int64")
        assert (w.pull() == 1).all()


def test_a_move_to_a_server_that_hangs_fails_and_the_shard_stays():
    with LocalCluster(servers=2, failure_timeout=3.0) as cluster, cluster.connect() as worker:
        w = worker.tensor("w", SIZE, rule=wl.Sum(), dtype="int64")
        w.push(np.ones(SIZE, np.int64)).wait()
        first = next(i for i, x in enumerate(cluster.members("server")) if x["index"] == 0)
        assert first == 0
        cluster.servers[1].stop()
        with (
            cluster.operator() as operator,
            pytest.raises(wl.ServerLost, match=r"server 1 is gone|move of object"),
        ):
            operator.move("default/w", 0, 1, 20)
        until(lambda: "1" in cluster.status()["servers_lost"], "it is given up", PATIENCE_S)
        assert (w[0:1000].pull() == 1).all()
