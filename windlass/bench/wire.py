"""``windlass bench wire``: a server process over TCP loopback and Unix sockets.

The limits are bare programs at the two ends of a socket of the same kind (csrc/bench/wire.h), one of them in a process
of its own, as the server is.
"""

import itertools
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

import numpy as np
from rich.console import Console

import windlass as wl
from windlass import _core
from windlass.bench._figures import Suite, interleave, seconds_of
from windlass.bench.core import BATCH, MB, _fill, _keys, _resident
from windlass.testing import Servers

Kind = Literal["tcp", "unix"]
KINDS: tuple[Kind, ...] = ("tcp", "unix")
DIM = 64
REQUEST_BYTES = 64  # of a bare pull
PAUSE_S = 0.001  # between the calls of an idle client
SEND_BUFFER_BYTES = 1 << 20  # of a bare Unix socket: 8 to 20 % faster than the kernel's 208 KiB; more adds nothing


def run(console: Console, rows: int, quick: bool = False) -> Suite:
    """All figures; `rows` in the table (the bars are for 5 million). quick: to see that it works, not how fast."""
    suite = Suite(f"windlass bench wire ({_core.isa()}, {_core.cores()} cores, {rows / 1e6:g} M rows)", console)
    rounds = 2 if quick else 7
    for kind in KINDS:
        with Bare(kind) as bare, Servers(1, kind=kind) as servers, servers.connect(transport="socket") as cluster:
            for megabytes in (1, 16, 100):
                dense(suite, cluster, bare, megabytes, rounds)
            smallest_pull(suite, cluster, bare, rounds)
            idle(suite, servers, kind, 1.0 if quick else 3.0)
            growth(suite, servers, cluster, kind, 2_000 if quick else 100_000)
    with Bare("unix") as bare, Servers(1, kind="unix") as servers, servers.connect(transport="socket") as cluster:
        table(suite, cluster, bare, rows, rounds)
    return suite


class Bare:
    """The limits' other end: a process that does what it is asked for over one socket, until that is closed."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._socket, theirs = _connected(kind)
        with theirs:
            code = f"from windlass import _core; _core.limit_wire_serve({theirs.fileno()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for us; it ends with the socket
            )

    def push(self, g: Any, repeats: int) -> float:
        """Seconds of the best push of a flat float32 array."""
        return _core.limit_wire_push(self._socket.fileno(), g, repeats)

    def pull(self, out: Any, repeats: int, request_bytes: int = REQUEST_BYTES) -> float:
        """Seconds of the best pull into a flat float32 array."""
        return _core.limit_wire_pull(self._socket.fileno(), request_bytes, out, repeats)

    def round_trips(self, count: int, *, spinning: bool = False, pause: float = 0.0) -> float:
        """Median seconds of round trips of 64 bytes each way."""
        return _core.limit_wire_round_trips(self._socket.fileno(), 64, count, spinning, pause)

    def round_trips_from_python(self, count: int, pause: float) -> float:
        """The same, blocking, with this end in Python."""
        _core.limit_wire_expect_round_trips(self._socket.fileno(), 64, count)
        data, took = bytes(64), []
        for _ in range(count):
            time.sleep(pause)
            start = time.perf_counter()
            self._socket.send(data)
            self._socket.recv(64)
            took.append(time.perf_counter() - start)
        return statistics.median(took)

    def __enter__(self) -> "Bare":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _connected(kind: Kind) -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection, set up as suits them best."""
    if kind == "unix":
        ends = socket.socketpair()  # the same as through an abstract address, once it is there
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        return ends
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    for end in (here, there):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return here, there


