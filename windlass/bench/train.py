"""``windlass bench train``: a small network trained by two workers, beside DistributedDataParallel and plain torch.

Workers have one thread each. Everything is measured in turns, several times, and medians are shown.
"""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Any

from rich.console import Console

import windlass
from windlass import _core
from windlass.bench._figures import Suite
from windlass.testing import Servers

WORKERS, BATCH = 2, 128
STEPS, UNEVEN_STEPS, ROUNDS = 20, 40, 5
ACCURACY = 0.96
#: How each way is called, what the worker is told, and the least it should be to DDP.
WAYS: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("BSP", {"way": "bsp"}, 0.97),
    ("BSP, overlap", {"way": "bsp", "overlap": True}, 0.97),
    ("SSP(3)", {"way": "ssp:3"}, 0.97),
    ("ASP", {"way": "asp"}, 0.97),
)


def run(console: Console, rows: int, quick: bool = False) -> Suite:
    """All figures. `rows` has no meaning here; quick: to see that it works, not how fast."""
    del rows
    suite = Suite(f"windlass bench train ({_core.isa()}, {_core.cores()} cores)", console)
    rounds = 1 if quick else ROUNDS
    with Servers(WORKERS, kind="unix") as servers, Servers(1, kind="unix") as one, Pair(servers, one) as pair:
        step_s = beside_ddp(suite, pair, 2 if quick else STEPS, rounds)
        alone(suite, pair, 2 if quick else STEPS, rounds)
        uneven(suite, pair, 4 if quick else UNEVEN_STEPS, rounds, step_s)
        if not quick:
            to_accuracy(suite, pair, console, step_s)
    return suite


def beside_ddp(suite: Suite, pair: "Pair", steps: int, rounds: int) -> float:
    """Samples per second of two workers. Returns the seconds of a step under BSP."""
    seconds: dict[str, list[float]] = {name: [] for name, _, _ in (("DDP", {}, 0.0), *WAYS)}
    for i in range(rounds):
        seconds["DDP"].append(pair.seconds({"way": "ddp"}, steps, i))
        for name, job, _ in WAYS:
            seconds[name].append(pair.seconds(job, steps, i))
    samples = steps * BATCH * WORKERS
    rates = {name: samples / statistics.median(taken) for name, taken in seconds.items()}
    for name, _, bar in WAYS:
        suite.rate(
            f"MNIST CNN, 2 workers, {name}",
            rates[name],
            rates["DDP"],
            "samples/s",
            bar=bar,
            against="DistributedDataParallel, gloo",
        )
    return statistics.median(seconds["BSP"]) / steps


def alone(suite: Suite, pair: "Pair", steps: int, rounds: int) -> None:
    """One worker with one server against torch.optim.SGD in one process."""
    plain, ours = [], []
    for i in range(rounds):
        plain.append(pair.seconds({"way": "plain"}, steps, i, world=1))
        ours.append(pair.seconds({"way": "bsp"}, steps, i, world=1))
    suite.rate(
        "MNIST CNN, 1 worker and 1 server",
        steps * BATCH / statistics.median(ours),
        steps * BATCH / statistics.median(plain),
        "samples/s",
        bar=0.95,
        against="torch.optim.SGD, as many threads",
    )


def uneven(suite: Suite, pair: "Pair", steps: int, rounds: int, step_s: float) -> None:
    """A quarter of the steps takes four times as long, at random in both workers."""
    bsp, ssp = [], []
    for i in range(rounds):
        bsp.append(pair.seconds({"way": "bsp", "slow_s": step_s}, steps, i))
        ssp.append(pair.seconds({"way": "ssp:4", "slow_s": step_s}, steps, i))
    samples = steps * BATCH * WORKERS
    suite.rate(
        "uneven workers, SSP(4)",
        samples / statistics.median(ssp),
        samples / statistics.median(bsp),
        "samples/s",
        bar=1.15,
        against="BSP (theory 1.25)",
    )


def to_accuracy(suite: Suite, pair: "Pair", console: Console, step_s: float) -> None:
    """The same workers, one and a half epochs of complete MNIST: seconds until the test set is right so often."""
    if not (pathlib.Path(windlass.__file__).parents[1] / "apps" / "data.py").is_file():
        console.print("[dim]time to 96 %: not measured, the data's loader is in the source tree (apps/)[/dim]")
        return
    for name, way in (("DDP", "ddp"), ("BSP", "bsp"), ("SSP(4)", "ssp:4")):
        seen = pair.answers({"way": way, "slow_s": step_s, "until": ACCURACY}, 0, 0)[0]
        if seen["reached_s"] is not None:
            suite.absolute(f"uneven workers, {name}, time to {ACCURACY:.0%}", seen["reached_s"], "s", bar="")
        suite.absolute(f"uneven workers, {name}, right at the end", 100 * seen["accuracy"], "%", bar="")


class Pair:
    """The workers, each a process."""

    def __init__(self, servers: Servers, one: Servers) -> None:
        self._servers = {WORKERS: servers.addresses, 1: one.addresses}  # by the number of workers
        self._folder = tempfile.TemporaryDirectory()
        store = str(pathlib.Path(self._folder.name) / "store")
        command = [sys.executable, "-m", "windlass.bench.train_worker"]
        self._workers = [
            subprocess.Popen(
                [*command, str(rank), str(WORKERS), store],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,  # Ctrl-C is for us; they end with their stdin
            )
            for rank in range(WORKERS)
        ]

    def answers(self, job: dict[str, Any], steps: int, run: int, world: int = WORKERS) -> list[dict[str, Any]]:
        """What each says of a job."""
        line = json.dumps({**job, "steps": steps, "run": run, "world": world, "servers": self._servers[world]})
        for worker in self._workers[:world]:
            assert worker.stdin is not None
            worker.stdin.write(line + "\n")
            worker.stdin.flush()
        found = []
        for worker in self._workers[:world]:
            assert worker.stdout is not None
            answer = worker.stdout.readline()
            if not answer:
                raise RuntimeError(f"a worker of the benchmark ended while it did {line}")
            found.append(json.loads(answer))
        return found

    def seconds(self, job: dict[str, Any], steps: int, run: int, world: int = WORKERS) -> float:
        """Of the slower one."""
        return float(max(answer["seconds"] for answer in self.answers(job, steps, run, world)))

    def __enter__(self) -> "Pair":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in self._workers:
            try:
                worker.wait(10.0)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
            assert worker.stdout is not None
            worker.stdout.close()
        self._folder.cleanup()
