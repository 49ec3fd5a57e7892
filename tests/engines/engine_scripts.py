"""What the jobs of these tests run, and how their processes are found."""

import os
import pathlib
import sys
import time

from helpers import PATIENCE_S

JOIN = f"{sys.executable} -m windlass join"
PYTHON = sys.executable

#: Each worker adds 1 in each iteration, of which there is one more than is asked for: the last is closed at the end.
#: Worker 1 kills itself once if it is told to; what it had not closed its replacement does again.
TRAIN = """
import os, signal, sys
import numpy as np
import windlass as wl

ITERATIONS, HOW = int(sys.argv[1]), sys.argv[2]
mark = f"came-{os.environ['RANK']}"
first = not os.path.exists(mark)
open(mark, "w").close()
with wl.connect() as cluster:
    if cluster.resumed is not None:
        print("resumes at clock", cluster.resumed.clock, flush=True)
    w = cluster.tensor("w", 1000, rule=wl.Sum(), dtype="int64", sync="bsp")
    while cluster.clock < ITERATIONS:
        if HOW == "die" and first and cluster.rank == 1 and cluster.clock == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        weights = w.push_pull(np.ones(1000, np.int64))
        if cluster.clock == 3:
            print("trains", flush=True)
        if HOW == "slow":
            import time
            time.sleep(0.02)
    where = [member.host for member in cluster._attendance.servers]
    if cluster.rank == 0:
        print(f"{int(weights[0])} from {cluster.world_size} workers on {sorted(set(where))}", flush=True)
"""

#: A program of which several tasks are servers, and the others come and leave together.
CROWD = """
import sys
import numpy as np
import windlass as wl

cluster = wl.join(servers=1, on_worker_loss="wait")
if cluster is None:
    sys.stdout.write("served\\n")
    sys.exit()
with cluster:
    w = cluster.tensor("w", 1000, rule=wl.Sum(), dtype="int64", sync="bsp")
    for _ in range(3):
        weights = w.push_pull(np.ones(1000, np.int64))
    cluster.barrier()
sys.stdout.write(f"left {int(weights[0])}\\n")  # at once: lines of others come in between
"""


def write_scripts(folder: pathlib.Path) -> None:
    """Into the folder of a job."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(TRAIN)
    (folder / "crowd.py").write_text(CROWD)


def processes_with(variable: str, value: str) -> dict[int, str]:
    """Processes of this machine that have it in their environment, and their command lines."""
    found = {}
    for folder in pathlib.Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            if f"{variable}={value}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def await_none_with(variable: str, value: str) -> None:
    """Waits until no process has it."""
    deadline = time.monotonic() + PATIENCE_S
    while left := processes_with(variable, value):
        assert time.monotonic() < deadline, f"still there after {PATIENCE_S:g} s: {left}"
        time.sleep(0.1)
