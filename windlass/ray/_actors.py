"""What runs on the nodes: actors of two kinds. Ray ends them when the driver is gone, and their processes with them.

    Process   owns a process: the scheduler, a server, or a worker that runs a script
    Caller    a worker that calls a function, in the actor itself, where the function has all of Ray

Ray puts the name of an actor, which is its repr(), before each line that it prints.
"""

import asyncio
import dataclasses
import math
import os
import pathlib
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from windlass._cgroup import SHARE, default_memory_bytes_max
from windlass._errors import InvalidArgument, WindlassError
from windlass._net.address import Address, bound_to, listen
from windlass.launch.child import Child
from windlass.launch.last_words import LastWords
from windlass.launch.run import END_SECONDS, runnable

_BACKLOG = 1024
_NOT_INHERITED = ("WINDLASS_TOKEN", "WINDLASS_TOKEN_FILE", "WINDLASS_CONFIG")  # of whoever started Ray on the node
_WHY_CHARACTERS_MAX = 300
_ASK_SECONDS = 2.0  # for the scheduler to answer


@dataclasses.dataclass(frozen=True)
class Here:
    """Where an actor is."""

    ip: str  #: of its node, the address that it binds
    node: str  #: its id
    pid: int
    port: int  #: a free one, for torch.distributed
    gpus: tuple[str, ...]  #: that Ray has given it


@dataclasses.dataclass
class Ended:
    """How a process ended: what `Failures` wants to know."""

    role: str
    name: str
    code: int
    last_words: LastWords

    @classmethod
    def lost(cls, name: str, error: Exception) -> "Ended":
        """Of a process whose actor was lost, so that nobody saw its end."""
        words = LastWords(is_server=True)
        words.add(f"ERROR {why_lost(error)}", 0.0)
        return cls(name.partition(" ")[0], name, -signal.SIGKILL, words)


def why_lost(error: Exception) -> str:
    """What Ray says of the end of an actor, in short: the last of many lines, without causes that are often seen."""
    last = str(error).strip().rpartition("\n")[2].strip()
    return last.partition(" Some common causes")[0][:_WHY_CHARACTERS_MAX]


def here() -> Here:
    """Of the actor that asks."""
    import ray

    context = ray.get_runtime_context()
    ip = ray.util.get_node_ip_address()
    with socket.create_server((ip, 0)) as sock:
        port = int(sock.getsockname()[1])
    gpus = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
    return Here(ip, context.get_node_id(), os.getpid(), port, gpus)


