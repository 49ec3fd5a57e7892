"""The part of ``windlass bench local`` inside clusters that ``windlass run`` makes, with its defaults.

::

    windlass bench local -- starts -->  windlass run --servers 2 --workers 2
                                          worker 0 measures: in_run_worker.py
                         <-- a file of figures --
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from windlass import _core
from windlass._rules.sync import ASP, parse_sync
from windlass.bench._figures import Figure, Suite
from windlass.bench.sync import name
from windlass.launch.child import die_with

RUN_S = 900.0  # for a run to end
END_S = 10.0  # from SIGTERM to SIGKILL
MANY_CORES = 10  # from here on, 4 servers and 8 workers have room
LAST_LINES = 15  # of a run that failed


def alone(suite: Suite, rows: int) -> None:
    """One server and one worker."""
    measure(suite, 1, 1, "asp", "alone", rows=rows)


def together(suite: Suite) -> None:
    """All workers at once, under several policies."""
    measure(suite, 2, 2, "asp", "iterations", "push_pulls")
    measure(suite, 2, 2, "ssp:2", "iterations")
    measure(suite, 2, 2, "bsp", "iterations", "push_pulls")
    if _core.cores() >= MANY_CORES:
        measure(suite, 4, 8, "asp", "push_pulls")
        measure(suite, 4, 8, "bsp", "push_pulls")


def measure(suite: Suite, servers: int, workers: int, sync: str, *parts: str, rows: int = 0) -> None:
    """Adds the figures of parts of in_run_worker, measured in a cluster of its own."""
    policy = name(parse_sync(sync, ASP(), "sync"))
    with tempfile.TemporaryDirectory(prefix="wl-bench-") as folder:
        out = pathlib.Path(folder) / "figures.json"
        options = {"out": str(out), "parts": parts, "policy": policy, "rows": rows, "short": suite.short}
        run = ["run", "--servers", str(servers), "--workers", str(workers), "--sync", sync]
        worker = [sys.executable, "-m", "windlass.bench.in_run_worker", json.dumps(options)]
        run_until_it_ends([sys.executable, "-m", "windlass", *run, *worker], folder)
        for figure in json.loads(out.read_text()):
            suite.add(Figure(**figure))


def run_until_it_ends(command: list[str], folder: str) -> None:
    """Until it ends; raises with its last lines unless it ends well. Nothing of it is left behind."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WINDLASS_")}
    environment["XDG_RUNTIME_DIR"] = folder  # the run's own folder lies in there
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,  # Ctrl-C is for us
        preexec_fn=die_with(os.getpid()),
    )
    try:
        said, _ = process.communicate(timeout=RUN_S)
    finally:
        process.terminate()
        try:
            process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    if process.returncode != 0:
        last = "\n".join(said.splitlines()[-LAST_LINES:])
        raise RuntimeError(f"{' '.join(command[1:9])} ... ended with status {process.returncode}; it said:\n{last}")
