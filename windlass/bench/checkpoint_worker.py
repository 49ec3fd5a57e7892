"""The worker of ``windlass bench checkpoint`` that loses its server: it saves, kills the server, and when the run has
started again it says how long it took until a push was accepted."""

import json
import os
import pathlib
import signal
import sys
import time
from typing import Any

import numpy as np

import windlass as wl
from windlass.bench.checkpoint import DIM, SAVE_S, Size, filled_with


def main() -> None:
    """See the head of this file."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    said = pathlib.Path(options["said"])
    with wl.connect() as cluster:
        if cluster.resumed is None:
            filled_with(cluster, Size(options["floats"], options["rows"], 0))
            cluster.tick()
            cluster.save().wait(SAVE_S)
            said.write_text(json.dumps({"killed": time.monotonic()}))
            os.kill(server(), signal.SIGKILL)
            time.sleep(SAVE_S)  # until the run ends us
        table = cluster.table("t")
        table.push(np.array([1, 2, 3], np.uint64), np.ones((3, DIM), np.float32)).wait()
        seconds = time.monotonic() - json.loads(said.read_text())["killed"]
        said.write_text(json.dumps({"seconds": seconds}))


def server() -> int:
    """The process of the only server of this run."""
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except (OSError, ValueError):
                continue
            if parent == os.getppid() and b"server" in command:
                return int(entry.name)
    raise RuntimeError("there is no server beside this worker")


if __name__ == "__main__":
    main()
