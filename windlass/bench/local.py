"""``windlass bench local``: a server process on the same host, which uses the worker's arrays where they lie.

The limits are those of ``bench core``: loops in this process that do the same to arrays of their own. They take turns
with ours.
"""

import itertools
import statistics
import subprocess
import sys
import time
from types import TracebackType
from typing import Any

import numpy as np
from rich.console import Console

import windlass as wl
from windlass import _core
from windlass.bench._figures import Suite, interleave, seconds_of
from windlass.bench.core import BATCH, MB, STREAM_BYTES, _fill, _keys
from windlass.bench.local_peers import peers
from windlass.bench.wire import PAUSE_S, Bare
from windlass.testing import Servers

DIM = 64
SMALL, SMALL_FLOATS = 200, 5_000  # tensors of 20 KB in a step
WORKER = """
import sys
import numpy as np
import windlass as wl
from windlass.bench._figures import seconds_of
servers, rank, n, sync = sys.argv[1].split(), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
with wl.connect(servers=servers, rank=rank, world_size=2, transport="arena", sync=sync) as cluster:
    w = cluster.tensor("shared", n, rule=wl.SGD(lr=1e-6))
    grad, out = cluster.empty(n), cluster.empty(n)
    grad[:] = 0.5
    for line in sys.stdin:
        repeats = int(line)
        print(seconds_of(lambda: [w.push_pull(grad, out=out) for _ in range(repeats)]), flush=True)
"""


def run(console: Console, rows: int, quick: bool = False) -> Suite:
    """All figures; `rows` in the table (the bars are for 5 million). quick: to see that it works, not how fast."""
    suite = Suite(f"windlass bench local ({_core.isa()}, {_core.cores()} cores, {rows / 1e6:g} M rows)", console)
    rounds = 2 if quick else 7
    with Servers(1, kind="unix") as servers, servers.connect(transport="arena") as cluster:
        for label, rule in (("SGD", wl.SGD(lr=1e-6)), ("Adam", wl.Adam(lr=1e-6))):
            for megabytes in (1, 16, 100):
                dense(suite, cluster, label, rule, megabytes, rounds)
        for megabytes in (1, 16, 100):
            one_way(suite, cluster, megabytes, rounds)
        step(suite, cluster, rounds)
        smallest_pull(suite, cluster, rounds)
    several(suite, rounds)
    if not quick:
        against_peers(suite, console, rounds)
    with Servers(1, kind="unix") as servers, servers.connect(transport="arena") as cluster:
        table(suite, cluster, rows, rounds)
    return suite