def dense(suite: Suite, cluster: wl.Cluster, bare: Bare, megabytes: int, rounds: int) -> None:
    """Push, pull and push_pull of registered arrays against bare ones of the same arrays."""
    n = megabytes * MB // 4
    w = cluster.tensor(f"w{megabytes}", n, rule=wl.SGD(lr=1e-6))
    grad, out = cluster.empty(n), cluster.empty(n)
    grad[:] = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
    out[:] = 0
    repeats = max(3, 200 // megabytes)

    def measure(call: Callable[[], object], limit: Callable[[], float]) -> tuple[float, float]:
        call()
        mine, best = interleave(lambda: seconds_of(call, repeats), limit, rounds)
        return n * 4 / mine / 1e9, n * 4 / best / 1e9

    label = f"{megabytes} MB, {bare.kind}"
    ours, limit = measure(lambda: w.push(grad).wait(), lambda: bare.push(grad, repeats))
    suite.rate(f"push {label}", ours, limit, "GB/s", bar=0.75, against="bare push")
    ours, limit = measure(lambda: w.pull(out=out), lambda: bare.pull(out, repeats))
    suite.rate(f"pull {label}", ours, limit, "GB/s", bar=0.75, against="bare pull")
    ours, limit = measure(
        lambda: w.push_pull(grad, out=out), lambda: bare.push(grad, repeats) + bare.pull(out, repeats)
    )
    suite.absolute(f"push_pull {label}", ours, "GB/s", bar="", limit=limit, against="bare push, then pull")


def smallest_pull(suite: Suite, cluster: wl.Cluster, bare: Bare, rounds: int) -> None:
    """A pull of 4 floats, called from Python: of a client that mostly sleeps, and call upon call."""
    w = cluster.tensor("smallest", 4, rule=wl.SGD(lr=0.1))
    out = cluster.empty(4)

    def p50(calls: int, pause: float) -> float:
        took = []
        for _ in range(calls):
            if pause:
                time.sleep(pause)
            start = time.perf_counter()
            w.pull(out=out)
            took.append(time.perf_counter() - start)
        return statistics.median(took)

    p50(1000, 0.0)
    mine, best = interleave(lambda: p50(300, PAUSE_S), lambda: bare.round_trips(300, pause=PAUSE_S), rounds)
    suite.latency(
        f"pull of 4 floats, idle, p50, {bare.kind}",
        mine * 1e6,
        best * 1e6,
        "us",
        bar=1.3,
        against="bare round trip, blocking",
    )
    best = interleave(lambda: p50(300, PAUSE_S), lambda: bare.round_trips_from_python(300, PAUSE_S), rounds)[1]
    suite.absolute(
        f"pull of 4 floats, idle, p50, {bare.kind}",
        mine * 1e6,
        "us",
        bar="",
        limit=best * 1e6,
        against="the same from Python",
    )
    mine, best = interleave(lambda: p50(5000, 0.0), lambda: bare.round_trips(5000, spinning=True), rounds)
    suite.latency(
        f"pull of 4 floats, hot, p50, {bare.kind}",
        mine * 1e6,
        best * 1e6,
        "us",
        bar=2,
        against="bare round trip, spinning",
    )


def idle(suite: Suite, servers: Servers, kind: Kind, seconds: float) -> None:
    """The processor time of a server with a client that asks for nothing."""
    time.sleep(0.1)
    before = servers.cpu_seconds(0)
    time.sleep(seconds)
    share = (servers.cpu_seconds(0) - before) / seconds
    suite.absolute(f"idle server, {kind}", share * 100, "% of a core", bar="< 1")


def growth(suite: Suite, servers: Servers, cluster: wl.Cluster, kind: Kind, requests: int) -> None:
    """What small requests leave behind in the memory of both processes."""
    w = cluster.tensor("growth", 4, rule=wl.SGD(lr=0.1))
    grad, out = np.ones(4, np.float32), np.empty(4, np.float32)

    def some(count: int) -> None:
        for _ in range(count // 2):
            w.push(grad).wait()
            w.pull(out=out)

    some(requests // 10)
    server, client = servers.rss_bytes(0), _resident("RssAnon")
    some(requests)
    for name, more in (("server", servers.rss_bytes(0) - server), ("client", _resident("RssAnon") - client)):
        suite.absolute(f"growth of the {name} over {requests} requests, {kind}", more / 2**20, "MiB", bar="<= 4")


def table(suite: Suite, cluster: wl.Cluster, bare: Bare, rows: int, rounds: int) -> None:
    """Pull and push of random rows; the limit moves the same bytes, wherever the rows are."""
    rng = np.random.default_rng(1)
    t = cluster.table("t", DIM, rule=wl.RowAdagrad(lr=1e-6), init=wl.Normal(std=0.01))
    keys = _keys(rows)
    _fill(t, keys, cluster)
    out, grads = cluster.empty((BATCH, DIM)), cluster.empty((BATCH, DIM))
    grads[:] = rng.standard_normal((BATCH, DIM), dtype=np.float32)
    keyed = cluster.empty(BATCH * (8 + DIM * 4) // 4)  # as many bytes as keys and gradients
    keyed[:] = 1
    batches = itertools.cycle([keys[rng.choice(rows, BATCH, replace=False, shuffle=True)] for _ in range(20)])

    def pull() -> float:
        return seconds_of(lambda: t.pull(next(batches), out=out), 6)

    def push() -> float:
        return seconds_of(lambda: t.push(next(batches), grads).wait(), 6)

    def bare_pull() -> float:
        return bare.pull(out.reshape(-1), 6, REQUEST_BYTES + 8 * BATCH)

    for name, ours, limit, bar in (("pull", pull, bare_pull, 9), ("push", push, lambda: bare.push(keyed, 6), 7)):
        ours()
        mine, best = interleave(ours, limit, rounds)
        suite.absolute(
            f"table {name}, dim {DIM}, {bare.kind}",
            BATCH / mine / 1e6,
            "M rows/s",
            bar=f">= {bar} M rows/s",
            limit=BATCH / best / 1e6,
            against=f"bare {name} of the bytes",
        )
