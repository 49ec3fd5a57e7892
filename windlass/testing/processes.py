"""Servers in processes of their own, to be watched, stopped and killed."""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import windlass
from windlass._errors import InvalidArgument

LISTENING = re.compile(r"^windlass server listening on (\S+)$", re.MULTILINE)
EXIT_S = 5.0  # from SIGTERM to SIGKILL
_GONE_S = 0.01  # between two looks for processes that were killed


class _Server:
    """One process. Its output goes to a file without a name, which never blocks it."""

    def __init__(self, arguments: list[str], token: str | None) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "WINDLASS_TOKEN"}
        if token is not None:
            environment["WINDLASS_TOKEN"] = token
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (open for as long as the process is known)
        # The server ends with its stdin, which ends with this process. The pipe is closed on exec, so that no sibling
        # keeps it open; forked children close it below. A stopped server cannot see that end; as a group of its own
        # it gets SIGHUP and SIGCONT from the kernel when the process that made it is gone.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "windlass", "server", *arguments, "--exit-with-stdin"],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=environment,
            process_group=0,
        )

    def output(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")

    def wait_for_address(self, deadline: float) -> str:
        while not (found := LISTENING.search(output := self.output())):
            if (code := self.process.poll()) is not None:
                raise RuntimeError(f"the server has ended with status {code} before it listened:\n{self.output()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server did not say in time where it listens; it said:\n{output}")
            time.sleep(0.005)
        return found[1]

    def reap(self, deadline: float | None = None) -> int:
        """Waits for its end, which is made certain at the deadline."""
        try:
            self.process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
        code = self.process.wait()
        self.close_pipe()
        return code

    def close_pipe(self) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def close(self) -> None:
        self.close_pipe()
        self._output.close()


class Servers:
    """Starts `count` servers on loopback, each a process of its own; a context manager that ends them all.

    ::

        with Servers(2) as servers, servers.connect() as cluster:
            ...
            servers.kill(1)

    kind: "tcp", or "unix" for abstract Unix sockets. token: given to servers and to connect(). threads,
    memory_bytes_max, arena_bytes_max, staging_bytes_max, allow, function_seconds: as in `windlass server`.
    start_seconds: what they may take until they listen.

    No server outlives this process, however it ends.
    """

    def __init__(
        self,
        count: int = 1,
        *,
        kind: Literal["tcp", "unix"] = "tcp",
        token: str | None = None,
        threads: int | None = None,
        memory_bytes_max: int | None = None,
        arena_bytes_max: int | None = None,
        staging_bytes_max: int | None = None,
        allow: str | None = None,
        function_seconds: float | None = None,
        start_seconds: float = 30.0,
    ) -> None:
        if kind not in ("tcp", "unix"):
            raise InvalidArgument(f'Servers: kind must be "tcp" or "unix", not {kind!r}')
        if count < 1:
            raise InvalidArgument(f"Servers: there must be at least 1, not {count}")
        self.addresses: list[str] = []
        self._token, self._start_seconds = token, start_seconds
        self._options: list[str] = []
        if threads is not None:
            self._options += ["--threads", str(threads)]
        if memory_bytes_max is not None:
            self._options += ["--memory-bytes-max", str(memory_bytes_max)]
        if arena_bytes_max is not None:
            self._options += ["--arena-bytes-max", str(arena_bytes_max)]
        if staging_bytes_max is not None:
            self._options += ["--staging-bytes-max", str(staging_bytes_max)]
        if allow is not None:
            self._options += ["--allow", allow]
        if function_seconds is not None:
            self._options += ["--function-seconds", str(function_seconds)]
        name = f"unix://@windlass-testing-{secrets.token_hex(8)}"
        self._listen = [f"{name}-{i}" if kind == "unix" else "tcp://127.0.0.1:0" for i in range(count)]
        self._servers: list[_Server] = []

    def __enter__(self) -> "Servers":
        if self._servers:
            raise InvalidArgument("Servers: already started")
        _started.add(self)
        try:
            for i in range(len(self._listen)):
                self._servers.append(self._start(i))
            deadline = time.monotonic() + self._start_seconds
            self.addresses = [server.wait_for_address(deadline) for server in self._servers]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all servers: SIGTERM, and after 5 seconds SIGKILL. Stopped ones are woken first."""
        for server in self._servers:
            server.process.terminate()
            server.process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + EXIT_S
        for server in self._servers:
            server.reap(deadline)
            server.close()
        self._servers.clear()

    def connect(self, **arguments: Any) -> "windlass.Cluster":
        """``windlass.connect`` to these servers, with their token."""
        return windlass.connect(**{"servers": list(self.addresses), "token": self._token, **arguments})

    @property
    def pids(self) -> list[int]:
        """The processes, also of those that have ended."""
        return [server.process.pid for server in self._servers]

    def kill(self, i: int) -> None:
        """Ends a server with SIGKILL and waits until it is gone."""
        self._servers[i].process.kill()
        self._servers[i].reap()

    def terminate(self, i: int) -> int:
        """Asks a server to end with SIGTERM, waits as close() does, and returns its exit status."""
        self._servers[i].process.terminate()
        return self._servers[i].reap(time.monotonic() + EXIT_S)

    def stop(self, i: int) -> None:
        """Stops a server with SIGSTOP, and waits until the kernel says so of every thread."""
        self._signal(i, signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while any(state not in "TZ" for state in self._states(i)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"server {i} does not stop: its threads are {self._states(i)}")
            time.sleep(0.001)

    def cont(self, i: int) -> None:
        """Lets a stopped server go on."""
        self._signal(i, signal.SIGCONT)

    def restart(self, i: int) -> str:
        """Starts a server anew, killing it if need be: on a fresh port, or under the same name. Returns its address."""
        self.kill(i)
        self._servers[i].close()
        self._servers[i] = self._start(i)
        self.addresses[i] = self._servers[i].wait_for_address(time.monotonic() + self._start_seconds)
        return self.addresses[i]

    def output(self, i: int) -> str:
        """What a server has printed since it was started, errors included."""
        return self._servers[i].output()

    def rss_bytes(self, i: int) -> int:
        """The server's anonymous memory."""
        return int(self._status(i)["RssAnon"].split()[0]) * 1024

    def cpu_seconds(self, i: int) -> float:
        """The processor time the server has used, in steps of the kernel's tick (10 ms)."""
        fields = self._read(i, "stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def threads(self, i: int) -> int:
        """How many threads the server has."""
        return int(self._status(i)["Threads"])

    def fds(self, i: int) -> int:
        """How many files and sockets the server has open."""
        return len(os.listdir(f"/proc/{self._pid(i)}/fd"))

    def _start(self, i: int) -> _Server:
        return _Server(["--listen", self._listen[i], *self._options], self._token)

    def _pid(self, i: int) -> int:
        """The number of a process that still belongs to us: a reaped one may be anybody's."""
        process = self._servers[i].process
        if (code := process.poll()) is not None:
            raise ProcessLookupError(f"server {i} has ended with status {code}; it said:\n{self.output(i)}")
        return process.pid

    def _signal(self, i: int, number: signal.Signals) -> None:
        os.kill(self._pid(i), number)

    def _read(self, i: int, name: str) -> str:
        return Path(f"/proc/{self._pid(i)}/{name}").read_text()

    def _status(self, i: int) -> dict[str, str]:
        return dict(line.split(":\t", 1) for line in self._read(i, "status").splitlines())

    def _states(self, i: int) -> list[str]:
        states = []
        for task in Path(f"/proc/{self._pid(i)}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
        return states


_started: "weakref.WeakSet[Servers]" = weakref.WeakSet()


def _forget() -> None:
    """In the child of a fork: the servers are the parent's, and end with it."""
    for servers in list(_started):
        for server in servers._servers:
            server.close()
            server.process.returncode = 0  # neither waited for nor signalled from here
        servers._servers.clear()


os.register_at_fork(after_in_child=_forget)


def kill_session(session: int) -> None:
    """SIGKILL to every process of a session, such as a `windlass run` that was started in one of its own; returns when
    all are gone."""
    while pids := _in_session(session):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_GONE_S)


def _in_session(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, ValueError):
                state, _, _, of = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(of) == session and state not in "ZX":
                    found.append(int(entry.name))
    return found
