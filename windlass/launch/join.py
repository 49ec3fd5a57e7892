"""`windlass join`: a task of Slurm or MPI is a server or a worker of its job's cluster, until that ends.

What a task is, and how it finds the others, is in joining.py. Here are its processes: in the first task the scheduler
and a server, in further ones a server, in the others the script, which is started again where it dies.

A signal that asks for the end is passed on to them, and they get SAVE_SECONDS for a last checkpoint. With --requeue the
signals that `#SBATCH --signal` may send ahead of the end count, too, and the first task has Slurm start the job again.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from windlass._errors import Closed, InvalidArgument, WindlassError
from windlass._net.address import bound_to
from windlass._net.tls import client_tls
from windlass._settings import SAVE_SECONDS, Settings
from windlass.launch import CANNOT_BEGIN, GROUP_LOST, WORKERS_LOST
from windlass.launch.child import Child, describe, die_with
from windlass.launch.children import Children
from windlass.launch.joining import UNFINISHED, Joining
from windlass.launch.output import show
from windlass.launch.task import find_task
from windlass.observe.operator import Operator

_ASK_SECONDS = 2.0
_END_SECONDS = 2.0  # from being asked to end to being ended
_AFTER_SAVE_SECONDS = 5.0
_SCONTROL_SECONDS = 30.0
_EARLY = (signal.SIGUSR1, signal.SIGUSR2)  # what `#SBATCH --signal` may send ahead of the end
_STATE = re.compile(r"\bJobState=(\S+)")


class _Processes(Children):
    """Those of a task. Signals that ask for the end are passed on to them."""

    def __init__(self, joining: Joining, *, verbose: bool) -> None:
        super().__init__(verbose)
        self._joining = joining
        self._operator: Operator | None = None
        self._told: list[signal.Signals] = []  # signals that are yet to be passed on
        self._ends_at: float | None = None  # since the first of them: when whatever still runs is ended

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number not in _EARLY or self._joining.requeues:  # else they are a script's own matter
            self._told.append(signal.Signals(number))

    def taking_signals(self, *, ours: bool) -> contextlib.AbstractContextManager[None]:
        """ours: the process is `windlass join`; else only what nobody else handles is taken."""
        if threading.current_thread() is not threading.main_thread():
            return contextlib.nullcontext()
        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *_EARLY)
        asking = (signal.SIGTERM, signal.SIGHUP)
        return self.signals(caught if ours else [one for one in asking if signal.getsignal(one) is signal.SIG_DFL])

    @property
    def was_told(self) -> bool:
        """Whether somebody asked for the end."""
        return self._ends_at is not None

    def _start(
        self, role: str, index: int, command: Sequence[str], environment: Mapping[str, str], fds: Sequence[int] = ()
    ) -> Child:
        child = Child(
            role,
            index,
            command,
            {name: value for name, value in (os.environ | environment).items() if value or name not in environment},
            log_dir=self._joining.settings.log_dir,
            append=True,
            pass_fds=fds,
            dies_with_us=role == "worker",
            ignored=_EARLY if role != "worker" or self._joining.requeues else (),
        )
        self._add(child)
        return child

    def _look(self) -> None:
        """Waits for something to happen, and passes signals on."""
        waits = [child.due_seconds for child in self._running()]
        if self._ends_at is not None:
            waits.append(max(0.0, self._ends_at - time.monotonic()))
        self._turn(min((seconds for seconds in waits if seconds is not None), default=None))
        while self._told:
            self._pass_on(self._told.pop(0))
        if self._ends_at is not None and time.monotonic() >= self._ends_at:
            for child in self._running():
                child.signal(signal.SIGKILL)
            self._ends_at = time.monotonic() + _END_SECONDS

    def _pass_on(self, number: signal.Signals) -> None:
        if self._ends_at is None:
            saves = number != signal.SIGINT and self._joining.settings.checkpoint_dir is not None
            self._ends_at = time.monotonic() + (SAVE_SECONDS + _AFTER_SAVE_SECONDS if saves else _END_SECONDS)
            if self._joining.task.index == 0:
                say(f"{number.name}: {'takes a checkpoint and ends' if saves else 'ends'}")
        for child in self._running():
            child.signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
            child.signal(signal.SIGCONT)

    def _give_up(self, why: str) -> None:
        """Ends the cluster, if it can be told to: without us the others could only wait."""
        if self._operator is not None:
            with contextlib.suppress(WindlassError, OSError):
                self._operator.stop(why, _ASK_SECONDS, failed=True)

    def _has_begun(self) -> bool | None:
        """Whether all workers have come once; None: nobody says so."""
        status, app = self._status(), self._joining.settings.app
        return None if status is None else any(one["view"] > 0 for one in status["apps"] if one["name"] == app)

    def _status(self) -> dict[str, Any] | None:
        from windlass.observe.status import fetch  # few runs need it

        if self._operator is None:
            return None
        tls = client_tls(self._joining.settings.tls_ca)
        try:
            return dict(json.loads(fetch(self._operator.address, self._joining.token, tls, timeout=_ASK_SECONDS)))
        except (WindlassError, OSError):
            return None

    def close(self) -> None:
        """Leaves nothing behind."""
        for child in self._running():
            child.close_stdin()
            child.signal(signal.SIGTERM)
            child.signal(signal.SIGCONT)
        self._until_ended("", _END_SECONDS)
        self._close()
        if self._operator is not None:
            self._operator.close()


class _ServerTask(_Processes):
    """A server, and in the first task the scheduler."""

    _cannot_begin = False

    def run(self, command: Sequence[str]) -> int:
        """Until the cluster ends. The exit code: the scheduler's, in the first task; else the server's."""
        joining, task = self._joining, self._joining.task
        role = [sys.executable, "-m", "windlass.launch.roles"]
        first = task.index == 0
        if first:
            with joining.listen() as listener:
                address = bound_to(listener)
                os.set_inheritable(listener.fileno(), True)
                fd = listener.fileno()
                environment = joining.scheduler_environment(str(address)) | {"WINDLASS_LISTEN_FD": str(fd)}
                if task.restarts:
                    where = "from the last checkpoint" if environment["WINDLASS_RESUME"] else "from the beginning"
                    say(f"{task.engine} has started this job again ({task.restarts}): it begins {where}")
                scheduler = self._start("scheduler", 0, [*role, "scheduler"], environment, [fd])
            servers = f"{joining.settings.servers} of {task.count} tasks are servers"
            say(f"{task.engine}: {servers}; the scheduler is at {address}")
        else:
            self._operator = joining.meet(lambda: bool(self._told))
            address = self._operator.address
        server = self._start("server", task.index, [*role, "server"], joining.server_environment(address, command))
        while self._running("scheduler" if first else "server"):
            self._look()
        if first:  # its word to the server is on the way
            self._wait_for(
                "server", SAVE_SECONDS if joining.settings.checkpoint_dir is not None else _AFTER_SAVE_SECONDS
            )
        code = (scheduler.code if first else None) or (server.code if self._cannot_begin or not first else None) or 0
        return code if code >= 0 else 128 - code

    def _ended(self, child: Child) -> None:
        child.pass_on_rest()
        if child.code == 0 or self.was_told:
            return
        if child.role == "scheduler" and child.code == WORKERS_LOST:
            say("the scheduler ended: workers were lost and not replaced; the others are done")
            return
        say(f"{child.name} ended with {describe(child.code or 0)}")
        self._cannot_begin |= child.code == CANNOT_BEGIN
        if child.code == CANNOT_BEGIN or self._has_begun() is False:
            self._give_up(f"{child.name} ended with {describe(child.code or 0)}")
        if child.code == CANNOT_BEGIN:
            for other in self._running("scheduler"):
                other.close_stdin()


class _WorkerTask(_Processes):
    """A worker's script, started again when it dies."""

    def __init__(self, joining: Joining, command: Sequence[str], *, restarts: int, verbose: bool) -> None:
        super().__init__(joining, verbose=verbose)
        self._command = command
        self._restarts = restarts
        self._starts = 0
        self._environment: dict[str, str] = {}
        loss = joining.settings.on_worker_loss
        if restarts and joining.settings.sources["on_worker_loss"] == "default":
            loss = "wait"  # or the others would be done without it before it is back
        self._on_worker_loss = loss

    def run(self) -> int:
        """Until the script has ended for good. Its exit code."""
        self._operator = self._joining.meet(lambda: bool(self._told))
        self._environment = self._joining.worker_environment(
            self._operator.address, on_worker_loss=self._on_worker_loss
        )
        self._start_script()
        while self._running():
            self._look()
        code = self._children[-1].code or 0
        return code if code >= 0 else 128 - code

    def _start_script(self) -> None:
        self._starts += 1
        try:
            self._start("worker", self._joining.rank, self._command, self._environment)
        except OSError as error:
            self._give_up(f"worker {self._joining.rank}: {self._command[0]}: {error.strerror}")
            raise InvalidArgument(f"windlass join: {self._command[0]}: {error.strerror}") from error

    def _ended(self, child: Child) -> None:
        child.pass_on_rest()
        if child.code == 0 or self.was_told or self._told:
            return
        how = f"{child.name} ended with {describe(child.code or 0)}"
        if child.code != GROUP_LOST and self._starts <= self._restarts and self._can_go_on():
            say(f"{how}; start {self._starts} of {self._restarts} in its place")
            self._start_script()
            return
        say(how)
        if self._others_wait(child):
            self._give_up(f"{how}, and is not started again")

    def _can_go_on(self) -> bool:
        """Whether another start could do better: not if the cluster has ended, or a server is lost."""
        status = self._status()
        return self._operator is not None and not self._operator.over and not (status or {}).get("servers_lost")

    def _others_wait(self, child: Child) -> bool:
        """Whether the others could only wait for this worker: before its app has begun, or because they are to."""
        return child.code == GROUP_LOST or self._on_worker_loss == "wait" or self._has_begun() is False