class Process:
    """An actor that owns one process, which ends with it. All of it happens in one event loop."""

    def __init__(self, role: str, index: int) -> None:
        self._role = role
        self._index = index
        self._child: Child | None = None
        self._ended: asyncio.Future[Ended] | None = None
        self._listener: socket.socket | None = None
        self._ends = False
        self._address: Address | None = None
        self._token = b""

    def __repr__(self) -> str:
        return self._role if self._role == "scheduler" else f"{self._role} {self._index}"

    async def here(self) -> Here:
        """Where it is."""
        return here()

    async def listen(self) -> str:
        """For the scheduler, before it starts: its socket listens already, so that all can be started at once."""
        self._listener = listen(Address("tcp", here().ip), _BACKLOG)
        return str(bound_to(self._listener))

    async def start(self, command: Sequence[str], environment: dict[str, str], how: "How") -> None:
        """Starts the process. The token is no part of the environment that anybody lists."""
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        usual = {} if self._role == "worker" else how.of_service(here().ip)
        asks = {**inherited, **usual, **environment, "WINDLASS_TOKEN": how.token.decode()}
        passed = []
        if self._listener is not None:
            passed.append(self._listener.fileno())
            asks["WINDLASS_LISTEN_FD"] = str(passed[0])
            self._address, self._token = bound_to(self._listener), how.token
        if how.config is not None:
            passed.append(os.memfd_create("windlass-config"))
            os.write(passed[-1], how.config.encode())
            asks["WINDLASS_CONFIG"] = f"/proc/self/fd/{passed[-1]}"
        if self._role == "worker":
            if not pathlib.Path(command[0]).is_file():
                raise InvalidArgument(f"there is no {command[0]!r} in {os.getcwd()} on node {here().ip}")
            command = runnable(list(command))
        else:
            command = [sys.executable, "-m", "windlass.launch.roles", *command]
        if how.log_dir is not None:
            how.log_dir.mkdir(parents=True, exist_ok=True)
        self._child = child = Child(
            self._role,
            self._index,
            command,
            asks,
            log_dir=how.log_dir,
            append=how.again,
            prefix="",  # Ray has one
            pass_fds=passed,
            dies_with_us=self._role == "worker",
        )
        self._verbose = how.verbose
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        loop.add_reader(child.output.fileno(), self._read)
        loop.add_reader(child.pidfd, self._reap)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if how.config is not None:
            os.close(passed[-1])

    def _read(self) -> None:
        assert self._child is not None
        if not self._child.read(self._verbose):
            asyncio.get_running_loop().remove_reader(self._child.output.fileno())
        elif (due := self._child.due_seconds) is not None:
            asyncio.get_running_loop().call_later(due, self._pass_on_late)

    def _pass_on_late(self) -> None:
        """If it goes on, that was not what it ended with."""
        if self._child is not None and self._child.code is None:
            self._child.pass_on_late()

    def _reap(self) -> None:
        child, loop = self._child, asyncio.get_running_loop()
        assert child is not None
        assert self._ended is not None
        loop.remove_reader(child.pidfd)
        code = child.reap()
        while child.has_output() and child.read(self._verbose):
            pass
        loop.remove_reader(child.output.fileno())
        if code == 0 or self._ends:
            child.pass_on_rest()
        self._ended.set_result(Ended(self._role, repr(self), code, child.last_words))

    async def run(self, command: Sequence[str], environment: dict[str, str], how: "How") -> Ended:
        """Starts the process and waits for its end."""
        await self.start(command, environment, how)
        return await self.ended()

    async def ended(self) -> Ended:
        """When it has."""
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    async def status(self) -> str | None:
        """The JSON of the scheduler's status; None: it says nothing."""
        from windlass.observe.status import fetch

        assert self._address is not None
        try:
            return await asyncio.to_thread(fetch, self._address, self._token, None, timeout=_ASK_SECONDS)
        except (WindlassError, OSError):
            return None

    async def save(self, app: str) -> str:
        """Asks the scheduler for a checkpoint. Why there will be none, or nothing."""
        return await asyncio.to_thread(self._save, app)

    def _save(self, app: str) -> str:
        from windlass.observe.operator import Operator

        assert self._address is not None
        try:
            with Operator(self._address, self._token, _ASK_SECONDS) as operator:
                operator.save(app, None, _ASK_SECONDS)
        except (WindlassError, OSError) as error:
            return str(error)
        return ""

    async def end(self) -> None:
        """Asks the process to end, and makes sure of it."""
        child = self._child
        if child is None or self._ended is None or child.code is not None:
            return
        self._ends = True
        child.hush()
        if self._role == "worker":
            child.signal(signal.SIGINT)
        child.close_stdin()
        child.signal(signal.SIGCONT)
        try:
            await asyncio.wait_for(asyncio.shield(self._ended), END_SECONDS)
        except TimeoutError:
            child.signal(signal.SIGKILL)
            await asyncio.shield(self._ended)


class Caller:
    """An actor that calls a function as a worker."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __repr__(self) -> str:
        return f"worker {self._rank}"

    def here(self) -> Here:
        """Where it is."""
        return here()

    def call(self, environment: dict[str, str], how: "How", work: "Work") -> Any:
        """What the function returns. Whatever clusters it has left open are closed."""
        from windlass._client.open_clusters import close_all

        for name in _NOT_INHERITED:
            os.environ.pop(name, None)
        os.environ.update(environment)
        os.environ["WINDLASS_TOKEN"] = how.token.decode()
        failed = True
        try:
            result = work.function(*work.args, **work.kwargs)
            failed = False
            return result
        except SystemExit as end:
            failed = end.code not in (None, 0)
            if failed:
                raise RuntimeError(f"worker {self._rank} ended by sys.exit({end.code!r})") from end
            return None
        finally:
            close_all(failed=failed)


@dataclasses.dataclass(frozen=True)
class Work:
    """What workers call."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class How:
    """How processes are started. It reaches actors as an argument, which nobody can list."""

    token: bytes = dataclasses.field(repr=False)
    verbose: bool = False
    log_dir: pathlib.Path | None = None
    again: bool = False  #: another process had this role and number before
    config: str | None = None  #: the settings file, which other nodes may not have
    cpus: float | None = None  #: that Ray gives it
    memory_bytes: float | None = None  #: likewise, if it does
    beside: int = 1  #: how many servers share the node's memory
    near: str | None = None  #: the folder of the script, for modules that servers are to import

    def but(self, **changes: Any) -> "How":
        """The same with some changes."""
        return dataclasses.replace(self, **changes)

    def of_service(self, ip: str) -> dict[str, str]:
        """For the environment of a server or the scheduler; what the settings say wins."""
        found = {"WINDLASS_LISTEN": str(Address("tcp", ip))}
        if self.cpus is not None:
            found["WINDLASS_THREADS"] = str(max(1, math.ceil(self.cpus)))
        memory = default_memory_bytes_max(self.beside) if self.memory_bytes is None else self.memory_bytes * SHARE
        found["WINDLASS_MEMORY_BYTES_MAX"] = str(int(memory))
        if self.near is not None:
            found["PYTHONPATH"] = os.pathsep.join(filter(None, [self.near, os.environ.get("PYTHONPATH")]))
        return found
