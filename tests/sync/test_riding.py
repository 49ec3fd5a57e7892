"""Ticks that ride on pushes: a loop of push_pulls needs no message of its own to close its iterations."""

import threading
from typing import Any

import numpy as np
import pytest
from helpers import new_app

import windlass as wl
from windlass.testing import Faults, Proxy, Servers

ONE = np.ones(4, np.float32)


def beside(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_loop_of_push_pulls_sends_nothing_else():
    with Servers(1, kind="tcp") as servers, Proxy(servers.addresses[0]) as proxy:
        addresses, app = [proxy.address], new_app()
        proxy.set(Faults(delay=1.0, delay_ms=(0, 0)))  # a fault that does nothing, but is counted

        def other() -> None:
            with wl.connect(servers=addresses, app=app, rank=1, world_size=2, transport="socket") as worker:
                w = worker.tensor("w", 4, rule=wl.Sum(), sync="bsp")
                for _ in range(50):
                    w.push_pull(ONE)

        thread = beside(other)
        with wl.connect(servers=addresses, app=app, rank=0, world_size=2, transport="socket") as worker:
            w = worker.tensor("w", 4, rule=wl.Sum(), sync="bsp")
            for i in range(50):
                assert w.push_pull(ONE)[0] == 2 * (i + 1)
        thread.join(30)
        frames = proxy.counts["delay"]
        print(f"{frames} frames")
        assert 200 <= frames <= 280  # of two workers, there and back; ticks of their own would be 200 more


@pytest.mark.parametrize("sync", ["bsp", "ssp:0"])
def test_objects_that_a_worker_does_not_know_are_closed_by_its_pushes_to_others(sync: str):
    """Small tensors are on one server each, so that some of them are where no push goes."""
    with Servers(2, kind="unix") as servers:
        app, names = new_app(), [f"b{i}" for i in range(6)]

        def other() -> None:
            with servers.connect(app=app, rank=1, world_size=2) as worker:
                a = worker.tensor("a", 4, rule=wl.Sum(), sync=sync)
                for _ in range(30):
                    a.push_pull(ONE)

        thread = beside(other)
        with servers.connect(app=app, rank=0, world_size=2) as worker:
            a = worker.tensor("a", 4, rule=wl.Sum(), sync=sync)
            others = [worker.tensor(name, 4, rule=wl.Sum(), sync=sync) for name in names]
            for i in range(30):
                a.push_pull(ONE)
                for tensor in others:
                    assert tensor.push_pull(ONE, timeout=20)[0] == i + 1
        thread.join(30)
        assert not thread.is_alive()