def dense(suite: Suite, cluster: wl.Cluster, label: str, rule: wl.Rule, megabytes: int, rounds: int) -> None:
    """push_pull of registered arrays against the fused loop w = rule(w, g); out = w."""
    n = megabytes * MB // 4
    threads = 1 if megabytes == 1 else _core.cores()
    stream = n * 4 >= STREAM_BYTES
    repeats = max(3, 200 // megabytes)
    w = cluster.tensor(f"{label} {megabytes}", n, rule=rule)
    grad, out = cluster.empty(n), cluster.empty(n)
    grad[:] = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
    with wl.connect() as own:  # the limits' arrays
        arrays = [own.empty(n) for _ in range(5)]
        for a in arrays:
            a[:] = 0.5

        def limit() -> float:
            if label == "SGD":
                return _core.limit_fused_sgd(arrays[0], arrays[4], arrays[1], stream, threads, repeats)
            return _core.limit_fused_adam(
                arrays[0], arrays[1], arrays[2], arrays[4], arrays[3], stream, threads, repeats
            )

        def ours() -> float:
            return seconds_of(lambda: w.push_pull(grad, out=out), repeats)

        ours()
        mine, best = interleave(ours, limit, rounds)
    suite.rate(
        f"push_pull {label} {megabytes} MB",
        n * 4 / mine / 1e9,
        n * 4 / best / 1e9,
        "GB/s",
        bar=0.4 if megabytes == 1 else 0.7,
        against=f"fused loop, {threads} thread{'s' if threads > 1 else ''}",
    )


def against_peers(suite: Suite, console: Console, rounds: int) -> None:
    """The same push_pull by what else is installed."""
    for peer in peers():
        with Servers(1, kind="unix") as servers, servers.connect(transport="arena") as cluster, peer:
            for megabytes in (1, 16, 100):
                n, repeats = megabytes * MB // 4, max(3, 100 // megabytes)
                w = cluster.tensor(f"peer {megabytes}", n, rule=wl.SGD(lr=1e-6))
                grad, out = cluster.empty(n), cluster.empty(n)
                grad[:] = 0.5
                theirs = peer.push_pull(n * 4, repeats)
                for _ in range(3):
                    w.push_pull(grad, out=out)
                mine, best = interleave(
                    lambda: seconds_of(lambda: w.push_pull(grad, out=out), repeats),  # noqa: B023 (called here)
                    lambda: min(theirs()),  # noqa: B023
                    rounds,
                )
                suite.rate(
                    f"push_pull SGD {megabytes} MB",
                    n * 4 / mine / 1e9,
                    n * 4 / best / 1e9,
                    "GB/s",
                    bar=2.5,
                    against=peer.name,
                )
        if peer.why:
            console.print(f"[dim]{peer.name}: not measured, {peer.why}[/dim]", highlight=False)


def one_way(suite: Suite, cluster: wl.Cluster, megabytes: int, rounds: int) -> None:
    """Pull alone against memcpy, push alone against the update in place, both with as many threads as cores."""
    n, threads = megabytes * MB // 4, _core.cores()
    repeats = max(3, 200 // megabytes)
    w = cluster.tensor(f"one way {megabytes}", n, rule=wl.SGD(lr=1e-6))
    grad, out = cluster.empty(n), cluster.empty(n)
    grad[:] = 0.5
    w.push(grad).wait()  # weights that nobody has touched are one page of zeros
    with wl.connect() as own:  # the limits' arrays
        source, to = own.empty(n), own.empty(n)
        source[:], to[:] = 0.5, 0.5
        for name, call, limit, against in (
            ("pull", lambda: w.pull(out=out), lambda: _core.limit_copy(source, to, threads, repeats), "memcpy"),
            (
                "push SGD",
                lambda: w.push(grad).wait(),
                lambda: _core.limit_update_sgd(source, to, threads, repeats),
                "update in place",
            ),
        ):
            for _ in range(3):
                call()
            mine, best = interleave(lambda call=call: seconds_of(call, repeats), limit, rounds)  # type: ignore[misc]
            suite.rate(
                f"{name} {megabytes} MB",
                n * 4 / mine / 1e9,
                n * 4 / best / 1e9,
                "GB/s",
                bar=0.7,
                against=f"{against}, {threads} threads",
            )


def step(suite: Suite, cluster: wl.Cluster, rounds: int) -> None:
    """Many small tensors in one step against one tensor of the same size."""
    n = SMALL * SMALL_FLOATS
    one = cluster.tensor("one", n, rule=wl.SGD(lr=1e-6))
    many = [cluster.tensor(f"small {i}", SMALL_FLOATS, rule=wl.SGD(lr=1e-6)) for i in range(SMALL)]
    grad, out = cluster.empty(n), cluster.empty(n)
    grad[:] = 0.5
    grads, outs = np.split(grad, SMALL), np.split(out, SMALL)

    def together() -> None:
        with cluster.step() as s:
            s.push_pull(many, grads, out=outs)

    together()
    mine, best = interleave(
        lambda: seconds_of(together, 50), lambda: seconds_of(lambda: one.push_pull(grad, out=out), 50), rounds
    )
    suite.latency(
        f"{SMALL} tensors of {SMALL_FLOATS * 4 // 1000} KB in one step",
        mine * 1e6,
        best * 1e6,
        "us",
        bar=1.5,
        against=f"push_pull of one of {n * 4 // MB} MB",
    )


class Worker:
    """A worker in a process of its own, which push_pulls as often as it is told."""

    def __init__(self, servers: Servers, rank: int, n: int, sync: str = "asp") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, " ".join(servers.addresses), str(rank), str(n), sync],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-C is for us; it ends with its stdin
        )

    def begin(self, repeats: int) -> None:
        """Tells it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{repeats}\n")
        self._process.stdin.flush()

    def seconds(self) -> float:
        """Waits for it."""
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def several(suite: Suite, rounds: int) -> None:
    """Two workers and two servers, each worker at its own pace: the sum over workers."""
    n, repeats = 16 * MB // 4, 20
    with (
        Servers(2, kind="unix") as servers,
        Worker(servers, 0, n) as first,
        Worker(servers, 1, n) as second,
        wl.connect() as own,
    ):
        arrays = [own.empty(n) for _ in range(3)]
        for a in arrays:
            a[:] = 0.5

        def ours() -> float:
            for worker in (first, second):
                worker.begin(repeats)
            return max(worker.seconds() for worker in (first, second)) / (2 * repeats)

        def limit() -> float:
            return _core.limit_fused_sgd(arrays[0], arrays[1], arrays[2], True, 2, repeats)

        ours()
        mine, best = interleave(ours, limit, rounds)
    suite.rate(
        "push_pull SGD 16 MB, 2 workers, 2 servers",
        n * 4 / mine / 1e9,
        n * 4 / best / 1e9,
        "GB/s",
        bar=0.7,
        against="fused loop, 2 threads",
    )


def smallest_pull(suite: Suite, cluster: wl.Cluster, rounds: int) -> None:
    """A pull of 4 floats, call upon call, and of a client that mostly sleeps."""
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

    suite.absolute("pull of 4 floats, hot, p50", min(p50(5000, 0) for _ in range(5)) * 1e6, "us", bar="<= 15")
    with Bare("unix") as bare:
        mine, best = interleave(lambda: p50(300, PAUSE_S), lambda: bare.round_trips(300, pause=PAUSE_S), rounds)
    suite.latency(
        "pull of 4 floats, idle, p50",
        mine * 1e6,
        best * 1e6,
        "us",
        bar=1.3,
        against="bare round trip, blocking",
    )


def table(suite: Suite, cluster: wl.Cluster, rows: int, rounds: int) -> None:
    """Pull and push of random rows against a gather and an update of known row numbers, one thread."""
    rng = np.random.default_rng(1)
    t = cluster.table("t", DIM, rule=wl.RowAdagrad(lr=1e-6), init=wl.Normal(std=0.01))
    keys = _keys(rows)
    _fill(t, keys, cluster)
    out, grads = cluster.empty((BATCH, DIM)), cluster.empty((BATCH, DIM))
    grads[:] = rng.standard_normal((BATCH, DIM), dtype=np.float32)
    with wl.connect() as own:  # the limits' arrays
        flat, gathered, given = own.empty((rows, DIM)), own.empty((BATCH, DIM)), own.empty((BATCH, DIM))
        flat[:] = 0.5
        given[:] = grads
        heads = own.empty((rows, 3)).view(np.uint8).reshape(rows, 12)
        heads[:] = 0
        numbers = [rng.choice(rows, BATCH, replace=False, shuffle=True).astype(np.uint32) for _ in range(20)]
        batches = itertools.cycle([(n, keys[n]) for n in numbers])

        def pull() -> float:
            return min(seconds_of(lambda: t.pull(next(batches)[1], out=out)) for _ in range(5))

        def push() -> float:
            return min(seconds_of(lambda: t.push(next(batches)[1], grads).wait()) for _ in range(5))

        def gather() -> float:
            return min(_core.limit_gather(flat, _next(batches), gathered, True, 1) for _ in range(5))

        def update() -> float:
            return min(_core.limit_row_adagrad(flat, heads, _next(batches), given, 1) for _ in range(5))

        for name, ours, limit, bar, against in (
            ("pull", pull, gather, 0.55, "bare gather, 1 thread"),
            ("push RowAdagrad", push, update, 0.45, "bare row update, 1 thread"),
        ):
            ours()
            mine, best = interleave(ours, limit, rounds)
            suite.rate(
                f"table {name}, dim {DIM}", BATCH / mine / 1e6, BATCH / best / 1e6, "M rows/s", bar=bar, against=against
            )


def _next(batches: Any) -> Any:
    return next(batches)[0]
