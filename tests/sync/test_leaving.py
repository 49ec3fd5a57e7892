"""Workers that leave right after their last iteration."""

import random
import threading
from concurrent import futures

import numpy as np
import pytest

import windlass as wl
from windlass.testing import Faults, Proxy, Servers

FLOATS = 1 << 18  # enough for the lane of large requests, which its worker's goodbye does not take
ONE = np.ones(FLOATS, np.float32)


@pytest.mark.parametrize("how", ["push and tick", "push_pull"])
def test_what_was_pushed_last_counts_though_its_worker_leaves_at_once(how: str) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    slow = Faults(delay=1.0, delay_ms=(0, 60), seed=seed)  # per frame: what was sent later may arrive earlier
    with Servers(1, kind="tcp") as servers, Proxy(servers.addresses[0]) as proxy:
        for i in range(4):
            proxy.set(Faults())
            both = threading.Barrier(2)

            def work(rank: int, app: str = f"app{i}", both: threading.Barrier = both) -> list[float]:
                with wl.connect(
                    servers=[proxy.address], app=app, rank=rank, world_size=2, transport="socket"
                ) as worker:
                    w = worker.tensor("w", FLOATS, rule=wl.Sum(), sync="bsp")
                    if both.wait(30) == 0:
                        proxy.set(slow)
                    both.wait(30)
                    if rank == 1:
                        return [float(w.push_pull(ONE)[0])]
                    if how == "push_pull":
                        w.push_pull_async(ONE)
                    else:
                        w.push(ONE)
                        worker.tick()
                    return []

            with futures.ThreadPoolExecutor(2) as pool:
                assert list(pool.map(work, range(2)))[1] == [2.0]
