"""A process that the launcher started: its output with a name in front, its end, and whatever it leaves behind."""

import contextlib
import ctypes
import os
import pathlib
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from windlass.launch.last_words import LastWords
from windlass.launch.output import LogFile, show

_LINE_BYTES_MAX = 1 << 16  # what has no end is cut here
_PR_SET_PDEATHSIG = 1
_QUIET = ("INFO ", "DEBUG ", "windlass server listening on", "windlass scheduler listening on")
_QUIET_AT_THE_END = (*_QUIET, "WARNING ")  # who leaves when somebody ends the run


class Child:
    """One process in a group of its own, so that what it forks can be ended with it.

    prefix: what its lines begin with, if not its name.
    """

    def __init__(
        self,
        role: str,
        index: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        log_dir: pathlib.Path | None,
        append: bool = False,
        colour: str = "",
        prefix: str | None = None,
        pass_fds: Sequence[int] = (),
        dies_with_us: bool,
        ignored: Sequence[signal.Signals] = (),
    ) -> None:
        self.role = role
        self.index = index
        self.name = role if role == "scheduler" else f"{role} {index}"
        self.code: int | None = None
        self.quiet: tuple[str, ...] = _QUIET  #: beginnings of lines of a server or the scheduler that are not shown
        self.last_words = LastWords(is_server=role != "worker")
        self._prefix = prefix
        if prefix is None:
            self._prefix = f"{colour}[{self.name}]\033[0m " if colour else f"[{self.name}] "
        self._rest = b""
        self._log: LogFile | None = None
        if log_dir is not None:
            self._log = LogFile(log_dir / f"{self.name.replace(' ', '-')}.log", append=append)
        # Servers and the scheduler end with their stdin, which ends with us, however that comes about. A worker's stdin
        # is its own business, so the kernel is asked to end it.
        self.process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL if dies_with_us else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            pass_fds=pass_fds,
            preexec_fn=_prepare(os.getpid() if dies_with_us else None, ignored) if dies_with_us or ignored else None,
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        self.pidfd = os.pidfd_open(self.process.pid)

    def read(self, verbose: bool) -> bool:
        """Passes on what it has printed. False at the end of its output."""
        try:
            data = os.read(self.output.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        if self._log is not None:
            self._log.write(data)
        self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        if len(self._rest) > _LINE_BYTES_MAX or (not data and self._rest):
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._show(line.decode(errors="replace").rstrip("\r"), verbose)
        return bool(data)

    def has_output(self) -> bool:
        """Whether there is something to read, or the end of its output."""
        with selectors.DefaultSelector() as one:
            one.register(self.output, selectors.EVENT_READ)
            return bool(one.select(0))

    def _show(self, line: str, verbose: bool) -> None:
        if verbose or self.role == "worker" or not line.startswith(self.quiet):
            self._pass_on(self.last_words.add(line, time.monotonic()))

    def _pass_on(self, lines: list[str]) -> None:
        for line in lines:
            show(f"{self._prefix}{line}")

    @property
    def due_seconds(self) -> float | None:
        """Until pass_on_late() has something to do."""
        due = self.last_words.due()
        return None if due is None else max(0.0, due - time.monotonic())

    def pass_on_late(self) -> None:
        """What was held back of a process that goes on."""
        self._pass_on(self.last_words.expire(time.monotonic()))

    def pass_on_rest(self) -> None:
        """What was held back of a process that has ended well."""
        self._pass_on(self.last_words.take())

    def reap(self) -> int:
        """After its end: its exit code, and what it forked is ended."""
        if self.code is None:
            self.code = self.process.wait()
            self.signal(signal.SIGKILL)
        return self.code

    def signal(self, number: signal.Signals) -> None:
        """To the process and all that it forked."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def hush(self) -> None:
        """It is about to be ended by whoever runs it, who knows."""
        self.quiet = _QUIET_AT_THE_END

    def close_stdin(self) -> None:
        """The polite way to end a server or the scheduler."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def close(self) -> None:
        """Closes files."""
        self.close_stdin()
        self.output.close()
        os.close(self.pidfd)
        if self._log is not None:
            self._log.close()


def describe(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


def _prepare(parent: int | None, ignored: Sequence[signal.Signals]) -> Callable[[], None]:
    """What a child does before it becomes another program: signals stay ignored."""
    ask = None if parent is None else die_with(parent)

    def prepare() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        if ask is not None:
            ask()

    return prepare


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """What a process calls to get this signal when its parent ends, however that comes about."""
    libc = ctypes.CDLL(None, use_errno=True)  # loaded here: the child of a fork should do little

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return ask


def colours() -> list[str]:
    """For names, on a terminal."""
    if not sys.stdout.isatty():
        return [""]
    return [f"\033[{n}m" for n in (36, 33, 35, 32, 34, 31)]
