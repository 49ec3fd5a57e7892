"""``windlass bench sync``: what the policies of consistency cost, and what they save when workers are uneven.

Workers here take 50 ms for a step, one in eight four times as long, the same steps under every policy. What that comes
to without any communication is simulated: the theory beside our figures.
"""

import heapq
import itertools
import json
import statistics
import sys
import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

import windlass as wl
from windlass import _core
from windlass.bench import _native
from windlass.bench._crew import Crew, push_pull_crew, push_pulls_together, python
from windlass.bench._figures import MEASURED, Suite
from windlass.bench._turns import Side, Times, in_turns, scatter
from windlass.bench._work import MB, filled, own_arrays, threads_of
from windlass.testing import Servers

SERVERS, WORKERS = 2, 4
STEP_S, SLOWER, ONE_IN = 0.05, 4, 8
FLOATS = 4 * MB // 4
STEPS = 200  # with fewer, what the same draws come to is further from the long run
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
GATE_REPLAYS = 9


def run(console: Console, rows: int, short: bool = False) -> Suite:
    """All figures. `rows` has no meaning here; short: to see that it works, not how fast."""
    del rows
    suite = Suite("sync", console, f"{MEASURED} Of uneven workers: medians of whole runs.", short=short)
    uneven(suite, 6 if short else STEPS)
    gates(suite, 2_000 if short else 200_000)
    in_step(suite)
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


def uneven(suite: Suite, steps: int) -> None:
    """Workers whose steps are a sleep and a push_pull, under each policy: a call is a run of all their steps."""
    seen: dict[wl.Sync, list[Pace]] = {sync: [] for sync, _ in POLICIES}
    with Servers(SERVERS, kind="unix") as servers, crew_of(servers.addresses) as crew:
        times = in_turns(*(_runs(crew, sync, steps, seen[sync]) for sync in seen), length=suite.runs)
    taken = dict(zip(seen, times, strict=True))
    for sync, bar in POLICIES:
        alone = Times(tuple((WORKERS * steps / _pace_alone(sync, i, steps),) for i in range(len(seen[sync]))))
        suite.rate(
            f"{name(sync)}, {WORKERS} uneven workers",
            WORKERS * steps,
            "steps/s",
            taken[sync],
            alone,
            against="the same steps without communication",
        )
        if sync != wl.BSP():
            ratios = [b / a for a, b in zip(taken[sync].medians, taken[wl.BSP()].medians, strict=True)]
            suite.value(
                f"{name(sync)} to BSP",
                taken[wl.BSP()].median / taken[sync].median,
                "x",
                noise=scatter(ratios),
                calls=len(ratios),
                value_bar=bar,
                limit=theory(sync, max(steps, THEORY_STEPS // 10 if suite.short else THEORY_STEPS)),
                against="theory, in the long run",
            )
        stale = [staleness for pace in seen[sync] for staleness in pace.staleness]
        idle = [100 * pace.idle for pace in seen[sync]]
        suite.value(f"{name(sync)}, idle", statistics.median(idle), "% idle", noise=scatter(idle), calls=len(idle))
        suite.value(f"{name(sync)}, staleness, mean", statistics.mean(stale), "iterations", calls=len(stale))
        suite.value(f"{name(sync)}, staleness, p99", float(np.quantile(stale, 0.99)), "iterations", calls=len(stale))


def _runs(crew: Crew, sync: wl.Sync, steps: int, seen: list[Pace]) -> Side:
    """A side whose calls are runs, one after the other with the same draws for every policy."""
    numbers = itertools.count()

    def turn(calls: int) -> list[float]:
        paces = [train(crew, sync, next(numbers), steps) for _ in range(calls)]
        seen.extend(paces)
        return [WORKERS * steps / pace.steps_per_second for pace in paces]

    return turn


def _pace_alone(sync: wl.Sync, run: int, steps: int) -> float:
    seconds = np.stack([draws(rank, run, steps) for rank in range(WORKERS)])
    return simulate(sync, seconds).steps_per_second


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


def crew_of(servers: list[str]) -> Crew:
    """Workers in processes of their own, which train as often as they are told."""
    return Crew([python("sync.work", " ".join(servers), rank) for rank in range(WORKERS)])


def train(crew: Crew, sync: wl.Sync, run: int, steps: int) -> Pace:
    """One run of all of them, in an app of its own."""
    crew.ask({"policy": str(sync), "run": run, "steps": steps})  # all have connected
    answers = crew.ask("go")
    seconds = [answer["seconds"] for answer in answers]
    waited = sum(answer["waited"] for answer in answers)
    stale = [staleness for answer in answers for staleness in answer["staleness"]]
    return Pace(WORKERS * steps / statistics.mean(seconds), waited / sum(seconds), stale)


def work() -> None:
    """What a process of the crew does."""
    servers, rank = sys.argv[1].split(), int(sys.argv[2])
    while line := sys.stdin.readline():
        told = json.loads(line)
        policy, run, steps = told["policy"], told["run"], told["steps"]
        app = f"{policy} {run}".replace(":", " ")
        with wl.connect(servers=servers, app=app, rank=rank, world_size=WORKERS, sync=policy) as cluster:
            w = cluster.tensor("w", FLOATS, rule=wl.SGD(lr=1e-6))
            grad, out = filled(cluster.empty, FLOATS), cluster.empty(FLOATS)
            w.pull(out=out)
            print(json.dumps("ready"), flush=True)
            sys.stdin.readline()
            seen = []
            begun = time.perf_counter()
            for seconds in draws(rank, run, steps):
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
    """A gate by itself, inside this process: what it adds to a pull. A call replays many pulls."""
    for sync, _ in POLICIES:
        for workers in GATES:
            times = _native.time_gate(sync._spec(), workers, pulls, 1 + GATE_REPLAYS)
            for more, seconds in zip(("", ", asked again"), times, strict=True):
                once = Times(tuple((each,) for each in seconds[1:]))
                name_of_gate = f"gate, {name(sync)}, {workers} workers{more}"
                suite.value(name_of_gate, once.median * 1e9, "ns", noise=scatter(once.medians), calls=once.calls)


def in_step(suite: Suite) -> None:
    """BSP of two workers with registered arrays, against g = (g0 + g1) / 2; w = rule(w, g); out0 = out1 = w."""
    size_bytes, threads = 16 * MB, _core.cores()
    n = size_bytes // 4
    with (
        Servers(1, kind="unix") as servers,
        push_pull_crew(servers.addresses, 2, n, "bsp") as crew,
        own_arrays() as own,
    ):
        w, g0, g1, out0, out1 = (filled(own, n) for _ in range(5))
        ours, limit = in_turns(
            push_pulls_together(crew),
            lambda calls: _native.limit_fused_sgd_of_two(w, g0, g1, out0, out1, True, threads, calls),
            length=suite.length,
        )
    suite.rate(
        "push_pull SGD 16 MB under BSP, 2 workers",
        size_bytes / 1e9,
        "GB/s",
        ours,
        limit,
        bar=0.7,
        against=f"fused loop of two gradients, {threads_of(threads)}",
    )
