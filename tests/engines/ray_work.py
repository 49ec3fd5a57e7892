"""What workers on Ray do in the tests: they import this module by its name."""

import json
import os
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import windlass as wl
from windlass._net.address import Address
from windlass.observe.status import fetch

PATIENCE_S = 300.0
ELEMENTS = 40_000  # several shards


def status() -> dict[str, Any]:
    """What the scheduler of this worker says."""
    address, token = Address.parse(os.environ["WINDLASS_ADDRESS"]), os.environ["WINDLASS_TOKEN"].encode()
    return dict(json.loads(fetch(address, token, timeout=PATIENCE_S)))


def first(folder: str, what: str) -> bool:
    """Whether nobody has asked so before."""
    try:
        os.close(os.open(pathlib.Path(folder) / what, os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False


def until(there: pathlib.Path) -> None:
    """Waits for a file."""
    deadline = time.monotonic() + PATIENCE_S
    while not there.exists():
        assert time.monotonic() < deadline, f"{there} never came"
        time.sleep(0.01)


def about() -> dict[str, Any]:
    """Where this worker is."""
    import ray

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    found: dict[str, Any] = {name: os.environ[name] for name in names}
    return {**found, "pid": os.getpid(), "ip": ray.util.get_node_ip_address()}


def add(folder: str, steps: int, look: str = "") -> dict[str, Any]:
    """Adds ones, as often as there are steps. Rank 1 dies once. Rank 0 tells what it sees, and waits to be seen."""
    cluster = wl.connect(timeout=PATIENCE_S)
    total = cluster.tensor("total", (ELEMENTS,), rule=wl.Sum(), dtype="int64", sync="bsp")
    while cluster.clock < steps:
        if cluster.rank == 1 and cluster.clock == steps // 2 and first(folder, "died"):
            os.kill(os.getpid(), signal.SIGKILL)
        total.push_pull(np.ones(ELEMENTS, np.int64))
        cluster.tick()
    cluster.barrier(timeout=PATIENCE_S)
    seen: dict[str, Any] = {**about(), "values": sorted(set(total.pull().tolist()))}
    if cluster.rank == 0 and look:
        seen["status"] = status()
        (pathlib.Path(folder) / look).write_text(
            json.dumps({"token": os.environ["WINDLASS_TOKEN"], "address": os.environ["WINDLASS_ADDRESS"]})
        )
        until(pathlib.Path(folder) / "looked")
    cluster.barrier(timeout=PATIENCE_S)
    return seen


def leave_together() -> int:
    """One step, and then everybody leaves at the same moment."""
    cluster = wl.connect(timeout=PATIENCE_S)
    total = cluster.tensor("total", (16,), rule=wl.Sum(), dtype="int64")
    total.push(np.ones(16, np.int64)).wait()
    cluster.barrier(timeout=PATIENCE_S)
    return int(total.pull()[0])


def fail(message: str) -> str:
    """Rank 1 raises once all are there; the others end well."""
    cluster = wl.connect(timeout=PATIENCE_S)
    cluster.barrier(timeout=PATIENCE_S)
    if cluster.rank == 1:
        raise KeyError(message)
    return "done"


def descend(folder: str, steps: int) -> tuple[str, int]:
    """Trains under BSP. In its first life it kills a server, once there is a checkpoint."""
    cluster = wl.connect(timeout=PATIENCE_S)
    began = cluster.clock

    def disturb() -> None:
        if cluster.clock == steps // 2 and first(folder, "half"):
            cluster.save("half").wait(PATIENCE_S)
        if cluster.clock == steps * 3 // 4 and first(folder, "killed"):
            server = next(one for one in status()["members"] if one["role"] == "server")
            os.kill(server["pid"], signal.SIGKILL)

    return descended(cluster, steps, disturb), began


def descended(cluster: wl.Cluster, steps: int, disturb: Callable[[], None] = lambda: None) -> str:
    """What the weights are after so many steps: their fingerprint."""
    w = cluster.tensor("w", (ELEMENTS,), rule=wl.Adam(lr=0.1), init=wl.Normal(std=1.0), sync="bsp")
    while cluster.clock < steps:
        disturb()
        w.push_pull(np.random.default_rng(cluster.clock).normal(size=ELEMENTS).astype(np.float32))
        cluster.tick()
    return w.fingerprint()


def of_a_task(address: str, token: str, rank: int, world_size: int, app: str = "default") -> int:
    """In a plain task of Ray: one of some that train together."""
    with wl.connect(address, token=token, rank=rank, world_size=world_size, app=app, timeout=PATIENCE_S) as cluster:
        total = cluster.tensor("total", (16,), rule=wl.Sum(), dtype="int64")
        total.push(np.ones(16, np.int64)).wait()
        cluster.barrier(timeout=PATIENCE_S)
        return int(total.pull()[0])


def lose_node(folder: str, last: str) -> tuple[int, int]:
    """Trains under BSP, with a checkpoint on the way; once, everything on the node with this address dies."""
    import ray

    from windlass.testing.ray_nodes import descendants

    cluster = wl.connect(timeout=PATIENCE_S)
    began, ip = cluster.clock, ray.util.get_node_ip_address()
    total = cluster.tensor("total", (16,), rule=wl.Sum(), dtype="int64", sync="bsp")
    while cluster.clock < 40:
        if cluster.clock == 20 and cluster.rank == 0 and first(folder, "asked"):
            cluster.save().wait(PATIENCE_S)
        if cluster.clock == 30 and ip == last and first(folder, "lost"):
            raylet = os.getppid()
            for pid in [raylet, *(pid for pid in descendants(raylet) if pid != os.getpid()), os.getpid()]:
                os.kill(pid, signal.SIGKILL)
        total.push_pull(np.ones(16, np.int64))
        cluster.tick()
    return began, int(total.pull()[0])
