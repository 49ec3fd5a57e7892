"""``windlass bench sync``: what the policies of consistency cost, and what they save when workers are uneven.

Workers here take 50 ms for a step, one in eight four times as long, the same steps under every policy. What that comes
to without any communication is simulated: the theory beside our figures.
"""

import heapq
import json
import statistics
import subprocess
import sys
import time
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

import windlass as wl
from windlass import _core
from windlass.bench._figures import Suite, in_turns
from windlass.bench.core import MB
from windlass.bench.local import Worker
from windlass.testing import Servers

SERVERS, WORKERS = 2, 4
STEP_S, SLOWER, ONE_IN = 0.05, 4, 8
FLOATS = 4 * MB // 4
STEPS, RUNS = 200, 5  # with fewer, what the same draws come to is further from the long run
THEORY_STEPS = 20_000
#: The policies, the least that each should be to BSP, and what the gate is measured for.
POLICIES: tuple[tuple[wl.Sync, float | None], ...] = (
    (wl.BSP(), None),
    (wl.SSP(4), 1.35),
    (wl.ASP(), 1.5),
    (wl.MaxDelay(0.1), None),
    (wl.BSP(spare=1), None),
)
GATES = (4, 64, 1000)


def run(console: Console, rows: int, quick: bool = False) -> Suite:
    """All figures. `rows` has no meaning here; quick: to see that it works, not how fast."""
    del rows
    suite = Suite(f"windlass bench sync ({_core.isa()}, {_core.cores()} cores)", console)
    uneven(suite, 6 if quick else STEPS, 1 if quick else RUNS)
    gates(suite, 2_000 if quick else 200_000)
    in_step(suite, 2 if quick else 7)
    return suite


# -- uneven workers ----------------------------------------------------------------------------------------------------


class Pace(NamedTuple):
    """How a run went."""

    steps_per_second: float  #: of all workers: their steps by the mean of their seconds
    idle: float  #: the share of the time that they waited at gates
    staleness: list[int]  #: of every pull


def draws(rank: int, run: int, steps: int) -> NDArray[np.float64]:
    """How long each step of a worker takes: the same for every policy."""
    slow = np.random.default_rng((run, rank)).random(steps) < 1 / ONE_IN
    return np.where(slow, SLOWER * STEP_S, STEP_S)


def simulate(sync: wl.Sync, seconds: NDArray[np.float64]) -> Pace:
    """The same without communication: `seconds` of every step, (workers, steps)."""
    workers, steps = seconds.shape
    clocks, opened = [0] * workers, [0.0] * workers
    ends, waited = [0.0] * workers, 0.0
    under_way = [(float(seconds[i, 0]), i) for i in range(workers)]
    heapq.heapify(under_way)
    waiting: dict[int, float] = {}
    stale: list[int] = []
    while under_way:
        now, i = heapq.heappop(under_way)
        clocks[i] += 1
        opened[i] = waiting[i] = now
        for j in [j for j in waiting if opens(sync, j, clocks, opened, now, steps)]:
            waited += now - waiting.pop(j)
            ends[j] = now
            others = [c for k, c in enumerate(clocks) if k != j and c < steps]  # who is done is waited for no more
            stale.append(max(0, clocks[j] - min(others, default=clocks[j])))
            if clocks[j] < steps:
                heapq.heappush(under_way, (now + float(seconds[j, clocks[j]]), j))
    return Pace(workers * steps / statistics.mean(ends), waited / sum(ends), stale)


def opens(sync: wl.Sync, rank: int, clocks: list[int], opened: list[float], now: float, steps: int) -> bool:
    """Whether a pull of this worker, after its last step, need not wait."""
    clock = clocks[rank]
    behind = [(c, at) for c, at in zip(clocks, opened, strict=True) if c < clock and c < steps]
    match sync:
        case wl.BSP(spare=spare):
            return len(behind) <= spare
        case wl.SSP(staleness=staleness):
            return all(clock - c <= staleness for c, _ in behind)
        case wl.MaxDelay(seconds=seconds):
            return all(now - at <= seconds for _, at in behind)
    return True


def theory(sync: wl.Sync, steps: int) -> float:
    """Steps per second in the long run, to those of BSP."""
    seconds = np.stack([draws(rank, 0, steps) for rank in range(WORKERS)])
    return simulate(sync, seconds).steps_per_second / simulate(wl.BSP(), seconds).steps_per_second


