"""Workers in processes of their own, which do what each line of their standard input says and answer with a line."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import windlass as wl
from windlass.bench._turns import Side, timed
from windlass.bench._work import filled

END_S = 10.0  # from the end of their input to being killed


class Crew:
    """The processes of these commands; a context manager that ends them all. Lines are JSON."""

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        self._processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,  # Ctrl-C is for us; they end with their stdin
            )
            for command in commands
        ]

    def ask(self, request: Any, count: int | None = None) -> list[Any]:
        """What each answers, or each of the first `count`; all of them work at the same time."""
        for process in self._processes[:count]:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        answers = []
        for rank, process in enumerate(self._processes[:count]):
            assert process.stdout is not None
            answer = process.stdout.readline()
            if not answer:
                raise RuntimeError(f"worker {rank} of the bench ended while it did {request}; what it said is above")
            answers.append(json.loads(answer))
        return answers

    def __enter__(self) -> "Crew":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        deadline = time.monotonic() + END_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def python(call: str, *arguments: object) -> list[str]:
    """A command that calls a function of the bench: "module.function"."""
    module, _, function = call.rpartition(".")
    code = f"from windlass.bench import {module}; {module}.{function}()"
    return [sys.executable, "-c", code, *map(str, arguments)]


def push_pulls_together(crew: Crew) -> Side:
    """A side of all workers' calls at once."""
    return lambda calls: [seconds for taken in crew.ask(calls) for seconds in taken]


def push_pull_worker() -> None:
    """What such a process does: push_pulls as often as it is told, and the seconds of each."""
    servers, rank, workers, n, sync = sys.argv[1].split(), *map(int, sys.argv[2:5]), sys.argv[5]
    with wl.connect(servers=servers, rank=rank, world_size=workers, transport="arena", sync=sync) as cluster:
        w = cluster.tensor("shared", n, rule=wl.SGD(lr=1e-6))
        grad, out = filled(cluster.empty, n), filled(cluster.empty, n)
        for line in sys.stdin:
            print(json.dumps(timed(lambda: w.push_pull(grad, out=out))(int(line))), flush=True)


def push_pull_crew(servers: Sequence[str], workers: int, n: int, sync: str) -> Crew:
    """Workers that share a tensor of n floats."""
    addresses = " ".join(servers)
    return Crew([python("_crew.push_pull_worker", addresses, rank, workers, n, sync) for rank in range(workers)])
