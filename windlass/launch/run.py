"""`windlass run`: a scheduler, servers and workers on this machine, around a script.

Everything ends together: when the workers are done, when one of them fails, at Ctrl-C, or when this process is killed.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator
from types import FrameType

from windlass._address import Address, bound_to
from windlass._address import listen as listen_on
from windlass._errors import InvalidArgument
from windlass._settings import Settings
from windlass.launch import rundir
from windlass.launch.child import Child, colours, describe

END_SECONDS = 2.0  # from being asked to end to being ended
_BACKLOG = 1024
_LAST_LINES = 10


@dataclasses.dataclass(frozen=True)
class Plan:
    """One process that will be."""

    role: str
    index: int
    command: list[str]
    environment: dict[str, str]  #: on top of ours


def plan(settings: Settings, command: list[str], address: str, cluster: int, folder: pathlib.Path) -> list[Plan]:
    """Who is started, and with what."""
    common = {
        "WINDLASS_ADDRESS": address,
        "WINDLASS_CLUSTER": f"{cluster:016x}",
        "WINDLASS_TOKEN_FILE": str(folder / "token"),
        "WINDLASS_TRANSPORT": settings.transport,
        "WINDLASS_ROLE": "worker",  # what each is, run says; a file may say otherwise, for another day
        "PYTHONUNBUFFERED": "1",
    }
    if settings.config is not None:
        common["WINDLASS_CONFIG"] = str(settings.config.resolve())
    role = [sys.executable, "-m", "windlass.launch.roles"]
    for_all = {
        f"WINDLASS_{name.upper()}": str(settings[name])
        for name in ("failure_timeout", "start_timeout", "threads", "memory_bytes_max", "arena_bytes_max")
        if settings.sources[name] != "default"
    }
    for_all["WINDLASS_LISTEN"] = "tcp://127.0.0.1:0"
    scheduler = {
        "WINDLASS_SERVERS": str(settings.servers),
        "WINDLASS_LINGER": "1",
        "WINDLASS_RUN_SETTINGS": json.dumps(settings.describe()),
    }
    plans = [Plan("scheduler", 0, [*role, "scheduler"], common | for_all | scheduler)]
    for i in range(settings.servers):
        plans.append(Plan("server", i, [*role, "server"], common | for_all | {"WINDLASS_NUMBER": str(i)}))
    if command[0].endswith(".py") or not os.access(command[0], os.X_OK):
        command = [sys.executable, *command]
    master = str(_free_port())
    for rank in range(settings.workers):
        theirs = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(settings.workers),
            "LOCAL_WORLD_SIZE": str(settings.workers),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": master,
            "WINDLASS_APP": settings.app,
            "WINDLASS_SYNC": settings.sync,
            "WINDLASS_ON_WORKER_LOSS": settings.on_worker_loss,
        }
        plans.append(Plan("worker", rank, command, common | theirs))
    return plans


def _free_port() -> int:
    """For torch.distributed, which binds it itself."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def run(settings: Settings, command: list[str], *, dry_run: bool = False, verbose: bool = False) -> int:
    """The exit code: 0, or that of the first worker that failed."""
    script = pathlib.Path(command[0])
    if not script.is_file():
        raise InvalidArgument(f"windlass run: there is no script {str(script)!r}")
    if settings.address is not None and settings.sources["address"] == "flag":
        raise InvalidArgument("windlass run starts a scheduler of its own; --address is for `windlass worker`")
    if dry_run:
        _show_plan(plan(settings, command, "tcp://127.0.0.1:PORT", 0, rundir.base() / "run-PID"))
        return 0
    if settings.log_dir is not None:
        try:
            settings.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"--log-dir {settings.log_dir}: {error.strerror or error}") from error
    # The socket listens before there is a scheduler, so that all can be started at once.
    with listen_on(Address.parse("tcp://127.0.0.1:0"), _BACKLOG) as listener:
        address = str(bound_to(listener))
        folder = rundir.make(address)
        launch = _Launch(verbose)
        try:
            with launch.signals():
                os.set_inheritable(listener.fileno(), True)
                plans = plan(settings, command, address, secrets.randbelow(2**64 - 1) + 1, folder)
                launch.start(plans, settings.log_dir, listener.fileno(), folder)
                listener.close()
                return launch.wait()
        finally:
            launch.end_all()
            rundir.remove(folder)


