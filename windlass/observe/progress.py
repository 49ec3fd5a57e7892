"""How an app gets on, from one status of the scheduler after another: rates, means, and lines for people. Pure.

    status, status, status  ->  Pace.add()  ->  Summary per app  ->  line() or rows()

A status has counters since the start; what people want to know is the pace of the last seconds.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

from windlass.observe.picture import number

WINDOW_SECONDS = 10.0  # workers report once a second
WORKERS_SHOWN = 16
Rate = float | None  #: None: not known yet


@dataclasses.dataclass(frozen=True)
class Worker:
    """One of an app."""

    rank: int
    clock: int
    steps_per_second: Rate
    values: dict[str, float | None]
    left: bool = False


@dataclasses.dataclass(frozen=True)
class Summary:
    """One app, at the moment."""

    app: str
    seconds: float  #: the age of the cluster
    workers: list[Worker]  #: by rank; those that left included
    steps_per_second: Rate  #: of all workers together
    values: dict[str, float | None]  #: means over workers; None: one of them is not finite
    staleness: tuple[float, int] | None  #: of pulls: the mean, and what 99 of 100 do not exceed
    idle: Rate  #: the share of their time that workers wait at gates, estimated
    data: str = ""  #: how far leased data is


@dataclasses.dataclass(frozen=True)
class _Moment:
    seconds: float
    clocks: dict[tuple[str, int], int]  #: by app and rank
    gates: dict[str, tuple[int, float]]  #: pulls, and the seconds they waited, by app


class Pace:
    """Keeps the statuses of the last seconds, as far as rates need them."""

    def __init__(self, window_seconds: float = WINDOW_SECONDS) -> None:
        self._window = window_seconds
        self._moments: collections.deque[_Moment] = collections.deque()

    def add(self, status: dict[str, Any]) -> list[Summary]:
        """Of every app that has started, or has workers that left."""
        now = _moment(status)
        if self._moments and now.seconds < self._moments[-1].seconds:  # another scheduler
            self._moments.clear()
        self._moments.append(now)
        while len(self._moments) > 2 and now.seconds - self._moments[1].seconds >= self._window:
            self._moments.popleft()
        past = list(self._moments)
        return [_summary(status, app, past) for app in status["apps"] if app["started"] or app["left"]]


def _moment(status: dict[str, Any]) -> _Moment:
    clocks = {(x["app"], x["index"]): x["clock"] for x in status["members"] if x["role"] == "worker"}
    for app in status["apps"]:
        clocks |= {(app["name"], x["rank"]): x["clock"] for x in app["left"]}
    gates = {x["name"]: (x["sync"]["pulls"], x["sync"]["waited_seconds"]) for x in status["apps"] if x["sync"]}
    return _Moment(status["seconds"], clocks, gates)


def _summary(status: dict[str, Any], app: dict[str, Any], past: list[_Moment]) -> Summary:
    name, now = app["name"], past[-1]

    def steps(rank: int) -> Rate:
        """Since it was first seen, or for as long as is looked back."""
        then = next(moment for moment in past if (name, rank) in moment.clocks)
        seconds = now.seconds - then.seconds
        return max(0, now.clocks[name, rank] - then.clocks[name, rank]) / seconds if seconds > 0 else None

    there = [(x["index"], x, False) for x in status["members"] if x["role"] == "worker" and x["app"] == name]
    gone = [(x["rank"], x, True) for x in app["left"]]
    workers = [
        Worker(rank, x["clock"], steps(rank), x["values"], left)
        for rank, x, left in sorted([*there, *gone], key=lambda one: one[0])
    ]
    rates = [w.steps_per_second for w in workers if w.steps_per_second is not None]
    total = sum(rates) if rates else None
    sync = app["sync"]
    return Summary(
        name,
        now.seconds,
        workers,
        total,
        _means(w.values for w in workers),
        (sync["staleness_mean"], sync["staleness_p99"]) if sync else None,
        None if total is None else _idle(name, total / len(rates), past),
        "; ".join(_data(x) for x in status["leases"] if x["app"] == name),
    )


def _means(all_values: Iterable[dict[str, float | None]]) -> dict[str, float | None]:
    seen: dict[str, list[float | None]] = {}
    for name, value in itertools.chain.from_iterable(values.items() for values in all_values):
        seen.setdefault(name, []).append(value)
    finite = {name: [v for v in values if v is not None] for name, values in seen.items()}
    return {n: sum(finite[n]) / len(values) if len(finite[n]) == len(values) else None for n, values in seen.items()}


def _idle(app: str, steps_per_worker: float, past: list[_Moment]) -> Rate:
    """The pulls of a step wait at the same time: what one waits is what the step does."""
    counted = [moment.gates[app] for moment in past if app in moment.gates]
    if not counted or counted[-1][0] <= counted[0][0]:
        return None
    (pulls_then, waited_then), (pulls, waited) = counted[0], counted[-1]
    return min(1.0, max(0.0, waited - waited_then) / (pulls - pulls_then) * steps_per_worker)


def _data(ledger: dict[str, Any]) -> str:
    """How far leased data is; epochs are counted from 1 here."""
    epoch, epochs, again = ledger["epoch"], ledger["epochs"], ledger["duplicates"]
    at = f"epoch {epoch + 1} of {epochs}, {100 * ledger['done'] / ledger['ranges']:.0f} %"
    return f"{ledger['name']}: {at if epoch < epochs else 'done'}{f', {again} samples twice' if again else ''}"


# -- for people --------------------------------------------------------------------------------------------------------


def line(summary: Summary) -> str:
    """All of an app in one line."""
    parts = [f"{summary.seconds:.0f} s", *facts(summary), clocks(summary.workers)]
    where = "" if summary.app == "default" else f" {summary.app}"
    return f"[progress{where}] {', '.join(part for part in parts if part)}"


def facts(summary: Summary) -> list[str]:
    """What is known of the app as a whole."""
    known = [] if summary.steps_per_second is None else [f"{summary.steps_per_second:.1f} steps/s"]
    known += [f"{name} {number(value)}" for name, value in summary.values.items()]
    if summary.staleness is not None:
        known.append("staleness {:.2f} (p99 {})".format(*summary.staleness))
    if summary.idle is not None:
        known.append(f"idle {100 * summary.idle:.0f} %")
    return [*known, summary.data] if summary.data else known


def clocks(workers: list[Worker]) -> str:
    """Of each worker, by rank."""
    if not workers:
        return "no worker yet"
    shown = " ".join(str(w.clock) for w in workers[:WORKERS_SHOWN])
    more = f" and {len(workers) - WORKERS_SHOWN} more" if len(workers) > WORKERS_SHOWN else ""
    return f"clock{'s' if len(workers) > 1 else ''} {shown}{more}"


def rows(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Workers as a table: its columns, and a row for each."""
    names = list(summary.values)
    made = []
    for worker in summary.workers[:WORKERS_SHOWN]:
        rate = "" if worker.steps_per_second is None else f"{worker.steps_per_second:.1f}"
        values = [number(worker.values[name]) if name in worker.values else "" for name in names]
        made.append([str(worker.rank), str(worker.clock), "done" if worker.left else rate, *values])
    return ["worker", "clock", "steps/s", *names], made
