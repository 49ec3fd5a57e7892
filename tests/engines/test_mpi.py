"""`windlass join` under Open MPI's mpirun: on this host, and with two daemons that take this host for two.

Run by `make test-slurm`, which installs Open MPI.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from engine_scripts import JOIN, PYTHON, await_none_with, processes_with, write_scripts
from helpers import PATIENCE_S

pytestmark = pytest.mark.skipif("mpi" not in os.environ.get("ENGINES", ""), reason="needs Open MPI: make test-slurm")
OPTIONS = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
MARK = "ENGINE_TEST"


class MPI:
    """Runs mpirun in a folder; ends what it has started."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.mark = f"{os.getpid()}-{folder.name}"
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        own = {name: value for name, value in os.environ.items() if not name.startswith(("WINDLASS", "SLURM", "OMPI"))}
        with (self.folder / "output").open("w") as output:
            process = subprocess.Popen(
                ["mpirun", *OPTIONS, *arguments],
                env={**own, MARK: self.mark, "WINDLASS_TOKEN": "of tests", "WINDLASS_START_TIMEOUT": "300"}
                | environment,
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """The exit code, and what was printed."""
        code = self.start(*arguments, **environment).wait(PATIENCE_S)
        return code, self.output()

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def until(self, text: str, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.output().count(text) < count:
            assert self._started[-1].poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.1)

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
        for pid in processes_with(MARK, self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def mpi(tmp_path: pathlib.Path) -> Iterator[MPI]:
    if shutil.which("mpirun") is None:
        raise RuntimeError("there is no mpirun: `make test-slurm` installs openmpi-bin")
    write_scripts(tmp_path)
    made = MPI(tmp_path)
    yield made
    made.close()


def test_ranks_train_and_a_worker_that_is_killed_is_replaced(mpi: MPI):
    join = [*JOIN.split(), "--servers", "1", "--worker-restarts", "3", "--", PYTHON, "train.py", "20", "die"]
    code, said = mpi.run("-n", "3", *join)
    assert code == 0, said
    assert "Open MPI: 1 of 3 tasks are servers; the scheduler is at tcp://127.0.0.1:" in said
    assert "worker 1 ended with signal SIGKILL; start 1 of 3 in its place" in said
    assert "42 from 2 workers on ['127.0.0.1']" in said


def test_ranks_on_two_hosts_meet_at_the_address_of_mpirun(mpi: MPI):
    """The remote shell runs its command here, so there are two daemons and each takes itself for a host."""
    shell = mpi.folder / "shell"
    shell.write_text('#!/bin/sh\nshift\nexec /bin/sh -c "$*"\n')
    shell.chmod(0o755)
    hosts = ["--mca", "plm", "rsh", "--mca", "plm_rsh_agent", str(shell), "--host", "localhost:2,elsewhere:2"]
    hosts += ["-x", "WINDLASS_TOKEN", "-x", "WINDLASS_START_TIMEOUT"]
    code, said = mpi.run(*hosts, "-n", "4", *JOIN.split(), "--servers", "3", "--", PYTHON, "train.py", "5", "plainly")
    assert code == 0, said
    assert "6 from 1 workers on" in said
    assert "the scheduler is at tcp://127.0.0.1" not in said


def test_too_few_ranks_say_how_many_are_needed(mpi: MPI):
    code, said = mpi.run("-n", "2", *JOIN.split(), "--servers", "2", "--", PYTHON, "train.py", "5", "plainly")
    assert code == 2
    assert "Open MPI started 2 tasks; with --servers 2 at least 3 are needed" in " ".join(said.replace("│", "").split())


def test_when_mpirun_is_killed_nothing_is_left(mpi: MPI):
    process = mpi.start("-n", "3", *JOIN.split(), "--servers", "1", "--", PYTHON, "train.py", "1000000", "slow")
    mpi.until("trains", 2)
    assert len(processes_with(MARK, mpi.mark)) >= 7
    process.kill()
    await_none_with(MARK, mpi.mark)


def test_many_workers_that_leave_together_leave_in_peace(mpi: MPI, accurate: bool):
    count = 48 if accurate else 8
    code, said = mpi.run("-n", str(count + 1), PYTHON, "crowd.py")
    assert code == 0, said
    assert (said.count(f"left {3 * count}"), said.count("served")) == (count, 1)