def run(
    settings: Settings,
    command: Sequence[str],
    *,
    host: str | None,
    worker_restarts: int,
    requeue: bool,
    resume: str | None,
    verbose: bool,
) -> int:
    """What this task is by its environment, until it is over. Its exit code."""
    joining = Joining(settings, find_task(os.environ, host), requeue=requeue, resume=resume)
    if settings.log_dir is not None:
        settings.log_dir.mkdir(parents=True, exist_ok=True)
    die_with(os.getppid(), signal.SIGTERM)()  # a launcher that is killed tells nobody
    try:
        if joining.is_worker:
            worker = _WorkerTask(joining, command, restarts=worker_restarts, verbose=verbose)
            with worker.taking_signals(ours=True), contextlib.closing(worker):
                return worker.run()
        server = _ServerTask(joining, verbose=verbose)
        with server.taking_signals(ours=True), contextlib.closing(server):
            code = server.run(command)
    except Closed:
        return 128 + signal.SIGTERM
    if requeue and joining.task.index == 0 and (server.was_told or code == UNFINISHED):
        _start_again(str(joining.task.job))
    return code


def serve(joining: Joining) -> int:
    """For a process that is a server's task and more than that. The exit code that the task would have."""
    server = _ServerTask(joining, verbose=False)
    with server.taking_signals(ours=False), contextlib.closing(server):
        return server.run([])


def say(text: str) -> None:
    """To whoever reads what the job prints."""
    show(f"windlass join: {text}", sys.stderr)


def _start_again(job: str) -> None:
    """Unless Slurm does so itself, or somebody has cancelled the job."""
    try:
        state = _scontrol("show", "job", job, "--oneliner")
        if (match := _STATE.search(state)) is None or match[1] != "RUNNING":
            say(f"job {job} is not started again: its state is {'unknown' if match is None else match[1]}")
            return
        say(f"Slurm is asked to start job {job} again, which will go on from its last checkpoint")
        _scontrol("requeue", job)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        say(f"job {job} is not started again: scontrol: {said}")


def _scontrol(*arguments: str) -> str:
    command = ["scontrol", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_SECONDS, check=True)
    return done.stdout