def _show_plan(plans: list[Plan]) -> None:
    for one in plans:
        environment = " ".join(f"{name}={value}" for name, value in one.environment.items())
        print(f"{one.role:<10}{one.index:>3}  {' '.join(one.command)}\n{'':15}{environment}")


class _Launch:
    """The processes of a run."""

    def __init__(self, verbose: bool) -> None:
        self._verbose = verbose
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._interrupted: signal.Signals | None = None
        self._failed: Child | None = None

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Ctrl-C and the like wake the loop."""
        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

        def note(number: int, frame: FrameType | None) -> None:
            self._interrupted = self._interrupted or signal.Signals(number)

        before = [signal.signal(number, note) for number in caught]
        fd = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(fd)
            for number, handler in zip(caught, before, strict=True):
                signal.signal(number, handler)

    def start(self, plans: list[Plan], log_dir: pathlib.Path | None, listen_fd: int, folder: pathlib.Path) -> None:
        """Starts all of them."""
        palette = colours()
        for one in plans:
            environment = os.environ | one.environment
            is_scheduler = one.role == "scheduler"
            if is_scheduler:
                environment |= {"WINDLASS_LISTEN_FD": str(listen_fd), "WINDLASS_RUN_DIR": str(folder)}
            child = Child(
                one.role,
                one.index,
                one.command,
                environment,
                log_dir=log_dir,
                colour=palette[one.index % len(palette)] if one.role == "worker" else palette[0] and "\033[2m",
                pass_fds=[listen_fd] if is_scheduler else [],
                dies_with_us=one.role == "worker",
            )
            self._children.append(child)
            self._selector.register(child.output, selectors.EVENT_READ, child)
            self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    def wait(self) -> int:
        """Until the workers are done, one of them fails, or somebody interrupts."""
        while self._interrupted is None and self._failed is None and self._running("worker"):
            self._turn(None)
        self.end_all()
        if self._interrupted is not None:
            print(f"windlass run: ended by {self._interrupted.name}", file=sys.stderr)
            return 128 + self._interrupted
        if self._failed is None:
            return 0
        code = self._failed.code or 1
        lines = list(self._failed.tail)[-_LAST_LINES:]
        said = "its last lines:" if lines else "it printed nothing"
        print(f"windlass run: {self._failed.name} ended with {describe(code)}; {said}", file=sys.stderr)
        for line in lines:
            print(f"  {line}", file=sys.stderr)
        return code if code > 0 else 128 - code

    def _running(self, role: str = "") -> list[Child]:
        return [child for child in self._children if child.code is None and role in ("", child.role)]

    def _turn(self, timeout: float | None) -> None:
        """Handles what has happened, waiting for something to."""
        for key, _ in self._selector.select(timeout):
            child: Child | None = key.data
            if child is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            elif key.fileobj is child.output:
                if not child.read(self._verbose):
                    self._selector.unregister(child.output)
            else:
                self._selector.unregister(child.pidfd)
                self._ended(child)

    def _ended(self, child: Child) -> None:
        child.reap()
        while child.output in self._selector.get_map() and child.read(self._verbose) and self._more(child):
            pass
        if self._ending or child.code == 0:
            return
        if child.role == "worker":
            self._failed = self._failed or child
        else:
            said = "".join(f"\n  {line}" for line in list(child.tail)[-3:])
            print(
                f"windlass run: {child.name} ended with {describe(child.code or 0)}{said}", file=sys.stderr, flush=True
            )

    _ending = False

    @staticmethod
    def _more(child: Child) -> bool:
        """Whether there is unread output."""
        with selectors.DefaultSelector() as one:
            one.register(child.output, selectors.EVENT_READ)
            return bool(one.select(0))

    def end_all(self) -> None:
        """Ends whatever still runs: workers are asked first, the others when no worker needs them any more."""
        if self._ending:
            return
        self._ending = True
        polite = signal.SIGINT if self._interrupted == signal.SIGINT else signal.SIGTERM
        for child in self._running("worker"):
            child.signal(polite)
            child.signal(signal.SIGCONT)
        self._until_ended("worker", END_SECONDS)
        for child in self._running():
            child.close_stdin()
            child.signal(signal.SIGCONT)
        self._until_ended("", END_SECONDS)
        for child in self._children:
            child.close()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _until_ended(self, role: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._running(role) and (left := deadline - time.monotonic()) > 0:
            self._turn(left)
        for child in self._running(role):
            child.signal(signal.SIGKILL)
        while self._running(role):
            self._turn(1.0)
