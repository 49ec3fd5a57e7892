"""`windlass run` whose scheduler is killed: another goes on with its journal on its port, and the run ends well."""

import os
import pathlib
import re
import signal
import subprocess
import sys

from helpers import PATIENCE_S
from test_run_progress import environment, scheduler_of

from windlass.testing.cluster import until

SCRIPT = """
import os, time, numpy as np, windlass as wl
with wl.connect(timeout=300) as cluster:
    w = cluster.tensor("w", 1000, rule=wl.Sum(), dtype=np.int64)
    pushes = 0
    print("training", flush=True)
    while not os.path.exists(STOP):
        w.push(np.ones(1000, np.int64)).wait()
        pushes += 1
        time.sleep(0.005)
    total = cluster.tensor("total", 1, rule=wl.Sum(), dtype=np.int64)  # for which there must be a scheduler
    total.push(np.array([pushes])).wait()
    cluster.barrier()
    assert (w.pull() == total.pull()[0]).all()
    print("exact", flush=True)
"""


def test_a_run_outlives_its_scheduler_three_times(tmp_path: pathlib.Path):
    script, stop = tmp_path / "train.py", tmp_path / "stop"
    script.write_text(SCRIPT.replace("STOP", repr(str(stop))))
    log = tmp_path / "out"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "windlass", "run", "--servers=2", "--workers=2", "--failure-timeout=2", str(script)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
    try:
        until(lambda: log.read_text().count("training") == 2, "both train", PATIENCE_S)
        for life in range(1, 4):
            killed = scheduler_of(process.pid)
            os.kill(killed, signal.SIGKILL)
            restart = f"scheduler ended with signal SIGKILL .*; restart {life} of 3"
            until(lambda: re.search(restart, log.read_text()), "it says so", PATIENCE_S)  # noqa: B023
            until(lambda: log.read_text().count("is back") == 4 * life, "all are back", PATIENCE_S)  # noqa: B023
        stop.touch()
        assert process.wait(PATIENCE_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    text = log.read_text()
    assert text.count("exact") == 2
    assert "Traceback" not in text
