"""A cluster in processes of its own, scheduler included, to be watched, stopped and killed."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import windlass
from windlass._net.address import Address, bound_to
from windlass._net.address import listen as listen_on
from windlass.observe.operator import Operator
from windlass.observe.status import fetch

EXIT_S = 5.0  # from being asked to end to SIGKILL
STATUS_S = 60.0  # for a scheduler on a busy machine to begin and to answer
_BACKLOG = 1024


class Process:
    """One process. Its output goes to a file without a name, which never blocks it; it ends when we do."""

    def __init__(self, command: list[str], environment: Mapping[str, str], pass_fds: list[int] | None = None) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (open for as long as the process is known)
        own = {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}
        own |= {name: os.environ[name] for name in ("WINDLASS_BREAK", "WINDLASS_ISA") if name in os.environ}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**own, **environment},
            process_group=0,
            pass_fds=pass_fds or [],
        )

    @property
    def pid(self) -> int:
        """Its number."""
        return self.process.pid

    def output(self) -> str:
        """What it has printed."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")

    def kill(self) -> None:
        """With SIGKILL; waits until it is gone."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """With SIGSTOP; waits until it stands."""
        os.kill(self.pid, signal.SIGSTOP)
        until(lambda: _state(self.pid) in "TZ", "the process stands", 5.0)

    def cont(self) -> None:
        """Lets it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def wait(self, timeout: float) -> int:
        """Its exit code."""
        return self.process.wait(timeout)

    def close(self) -> None:
        """Ends it, and what it forked."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        for number in (signal.SIGCONT, signal.SIGTERM):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
        try:
            self.process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._output.close()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(true: Callable[[], Any], what: str, seconds: float) -> float:
    """Waits until it is true; returns how long that took."""
    begun = time.monotonic()
    while not true():
        if time.monotonic() - begun > seconds:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.005)
    return time.monotonic() - begun


class LocalCluster:
    """A scheduler and servers on loopback; a context manager that ends them all.

    ::

        with LocalCluster(servers=2) as cluster, cluster.connect() as worker:
            ...
            cluster.servers[1].kill()

    Workers are this process (``connect()``) or processes of their own (``worker(code, rank, world_size)``).
    settings: as in a file of settings, by name. keeps: the scheduler has a journal, and restart_scheduler() starts
    another on the same port. prelude: Python code that the scheduler runs first, to show what a flaw in it does.
    """

    def __init__(
        self,
        servers: int = 2,
        *,
        token: str = "a token of tests",
        config: str = "",
        prelude: str = "",
        keeps: bool = False,
        **settings: Any,
    ) -> None:
        self.token = token
        self._prelude = prelude
        self.servers: list[Process] = []
        self.workers: list[Process] = []
        self._schedulers: list[Process] = []  # that were killed
        self.address = ""
        self._count = servers
        self._config = config
        self._keeps = Path(tempfile.mkdtemp(prefix="windlass-")) if keeps else None  # where the journal is
        self._listener: socket.socket | None = None
        self._settings = {"linger": True, "failure_timeout": 2.0, **settings}

    def __enter__(self) -> "LocalCluster":
        _started.add(self)
        try:
            listener = self._listener = listen_on(Address.parse("tcp://127.0.0.1:0"), _BACKLOG)
            self.address = str(bound_to(listener))
            self.start_scheduler(listener.fileno())
            if self._keeps is None:
                listener.close()
            for i in range(self._count):
                self.servers.append(self.start_server(i))
        except BaseException:
            self.close()
            raise
        return self

    def environment(self, **more: str) -> dict[str, str]:
        """For processes of the cluster."""
        settings = {f"WINDLASS_{name.upper()}": str(value) for name, value in self._settings.items()}
        return settings | {"WINDLASS_ADDRESS": self.address, "WINDLASS_TOKEN": self.token} | more

    def start_scheduler(self, listen_fd: int) -> None:
        """On a socket that listens."""
        os.set_inheritable(listen_fd, True)
        more = {"WINDLASS_LISTEN_FD": str(listen_fd), "WINDLASS_SERVERS": str(self._count)}
        if self._keeps is not None:
            more["WINDLASS_STATE"] = str(self.state)
        if self._config:
            with tempfile.NamedTemporaryFile("w", suffix=".toml", delete=False) as file:
                file.write(self._config)
            more["WINDLASS_CONFIG"] = file.name
        self.scheduler = Process(role("scheduler", self._prelude), self.environment(**more), [listen_fd])
        if self._config:
            until(lambda: "listening" in self.scheduler.output() or self.scheduler.process.poll() is not None, "up", 30)
            os.unlink(file.name)

    @property
    def state(self) -> Path:
        """The scheduler's journal."""
        assert self._keeps is not None, "LocalCluster(keeps=True) has a journal"
        return self._keeps / "scheduler.state"

    def restart_scheduler(self) -> None:
        """Another scheduler on the same port, with the journal of the one that was killed."""
        assert self._listener is not None
        self._schedulers.append(self.scheduler)
        self.start_scheduler(self._listener.fileno())

    def start_server(self, i: int | None, **more: str) -> Process:
        """One more; `i` is its number. None: the next one."""
        number = {} if i is None else {"WINDLASS_NUMBER": str(i)}
        return Process(role("server"), self.environment(**number, **more))

    def connect(self, **arguments: Any) -> windlass.Cluster:
        """A worker in this process: windlass.connect(), also with other arguments."""
        return windlass.connect(self.address, **{"token": self.token, **arguments})

    def worker(self, code: str, rank: int = 0, world_size: int = 1, **more: str) -> Process:
        """A worker in a process of its own that runs this code."""
        environment = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "PYTHONUNBUFFERED": "1", **more}
        process = Process([sys.executable, "-c", code], self.environment(**environment))
        self.workers.append(process)
        return process

    def status(self) -> dict[str, Any]:
        """What `windlass status --json` prints."""
        return dict(json.loads(fetch(Address.parse(self.address), self.token.encode(), timeout=STATUS_S)))

    def members(self, kind: str) -> list[dict[str, Any]]:
        """Those of one role."""
        return [member for member in self.status()["members"] if member["role"] == kind]

    def operator(self, timeout: float = 10.0) -> Operator:
        """Somebody who can move shards."""
        return Operator(Address.parse(self.address), self.token.encode(), timeout)

    def close(self) -> None:
        """Ends everything."""
        everyone = [*self.workers, *self.servers, *([self.scheduler] if hasattr(self, "scheduler") else [])]
        for process in everyone:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGCONT)
                os.killpg(process.pid, signal.SIGTERM)
        for process in everyone:
            process.close()
        for process in self._schedulers:
            process.close()
        if self._listener is not None:
            self._listener.close()
        if self._keeps is not None:
            shutil.rmtree(self._keeps, ignore_errors=True)
        _started.discard(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            for scheduler in (*self._schedulers, self.scheduler):
                print(f"--- the scheduler said:\n{scheduler.output()}")
            for what, processes in (("server", self.servers), ("worker process", self.workers)):
                for i, process in enumerate(processes):
                    print(f"--- {what} {i} said:\n{process.output()}")
        self.close()


def role(name: str, prelude: str = "") -> list[str]:
    """The command of a scheduler or a server."""
    main = ["-c", f"{prelude}\nfrom windlass.launch.roles import main\nraise SystemExit(main())"]
    return [sys.executable, *(main if prelude else ["-m", "windlass.launch.roles"]), name]


_started: "weakref.WeakSet[LocalCluster]" = weakref.WeakSet()


def _forget() -> None:
    """In the child of a fork: the processes are the parent's, and end with it."""
    for cluster in list(_started):
        for process in [*cluster.workers, *cluster.servers, cluster.scheduler]:
            process.process.returncode = 0  # neither waited for nor signalled from here
            if process.process.stdin is not None:
                process.process.stdin.close()


os.register_at_fork(after_in_child=_forget)