def uneven(suite: Suite, steps: int, runs: int) -> None:
    """Workers whose steps are a sleep and a push_pull, under each policy: medians over runs that take turns."""
    seen: dict[wl.Sync, list[Pace]] = {sync: [] for sync, _ in POLICIES}
    with Servers(SERVERS, kind="unix") as servers, Crew(servers) as crew:
        for i in range(runs):
            for sync in seen:
                seen[sync].append(crew.train(sync, i, steps))
    rates = {sync: statistics.median(pace.steps_per_second for pace in paces) for sync, paces in seen.items()}
    for sync, bar in POLICIES:
        paces = seen[sync]
        alone = [
            simulate(sync, np.stack([draws(rank, i, steps) for rank in range(WORKERS)])).steps_per_second
            for i in range(runs)
        ]
        suite.absolute(
            f"{name(sync)}, {WORKERS} uneven workers",
            rates[sync],
            "steps/s",
            bar="",
            limit=statistics.median(alone),
            against="the same steps without communication",
        )
        if sync != wl.BSP():
            suite.absolute(
                f"{name(sync)} to BSP",
                rates[sync] / rates[wl.BSP()],
                "x",
                bar="" if bar is None else f">= {bar:g} x",
                limit=theory(sync, max(steps, THEORY_STEPS // 10 if runs == 1 else THEORY_STEPS)),
                against="theory, in the long run",
            )
        stale = [staleness for pace in paces for staleness in pace.staleness]
        suite.absolute(f"{name(sync)}, idle", 100 * statistics.median(pace.idle for pace in paces), "%", bar="")
        suite.absolute(f"{name(sync)}, staleness, mean", statistics.mean(stale), "iterations", bar="")
        suite.absolute(f"{name(sync)}, staleness, p99", float(np.quantile(stale, 0.99)), "iterations", bar="")


def name(sync: wl.Sync) -> str:
    """As one would write it."""
    match sync:
        case wl.BSP(spare=spare):
            return f"BSP(spare={spare})" if spare else "BSP"
        case wl.SSP(staleness=staleness):
            return f"SSP({staleness})"
        case wl.MaxDelay(seconds=seconds):
            return f"MaxDelay({seconds:g})"
    return "ASP"


class Crew:
    """Workers in processes of their own, which train as often as they are told."""

    def __init__(self, servers: Servers) -> None:
        command = [sys.executable, "-c", "from windlass.bench import sync; sync.work()", " ".join(servers.addresses)]
        self._processes = [
            subprocess.Popen(
                [*command, str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,  # Ctrl-C is for us; it ends with its stdin
            )
            for rank in range(WORKERS)
        ]

    def train(self, sync: wl.Sync, run: int, steps: int) -> Pace:
        """One run of all of them, in an app of its own."""
        self._tell(f"{sync} {run} {steps}")
        self._answers()  # all have connected
        self._tell("go")
        answers = [json.loads(answer) for answer in self._answers()]
        seconds = [answer["seconds"] for answer in answers]
        waited = sum(answer["waited"] for answer in answers)
        stale = [staleness for answer in answers for staleness in answer["staleness"]]
        return Pace(WORKERS * steps / statistics.mean(seconds), waited / sum(seconds), stale)

    def _tell(self, line: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()

    def _answers(self) -> list[str]:
        answers = [process.stdout.readline() for process in self._processes if process.stdout is not None]
        if not all(answers):
            raise RuntimeError("a worker of the bench has failed; what it said is above")
        return answers

    def __enter__(self) -> "Crew":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def work() -> None:
    """What a process of the crew does."""
    servers, rank = sys.argv[1].split(), int(sys.argv[2])
    while line := sys.stdin.readline():
        policy, run, steps = line.split()
        app = f"{policy} {run}".replace(":", " ")
        with wl.connect(servers=servers, app=app, rank=rank, world_size=WORKERS, sync=policy) as cluster:
            w = cluster.tensor("w", FLOATS, rule=wl.SGD(lr=1e-6))
            grad, out = cluster.empty(FLOATS), cluster.empty(FLOATS)
            grad[:] = 0.5
            w.pull(out=out)
            print("ready", flush=True)
            sys.stdin.readline()
            seen = []
            begun = time.perf_counter()
            for seconds in draws(rank, int(run), int(steps)):
                time.sleep(seconds)
                future = w.push_pull_async(grad, out=out)
                future.wait()
                seen.append(future.seen)
            took = time.perf_counter() - begun
        answer = {
            "seconds": took,
            "waited": sum(s.waited_seconds for s in seen),
            "staleness": [s.staleness for s in seen],
        }
        print(json.dumps(answer), flush=True)


# -- the gate and the update -------------------------------------------------------------------------------------------


def gates(suite: Suite, pulls: int) -> None:
    """A gate by itself, inside this process: what it adds to a pull."""
    for sync, _ in POLICIES:
        for workers in GATES:
            once, again = _core.time_gate(sync._spec(), workers, pulls, 5)
            suite.absolute(f"gate, {name(sync)}, {workers} workers", once, "ns per pull", bar="")
            suite.absolute(f"gate, {name(sync)}, {workers} workers, asked again", again, "ns per pull", bar="")


def in_step(suite: Suite, rounds: int) -> None:
    """BSP of two workers with registered arrays, against g = (g0 + g1) / 2; w = rule(w, g); out0 = out1 = w."""
    n, repeats, threads = 16 * MB // 4, 100, _core.cores()
    with (
        Servers(1, kind="unix") as servers,
        Worker(servers, 0, n, "bsp") as first,
        Worker(servers, 1, n, "bsp") as second,
        wl.connect() as own,
    ):
        arrays = [own.empty(n) for _ in range(5)]
        for a in arrays:
            a[:] = 0.5

        def ours() -> float:
            for worker in (first, second):
                worker.begin(repeats)
            return max(worker.seconds() for worker in (first, second)) / repeats

        def limit() -> float:
            w, g0, g1, out0, out1 = arrays
            return _core.limit_fused_sgd_of_two(w, g0, g1, out0, out1, True, threads, repeats)

        ours()
        mine, best = (statistics.median(seconds) for seconds in in_turns(ours, limit, rounds))
    suite.rate(
        "push_pull SGD 16 MB under BSP, 2 workers",
        n * 4 / mine / 1e9,
        n * 4 / best / 1e9,
        "GB/s",
        bar=0.7,
        against=f"fused loop of two gradients, {threads} thread{'s' if threads > 1 else ''}",
    )
