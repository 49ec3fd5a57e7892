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
from windlass.bench import _native
from windlass.bench._figures import MEASURED, Suite
from windlass.bench._turns import Side, in_turns, timed, timed_over
from windlass.bench._work import BATCH, BATCHES, MB, fill, filled, keys_of, size_of
from windlass.bench.core import resident
from windlass.testing import Servers

Kind = Literal["tcp", "unix"]
KINDS: tuple[Kind, ...] = ("tcp", "unix")
DIM = 64
SIZES = (1 * MB, 16 * MB, 100 * MB)
PIECES = (64 << 10, 256 << 10, 1 << 20)  # what a receiving side may read at once
PIECE_CALLS = 7  # of each, to choose one
REQUEST_BYTES = 64  # of a bare pull
PAUSE_S = 0.001  # between the calls of an idle client
SEND_BUFFER_BYTES = 1 << 20  # of a bare Unix socket: 8 to 20 % faster than the kernel's 208 KiB; more adds nothing


def run(console: Console, rows: int, short: bool = False) -> Suite:
    """All figures; `rows` in the table (the bars are for 5 million). short: to see that it works, not how fast."""
    suite = Suite("wire", console, MEASURED, short=short, detail=f"{rows / 1e6:g} M rows")
    for kind in KINDS:
        with Bare(kind) as bare, Servers(1, kind=kind) as servers, servers.connect(transport="socket") as cluster:
            for size_bytes in suite.sizes(SIZES):
                dense(suite, cluster, bare, size_bytes)
            smallest_pull(suite, cluster, bare)
            idle(suite, servers, kind, 1.0 if short else 3.0)
            growth(suite, servers, cluster, kind, 2_000 if short else 100_000)
    with Bare("unix") as bare, Servers(1, kind="unix") as servers, servers.connect(transport="socket") as cluster:
        table(suite, cluster, bare, rows)
    return suite


