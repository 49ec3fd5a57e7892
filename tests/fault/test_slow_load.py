"""A checkpoint that takes longer to load than members are given to start: they wait for as long as servers load."""

import pathlib

import numpy as np
import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass.testing.cluster import LocalCluster, Process, role

LOAD_S = 14.0  # beyond start_timeout, and beyond two words of the scheduler
SLOW = f"""
import time
from windlass._checkpoint import loading
from windlass.control import checkpoints
def fill(*arguments):
    time.sleep({LOAD_S})
    return loading.fill(*arguments)
checkpoints.fill = fill
"""


class SlowlyLoading(LocalCluster):
    """Its servers take their time."""

    def start_server(self, i: int, **more: str) -> Process:
        return Process(role("server", SLOW), self.environment(WINDLASS_NUMBER=str(i), **more))


@pytest.mark.long
def test_members_wait_for_as_long_as_servers_load(tmp_path: pathlib.Path) -> None:
    with LocalCluster(servers=1, checkpoint_dir=tmp_path) as cluster, cluster.connect() as one:
        one.tensor("w", (4,), rule=wl.Sum()).push(np.ones(4, np.float32)).wait()
        one.save().wait(PATIENCE_S)
    with SlowlyLoading(servers=1, checkpoint_dir=tmp_path, resume="newest", start_timeout=8) as cluster:
        worker = cluster.worker(
            "import windlass as wl\nwith wl.connect() as c: print(c.tensor('w').pull(), flush=True)"
        )
        assert worker.wait(PATIENCE_S) == 0, worker.output()
        assert "[1. 1. 1. 1.]" in worker.output()
