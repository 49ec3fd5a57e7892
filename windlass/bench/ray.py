"""``windlass bench ray``: what a run on Ray costs beside the same run without it.

::

    windlass bench ray --- starts --->  two raylets on this machine, each with an address of its own
      |                                   a server on one, a worker on the other
      |------------------ starts --->  windlass run --servers 1 --workers 1
      |<-- sockets --->  both workers: ray_worker.py

The raylets are there, and idle, while either is measured; the two runs take turns.
"""

import concurrent.futures
import contextlib
import json
import socket
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from rich.console import Console

import windlass.ray
from windlass import _core
from windlass._extras import need
from windlass.bench._figures import MEASURED, Suite
from windlass.bench._turns import Side, in_turns
from windlass.bench.in_run import run_until_it_ends
from windlass.bench.ray_worker import DIM, FLOATS, KEYS, serve
from windlass.testing.ray_nodes import Nodes

MEET_S, TURN_S = 120.0, 120.0
BAR = 0.9
TRANSPORTS = {"auto": "shared memory", "socket": "sockets"}


class Asked:
    """The workers that answer, by who they say they are."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._lines: dict[str, Any] = {}

    def meet(self) -> None:
        """Waits for one more."""
        sock, _ = self._listener.accept()
        sock.settimeout(TURN_S)
        lines = sock.makefile("rw")
        sock.close()  # the file keeps it open
        self._lines[json.loads(lines.readline())] = lines

    def side(self, who: str, what: str) -> Side:
        """The calls of one of them."""

        def turn(calls: int) -> list[float]:
            lines = self._lines[who]
            lines.write(json.dumps({"what": what, "calls": calls}) + "\n")
            lines.flush()
            return list(json.loads(lines.readline()))

        return turn

    def close(self) -> None:
        """They end."""
        for lines in self._lines.values():
            lines.close()


def run(console: Console, rows: int, short: bool = False) -> Suite:
    """All figures. short: to see that it works, not how fast."""
    ray = need("ray", "windlass bench ray")
    suite = Suite("ray", console, MEASURED, short=short)
    cores = _core.cores()
    with Nodes(cores, cores) as nodes:
        ray.init(nodes.address, log_to_driver=False, logging_level="ERROR")
        try:
            for transport, name in TRANSPORTS.items():
                with both(transport) as asked:
                    measure(suite, asked, name)
        finally:
            ray.shutdown()
    return suite


def measure(suite: Suite, asked: Asked, how: str) -> None:
    """The two calls, in both runs."""
    for what, name, amount, unit in (
        ("push_pull", "push_pull SGD 16 MB", FLOATS * 4 / 1e9, "GB/s"),
        ("pull", f"table pull of {KEYS} keys, dim {DIM}", KEYS / 1e6, "M rows/s"),
    ):
        ours, limit = in_turns(asked.side("ray", what), asked.side("run", what), length=suite.length)
        name = f"{name}, on Ray, {how}"
        suite.rate(name, amount, unit, ours, limit, bar=BAR, against="the same in `windlass run`")


@contextlib.contextmanager
def both(transport: str) -> Iterator[Asked]:
    """A run on Ray and one without it, whose workers wait to be asked."""
    cores = _core.cores()
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        tempfile.TemporaryDirectory(prefix="wl-bench-") as folder,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        listener.settimeout(MEET_S)
        port, asked = listener.getsockname()[1], Asked(listener)
        command = [sys.executable, "-m", "windlass", "run", "--transport", transport]
        command += [sys.executable, "-m", "windlass.bench.ray_worker", "run", str(port)]
        with contextlib.closing(asked):
            runs: list[concurrent.futures.Future[Any]] = [
                pool.submit(
                    windlass.ray.run,
                    serve,
                    ("ray", port),
                    resources_per_server={"CPU": cores},
                    resources_per_worker={"CPU": cores},
                    strategy="STRICT_SPREAD",
                    transport=transport,
                )
            ]
            asked.meet()
            runs.append(pool.submit(run_until_it_ends, command, folder))
            asked.meet()
            yield asked
        for one in runs:
            one.result(MEET_S)
