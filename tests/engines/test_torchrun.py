"""Workers that torchrun starts, and starts again, with servers outside."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
from helpers import PATIENCE_S

from windlass.testing import LocalCluster

GOAL = 400
TRAIN = """
import os, signal
import numpy as np
import windlass as wl

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with wl.connect() as cluster:
    steps = cluster.tensor("steps", 1, rule=wl.Sum(), dtype="int64")
    begun = int(steps.pull()[0])
    print("attempt", attempt, "rank", cluster.rank, "of", cluster.world_size, "begins at", begun, flush=True)
    while (done := int(steps.pull()[0])) < int(os.environ["GOAL"]):
        steps.push_pull(np.ones(1, np.int64))
        if attempt == 0 and cluster.rank == 1 and done > 50:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.timeout(2 * PATIENCE_S)
def test_workers_that_torchrun_starts_again_go_on_with_what_servers_have(tmp_path: pathlib.Path):
    pytest.importorskip("torch", reason="needs windlass[torch]")
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    with LocalCluster(servers=1) as cluster:  # which stays when workers have left: --linger
        own = {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}
        done = subprocess.run(
            [*torchrun, "--monitor-interval=0.1", str(script)],
            env=own | cluster.environment(GOAL=str(GOAL), OMP_NUM_THREADS="1"),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    began = [line.split() for line in done.stdout.splitlines() if line.startswith("attempt")]
    first, second = ([words for words in began if words[1] == attempt] for attempt in "01")
    assert sorted(words[3] for words in first) == sorted(words[3] for words in second) == ["0", "1"]
    assert all(words[5] == "2" for words in began)
    assert all(int(words[-1]) > 50 for words in second)  # nothing that servers have is lost
    assert signal.Signals.SIGKILL.name in done.stderr or "exitcode" in done.stderr