class Bare:
    """The limits' other end: a process that does what it is asked for over one socket, until that is closed."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._socket, theirs = _connected(kind)
        with theirs:
            code = f"from windlass.bench import _native; _native.limit_wire_serve({theirs.fileno()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for us; it ends with the socket
            )

    def push(self, g: Any) -> Side:
        """Pushes of a flat float32 array."""
        return _with_its_best_piece(
            lambda piece: lambda calls: _native.limit_wire_push(self._socket.fileno(), g, piece, calls)
        )

    def pull(self, out: Any, request_bytes: int = REQUEST_BYTES) -> Side:
        """Pulls into a flat float32 array."""
        return _with_its_best_piece(
            lambda piece: lambda calls: _native.limit_wire_pull(self._socket.fileno(), request_bytes, out, piece, calls)
        )

    def round_trips(self, *, spinning: bool = False, pause: float = 0.0) -> Side:
        """Round trips of 64 bytes each way, each after a pause."""
        return lambda calls: _native.limit_wire_round_trips(self._socket.fileno(), 64, calls, spinning, pause)

    def round_trips_from_python(self, pause: float) -> Side:
        """The same, blocking, with this end in Python."""
        data = bytes(64)

        def round_trip() -> None:
            self._socket.send(data)
            self._socket.recv(64)

        def turn(calls: int) -> list[float]:
            _native.limit_wire_expect_round_trips(self._socket.fileno(), 64, calls)
            return timed(round_trip, pause)(calls)

        return turn

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


def _with_its_best_piece(of: Callable[[int], Side]) -> Side:
    """The limit reads as much at once as suits this size best, found out beforehand."""
    return of(sorted(PIECES, key=lambda piece: statistics.median(of(piece)(PIECE_CALLS)))[0])


def dense(suite: Suite, cluster: wl.Cluster, bare: Bare, size_bytes: int) -> None:
    """Push, pull and push_pull of registered arrays against bare ones of the same arrays."""
    n = size_bytes // 4
    w = cluster.tensor(f"w{size_bytes}", n, rule=wl.SGD(lr=1e-6))
    grad, out = cluster.empty(n), filled(cluster.empty, n)
    grad[:] = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
    push, pull = bare.push(grad), bare.pull(out)

    def both(calls: int) -> list[float]:
        return [there + back for _ in range(calls) for there, back in zip(push(1), pull(1), strict=True)]

    for name, call, limit, bar, against in (
        ("push", lambda: w.push(grad).wait(), push, 0.75, "bare push"),
        ("pull", lambda: w.pull(out=out), pull, 0.75, "bare pull"),
        ("push_pull", lambda: w.push_pull(grad, out=out), both, None, "bare push, then pull"),
    ):
        ours, best = in_turns(timed(call), limit, length=suite.length)
        suite.rate(
            f"{name} {size_of(size_bytes)}, {bare.kind}",
            size_bytes / 1e9,
            "GB/s",
            ours,
            best,
            bar=bar,
            against=against,
        )


def smallest_pull(suite: Suite, cluster: wl.Cluster, bare: Bare) -> None:
    """A pull of 4 floats, called from Python: of a client that mostly sleeps, and call upon call."""
    w = cluster.tensor("smallest", 4, rule=wl.SGD(lr=0.1))
    out = cluster.empty(4)

    def pull() -> None:
        w.pull(out=out)

    name, from_python = f"pull of 4 floats, idle, {bare.kind}", bare.round_trips_from_python(PAUSE_S)
    idle = timed(pull, PAUSE_S)
    ours, blocking, python = in_turns(idle, bare.round_trips(pause=PAUSE_S), from_python, length=suite.length)
    suite.latency(name, "us", ours, blocking, bar=1.3, against="bare round trip, blocking")
    suite.latency(name, "us", ours, python, against="the same from Python")
    ours, spinning = in_turns(timed(pull), bare.round_trips(spinning=True), length=suite.length)
    name = f"pull of 4 floats, hot, {bare.kind}"
    suite.latency(name, "us", ours, spinning, bar=2, against="bare round trip, spinning")


def idle(suite: Suite, servers: Servers, kind: Kind, seconds: float) -> None:
    """The processor time of a server with a client that asks for nothing."""
    time.sleep(0.1)
    before = servers.cpu_seconds(0)
    time.sleep(seconds)
    share = (servers.cpu_seconds(0) - before) / seconds
    suite.value(f"idle server, {kind}", share * 100, "% of a core", value_bar=1)


def growth(suite: Suite, servers: Servers, cluster: wl.Cluster, kind: Kind, requests: int) -> None:
    """What small requests leave behind in the memory of both processes."""
    w = cluster.tensor("growth", 4, rule=wl.SGD(lr=0.1))
    grad, out = np.ones(4, np.float32), np.empty(4, np.float32)

    def some(count: int) -> None:
        for _ in range(count // 2):
            w.push(grad).wait()
            w.pull(out=out)

    some(requests // 10)
    server, client = servers.rss_bytes(0), resident("RssAnon")
    some(requests)
    for name, more in (("server", servers.rss_bytes(0) - server), ("client", resident("RssAnon") - client)):
        suite.value(f"growth of the {name} over {requests} requests, {kind}", more / 2**20, "MiB", value_bar=4)


def table(suite: Suite, cluster: wl.Cluster, bare: Bare, rows: int) -> None:
    """Pull and push of random rows; the limit moves the same bytes, wherever the rows are."""
    rng = np.random.default_rng(1)
    t = cluster.table("t", DIM, rule=wl.RowAdagrad(lr=1e-6), init=wl.Normal(std=0.01))
    keys = keys_of(rows)
    fill(t, keys, cluster)
    out, grads = filled(cluster.empty, (BATCH, DIM)), cluster.empty((BATCH, DIM))
    grads[:] = rng.standard_normal((BATCH, DIM), dtype=np.float32)
    keyed = filled(cluster.empty, BATCH * (8 + DIM * 4) // 4)  # as many bytes as keys and gradients
    drawn = [keys[rng.choice(rows, BATCH, replace=False, shuffle=True)] for _ in range(BATCHES)]
    batches = itertools.cycle(drawn)
    pull, push = bare.pull(out.reshape(-1), REQUEST_BYTES + 8 * BATCH), bare.push(keyed)
    for name, call, limit, bar in (
        ("pull", lambda batch: t.pull(batch, out=out), pull, 9),
        ("push", lambda batch: t.push(batch, grads).wait(), push, 7),
    ):
        ours, best = in_turns(timed_over(batches, call), limit, length=suite.length)
        suite.rate(
            f"table {name}, dim {DIM}, {bare.kind}",
            BATCH / 1e6,
            "M rows/s",
            ours,
            best,
            value_bar=bar,
            against=f"bare {name} of the bytes",
        )
