"""A Ray cluster of two nodes on this machine, each with a loopback address of its own, that leaves nothing behind.

    tests ---> this program, a process of its own, which adopts what its descendants leave (a subreaper)
                 |-- Ray's processes, and what those start
    a pipe ---> when it ends, however the tests have ended, all descendants are killed, and the folder removed

Ray finds its own processes by their command lines, also those of other clusters; here only descent counts.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback

END_S = 60.0  # for all of it to be gone
STORE_BYTES = 80_000_000  # of shared memory, on each node; Ray wants 75 MiB
_PR_SET_CHILD_SUBREAPER = 36


def descendants(pid: int) -> list[int]:
    """The processes below this one that have not ended."""
    parents: dict[int, int] = {}
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            words = (entry / "stat").read_text().rpartition(")")[2].split()
            if words[0] not in "ZX":
                parents[int(entry.name)] = int(words[1])
    below = {pid}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return sorted(below - {pid})


class Nodes:
    """A context manager: the cluster lives from enter to exit. Several beside each other do not meet.

    cpus: of each node, which also has two GPUs as far as Ray knows. paths: folders with modules that its processes are
    to find.
    """

    def __init__(self, *cpus: int, dashboard: bool = False, paths: tuple[str, ...] = ()) -> None:
        net = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
        self.ips = [f"{net}.{i + 2}" for i in range(len(cpus))]
        self.folder = tempfile.mkdtemp(prefix="wl-")  # short: paths of Unix sockets are
        self.dashboard = f"http://{self.ips[0]}:8265"
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}
        # The processes on the nodes find Ray as this one does.
        ray = importlib.util.find_spec("ray")
        assert ray is not None
        assert ray.origin is not None
        self.environment |= {
            "PYTHONPATH": os.pathsep.join([*paths, str(pathlib.Path(ray.origin).parents[1])]),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": self.folder,
            "PYTHONWARNINGS": "ignore",
        }
        nodes = [{"ip": ip, "cpus": n, "dashboard": dashboard} for ip, n in zip(self.ips, cpus, strict=True)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (open for as long as the process is known)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "windlass.testing.ray_nodes", self.folder, *map(json.dumps, nodes)],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            process_group=0,
        )

    def __enter__(self) -> "Nodes":
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        if not self.address:
            said = os.pread(self._log.fileno(), 1 << 16, 0).decode()
            self.__exit__()
            raise RuntimeError(f"Ray did not start:\n{said}")
        self.environment["RAY_ADDRESS"] = self.address
        return self

    @property
    def pids(self) -> list[int]:
        """Of all its processes."""
        return descendants(self._process.pid)

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(END_S)
        self._process.stdout.close()
        self._log.close()


def main() -> None:
    """Arguments: a folder that nobody else has, and for each node its address and its CPUs."""
    folder, nodes = sys.argv[1], [json.loads(text) for text in sys.argv[2:]]
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, whose end we notice
    try:
        from ray.cluster_utils import Cluster

        cluster = Cluster()
        for i, node in enumerate(nodes):
            cluster.add_node(
                node_ip_address=node["ip"],
                num_cpus=node["cpus"],
                num_gpus=2,
                object_store_memory=STORE_BYTES,
                include_dashboard=i == 0 and node.get("dashboard", False),
                dashboard_host=node["ip"],
                dashboard_port=node.get("dashboard_port"),
                wait=False,
            )
        cluster.wait_for_nodes()
        print(cluster.address, flush=True)
        sys.stdin.read()
    except BaseException:
        traceback.print_exc()
    finally:
        while pids := descendants(os.getpid()):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0):
                pass
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)  # what Ray has registered would look for its processes


if __name__ == "__main__":
    main()
