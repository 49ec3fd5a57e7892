"""``windlass bench train``: a small network trained by two workers, beside DistributedDataParallel and plain torch.

Workers have one thread each. A call of a side is a run of many steps.
"""

import contextlib
import itertools
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from rich.console import Console

import windlass
from windlass.bench._crew import Crew
from windlass.bench._figures import Suite
from windlass.bench._turns import Side, in_turns
from windlass.testing import Servers

MEASURED = "Medians of runs of many steps; ours and the peer take turns in the same run. Time to an accuracy: once."
WORKERS, BATCH, BATCH_SHORT = 2, 128, 8
STEPS, UNEVEN_STEPS = 20, 40
ACCURACY = 0.96
#: How each way is called, what the worker is told, and the least it should be to DDP.
WAYS: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("BSP", {"way": "bsp"}, 0.97),
    ("BSP, overlap", {"way": "bsp", "overlap": True}, 0.97),
    ("SSP(3)", {"way": "ssp:3"}, 0.97),
    ("ASP", {"way": "asp"}, 0.97),
)


def run(console: Console, rows: int, short: bool = False) -> Suite:
    """All figures. `rows` has no meaning here; short: to see that it works, not how fast."""
    del rows
    suite = Suite("train", console, MEASURED, short=short)
    batch = BATCH_SHORT if short else BATCH
    with Servers(WORKERS, kind="unix") as servers, Servers(1, kind="unix") as one, pair_of(servers, one, batch) as pair:
        step_s = beside_ddp(suite, pair, 2 if short else STEPS)
        alone(suite, pair, 2 if short else STEPS)
        uneven(suite, pair, 4 if short else UNEVEN_STEPS, step_s)
        if not short:
            to_accuracy(suite, pair, step_s)
    return suite


def beside_ddp(suite: Suite, pair: "Pair", steps: int) -> float:
    """Samples per second of two workers. Returns the seconds of a step under BSP."""
    jobs = [{"way": "ddp"}, *(job for _, job, _ in WAYS)]
    ddp, *ours = in_turns(*(pair.runs(job, steps) for job in jobs), length=suite.runs)
    for (name, _, bar), times in zip(WAYS, ours, strict=True):
        suite.rate(
            f"MNIST CNN, 2 workers, {name}",
            steps * pair.batch * WORKERS,
            "samples/s",
            times,
            ddp,
            bar=bar,
            against="DistributedDataParallel, gloo",
        )
    return ours[0].median / steps


def alone(suite: Suite, pair: "Pair", steps: int) -> None:
    """One worker with one server against torch.optim.SGD in one process."""
    sides = (pair.runs({"way": way}, steps, world=1) for way in ("bsp", "plain"))
    ours, plain = in_turns(*sides, length=suite.runs)
    suite.rate(
        "MNIST CNN, 1 worker and 1 server",
        steps * pair.batch,
        "samples/s",
        ours,
        plain,
        bar=0.95,
        against="torch.optim.SGD, as many threads",
    )


def uneven(suite: Suite, pair: "Pair", steps: int, step_s: float) -> None:
    """A quarter of the steps takes four times as long, at random in both workers."""
    sides = (pair.runs({"way": way, "slow_s": step_s}, steps) for way in ("ssp:4", "bsp"))
    ssp, bsp = in_turns(*sides, length=suite.runs)
    samples = steps * pair.batch * WORKERS
    suite.rate("uneven workers, SSP(4)", samples, "samples/s", ssp, bsp, bar=1.15, against="BSP (theory 1.25)")


def to_accuracy(suite: Suite, pair: "Pair", step_s: float) -> None:
    """The same workers, one and a half epochs of complete MNIST: seconds until the test set is right so often."""
    if not (pathlib.Path(windlass.__file__).parents[1] / "apps" / "data.py").is_file():
        suite.note(f"time to {ACCURACY:.0%}: not measured, the data's loader is in the source tree (apps/)")
        return
    ddp_s = None
    for name, way in (("DDP", "ddp"), ("BSP", "bsp"), ("SSP(4)", "ssp:4")):
        seen = pair.answers({"way": way, "slow_s": step_s, "until": ACCURACY}, 0, 0)[0]
        reached_s = seen["reached_s"]
        if way == "ddp":
            ddp_s = reached_s
        elif reached_s is not None:
            against = "" if ddp_s is None else "DistributedDataParallel, gloo"
            suite.value(f"uneven workers, {name}, time to {ACCURACY:.0%}", reached_s, "s", limit=ddp_s, against=against)
        suite.value(f"uneven workers, {name}, right at the end", 100 * seen["accuracy"], "% right")


class Pair:
    """The workers, each a process."""

    def __init__(self, crew: Crew, servers: Servers, one: Servers, batch: int) -> None:
        self.batch = batch
        self._crew = crew
        self._servers = {WORKERS: servers.addresses, 1: one.addresses}  # by the number of workers

    def answers(self, job: dict[str, Any], steps: int, run: int, world: int = WORKERS) -> list[dict[str, Any]]:
        """What each says of a job."""
        what = {"batch": self.batch, "steps": steps, "run": run, "world": world, "servers": self._servers[world]}
        return self._crew.ask({**job, **what}, world)

    def runs(self, job: dict[str, Any], steps: int, world: int = WORKERS) -> Side:
        """A side whose calls are runs of a job; the seconds are those of the slower worker."""
        numbers = itertools.count()

        def turn(calls: int) -> list[float]:
            found = [self.answers(job, steps, next(numbers), world) for _ in range(calls)]
            return [max(float(answer["seconds"]) for answer in answers) for answers in found]

        return turn


@contextlib.contextmanager
def pair_of(servers: Servers, one: Servers, batch: int) -> Iterator[Pair]:
    """The workers of these servers, and of the one server that one worker has alone; samples in a batch."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(pathlib.Path(folder) / "store")
        command = [sys.executable, "-m", "windlass.bench.train_worker"]
        with Crew([[*command, str(rank), str(WORKERS), store] for rank in range(WORKERS)]) as crew:
            yield Pair(crew, servers, one, batch)
