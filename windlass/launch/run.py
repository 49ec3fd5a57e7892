"""`windlass run`: a scheduler, servers and workers on this machine, around a script.

Everything ends together: when the workers are done, at Ctrl-C, or when this process is killed. When one of several
workers fails, the others go on, or wait for the replacement that is started: on_worker_loss.

The scheduler keeps a journal in the run's folder. If it is killed, it is started again on the same socket, and the run
goes on.

A run has succeeded if the work was done. A worker that was lost, by a signal, says nothing of that where others went
on, or a replacement, and these ended well. One that ended with an exit code of its own, as after an exception, does:
that is what its script thinks of the run.
"""

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from windlass._errors import InvalidArgument, WindlassError
from windlass._net.address import Address, bound_to
from windlass._net.address import listen as listen_on
from windlass._net.token import read_token, user_folder
from windlass._settings import SAVE_SECONDS, Settings, given_token, with_memory_cap
from windlass.launch import CANNOT_BEGIN, ENDING, GROUP_LOST, environment, rundir
from windlass.launch.child import Child, colours, describe
from windlass.launch.children import Children
from windlass.launch.failures import Failures, how, say
from windlass.launch.last_save import LastSave, newest_in
from windlass.launch.output import show

if TYPE_CHECKING:
    from windlass.observe.display import Display

END_SECONDS = 2.0  # from being asked to end to being ended
_GOODBYE_SECONDS = 0.7  # that the scheduler has to end before the servers
_BACKLOG = 1024
_FOREVER_SECONDS = 1e6
REPLACEMENTS_MAX = 3  # of one rank
SCHEDULERS_MAX = 3  # that are started after the first
_ASK_SECONDS = 1.0  # for the scheduler to answer
_LOOK_SECONDS = 0.1  # between two questions
_PROGRESS_SECONDS = 0.3  # for the scheduler to answer, while nobody passes on what workers print


@dataclasses.dataclass(frozen=True)
class Plan:
    """One process that will be."""

    role: str
    index: int
    command: list[str]
    environment: dict[str, str]  #: on top of ours


def plan(
    settings: Settings,
    command: list[str],
    address: str,
    cluster: int,
    folder: pathlib.Path,
    resume: str | None = None,
) -> list[Plan]:
    """Who is started, and with what."""
    settings = environment.with_whole_paths(settings)
    common = environment.of_all(settings, address, cluster)
    common["WINDLASS_TOKEN_FILE"] = str(folder / "token")  # _start() hides WINDLASS_TOKEN, which counts more
    if settings.config is not None:
        common["WINDLASS_CONFIG"] = str(settings.config.resolve())
    role = [sys.executable, "-m", "windlass.launch.roles"]
    for_all = environment.of_services(settings) | {"WINDLASS_LISTEN": "tcp://127.0.0.1:0"}
    scheduler = environment.of_scheduler(settings, resume)
    scheduler["WINDLASS_STATE"] = str(folder / "scheduler.state")
    if settings.allow:  # modules beside the script are found, as the script finds them
        beside = [str(pathlib.Path(command[0]).parent.resolve()), os.environ.get("PYTHONPATH")]
        for_all["PYTHONPATH"] = os.pathsep.join(filter(None, beside))
    plans = [Plan("scheduler", 0, [*role, "scheduler"], common | for_all | scheduler)]
    for i in range(settings.servers):
        plans.append(Plan("server", i, [*role, "server"], common | for_all | {"WINDLASS_NUMBER": str(i)}))
    command = runnable(command)
    master = str(_free_port())
    for rank in range(settings.workers):
        theirs = environment.of_worker(settings, rank) | {
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(settings.workers),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": master,
        }
        if settings.checkpoint_dir is not None:
            theirs["WINDLASS_RUN_DIR"] = str(folder)
        plans.append(Plan("worker", rank, command, common | theirs))
    return plans


def runnable(command: list[str]) -> list[str]:
    """A script and its arguments, with Python in front where it needs that."""
    if command[0].endswith(".py") or not os.access(command[0], os.X_OK):
        return [sys.executable, *command]
    return command


def _free_port() -> int:
    """For torch.distributed, which binds it itself."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def run(
    settings: Settings,
    command: list[str],
    *,
    name: str | None = None,
    dry_run: bool = False,
    verbose: bool = False,
    resume: str | None = None,
    restarts: int = 0,
) -> int:
    """The exit code: 0, or that of the first worker that failed and whose work nobody took over.

    resume: the checkpoint to go on from. restarts: how often to start again from the last one when a server is lost.
    """
    script = pathlib.Path(command[0])
    if not script.is_file():
        raise InvalidArgument(f"windlass run: there is no script {str(script)!r}")
    free = rundir.free_name(script.stem if name is None else name)
    if name not in (None, free):
        raise InvalidArgument(f"--name {name}: another run of yours has this name; {free} is free")
    if settings.address is not None and settings.sources["address"] == "flag":
        raise InvalidArgument("windlass run starts a scheduler of its own; --address is for `windlass worker`")
    settings = with_memory_cap(settings, settings.servers)
    if dry_run:
        _show_plan(plan(settings, command, "tcp://127.0.0.1:PORT", 0, user_folder() / "run-PID-N"))
        return 0
    if settings.log_dir is not None:
        try:
            settings.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"--log-dir {settings.log_dir}: {error.strerror or error}") from error
    if settings.checkpoint_dir is None and resume is not None:
        raise InvalidArgument("--resume: there is no place to look for checkpoints; name it with --checkpoint-dir DIR")
    for attempt in range(restarts + 1):
        code, lost = _run_once(settings, command, free, str(script.resolve()), resume, verbose)
        if lost is None or attempt == restarts or settings.checkpoint_dir is None:
            break
        resume = newest_checkpoint(settings) or resume
        where = "from the beginning: there is no checkpoint yet" if resume is None else "from the last checkpoint"
        show(f"windlass run: {lost}; restart {attempt + 1} of {restarts}, {where}", sys.stderr)
    return code


def newest_checkpoint(settings: Settings) -> str | None:
    """What to go on from, if there is a checkpoint."""
    from windlass._checkpoint.folder import Folder
    from windlass._checkpoint.reader import newest

    return "newest" if newest(Folder(settings.checkpoint_dir), settings.app).checkpoint is not None else None


def _run_once(
    settings: Settings, command: list[str], name: str, script: str, resume: str | None, verbose: bool
) -> tuple[int, str | None]:
    """The exit code, and which server was lost, if that was the end of it."""
    # The socket listens before there is a scheduler, so that all can be started at once.
    with listen_on(Address.parse("tcp://127.0.0.1:0"), _BACKLOG) as listener:
        address = str(bound_to(listener))
        folder = rundir.make(address, given_token(settings), name=name, script=script)
        show(f"windlass run: {name!r} at {address}", sys.stderr)
        launch = _Launch(settings, address, folder, verbose)
        try:
            with launch.signals():
                os.set_inheritable(listener.fileno(), True)
                plans = plan(settings, command, address, secrets.randbelow(2**64 - 1) + 1, folder, resume)
                launch.start(plans, listener.fileno())
                launch.show_progress()
                return launch.wait(), launch.lost
        finally:
            launch.end_all()
            rundir.remove(folder)


def _lives(pid: int) -> bool:
    """Whether it is a process of this machine that runs."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _show_plan(plans: list[Plan]) -> None:
    for one in plans:
        environment = " ".join(f"{name}={value}" for name, value in one.environment.items())
        print(f"{one.role:<10}{one.index:>3}  {' '.join(one.command)}\n{'':15}{environment}")


class _Launch(Children):
    """The processes of a run."""

    def __init__(self, settings: Settings, address: str, folder: pathlib.Path, verbose: bool) -> None:
        super().__init__(verbose)
        self._settings = settings
        self._address = Address.parse(address)
        self._folder = folder
        self._palette = colours()
        self._plans: dict[int, Plan] = {}  # of workers, by rank
        self._starts: collections.Counter[int] = collections.Counter()  # by rank
        self._scheduler: tuple[Plan, int] | None = None  # and the socket that it listens on
        self._schedulers = 0  # that were started
        self._replacing: dict[int, float] = {}  # ranks, and when to start a replacement at the latest
        self._undecided: list[Child] = []  # workers that failed, until it is known whether the others go on
        self._failures = Failures()
        self._look_at = 0.0  # the scheduler is asked no sooner
        self._failed: Child | None = None  # the first for which there was no replacement
        self._lost: list[Child] = []  # without which the others went on
        self._over = False  # the others cannot go on without it
        self.lost: str | None = None  #: the server whose end was the end of all, with checkpoints to go on from
        self._display: Display | None = None

    def start(self, plans: list[Plan], listen_fd: int) -> None:
        """Starts all of them."""
        for one in plans:
            if one.role == "worker":
                self._plans[one.index] = one
            if one.role == "scheduler":
                more = {"WINDLASS_LISTEN_FD": str(listen_fd), "WINDLASS_RUN_DIR": str(self._folder)}
                self._scheduler = dataclasses.replace(one, environment=one.environment | more), listen_fd
                self._start_scheduler()
            else:
                self._start(one)

    def _start_scheduler(self) -> None:
        assert self._scheduler is not None
        plan, listen_fd = self._scheduler
        self._start(plan, [listen_fd], again=self._schedulers > 0)
        self._schedulers += 1

    def _start(self, one: Plan, pass_fds: Sequence[int] = (), *, again: bool = False) -> None:
        is_worker, palette = one.role == "worker", self._palette
        child = Child(
            one.role,
            one.index,
            one.command,
            {name: value for name, value in os.environ.items() if name != "WINDLASS_TOKEN"} | one.environment,
            log_dir=self._settings.log_dir,
            append=again or (is_worker and self._starts[one.index] > 0),
            colour=palette[one.index % len(palette)] if is_worker else palette[0] and "\033[2m",
            pass_fds=pass_fds,
            dies_with_us=is_worker,
        )
        if is_worker:
            self._starts[one.index] += 1
        self._add(child)

    def wait(self) -> int:
        """Until the workers are done, cannot go on, or somebody interrupts."""
        while self._interrupted is None and not self._over and (self._running("worker") or self._replacing):
            self._turn(self._patience())
            if self._display is not None:
                self._display.look()
            if (self._replacing or self._undecided) and time.monotonic() >= self._look_at:
                status = self._status()
                self._replace(status)
                self._decide(status)
                self._look_at = time.monotonic() + _LOOK_SECONDS
        if self._display is not None:
            self._display.close(show=self._interrupted is None)
        if self._settings.checkpoint_dir is not None and self.lost is None:
            self._finish_checkpoints()
        self.end_all()
        if self._interrupted is not None:
            say(f"ended by {self._interrupted.name}")
            return 128 + self._interrupted
        if self._failed is None and self._over and self._lost:
            self._failed = self._lost[0]  # it was lost before the others could begin
        if self._failed is None:
            self._tell_undecided()
            for child in self._lost:
                say(f"done by the others; {child.name} was lost, by {describe(child.code or 0)}")
            return 0
        just_told = bool(self._undecided) or self._failed.role != "worker"
        self._tell_undecided()
        code = self._failed.code or 1
        code = code if code > 0 else 128 - code
        self._failures.conclude(self._failed, code, just_told)
        return code

    def _finish_checkpoints(self) -> None:
        """Servers stay until what is being written is written; at SIGTERM one more checkpoint is taken first."""
        interrupted, self._interrupted = self._interrupted, None
        self._terminating = interrupted == signal.SIGTERM
        asks = interrupted == signal.SIGTERM and bool(self._running("worker"))
        before = newest_in(self._status()) if asks else None
        last = LastSave(asks and self._ask_for_checkpoint(), before)
        deadline = time.monotonic() + (SAVE_SECONDS if interrupted is not None else _FOREVER_SECONDS)
        while time.monotonic() < deadline and self._interrupted is None and self._running("scheduler"):
            if last.is_over(self._status()):
                break
            self._turn(_LOOK_SECONDS)
        self._interrupted = interrupted or self._interrupted

    def _ask_for_checkpoint(self) -> bool:
        """Whether the scheduler takes one."""
        from windlass.observe.operator import Operator  # few runs need it

        try:
            with Operator(self._address, read_token(self._folder / "token"), _ASK_SECONDS) as operator:
                operator.save(self._settings.app, None, _ASK_SECONDS)
        except (WindlassError, OSError) as error:
            say(f"no checkpoint: {error}")
            return False
        say(f"takes a checkpoint before it ends, within {SAVE_SECONDS:g} s; a second signal ends it at once")
        return True

    def show_progress(self) -> None:
        """If it was asked for."""
        asked = self._settings.progress
        if asked == "on" or (asked == "auto" and sys.stdout.isatty()):
            from windlass.observe.display import Display  # few runs need it

            self._display = Display(lambda: self._fetch(_PROGRESS_SECONDS))

    def _patience(self) -> float | None:
        """How long to wait for something to happen before there is something to do anyway; None: for ever."""
        look = _LOOK_SECONDS if self._replacing or self._undecided else None
        show = None if self._display is None else self._display.due_seconds
        held = [child.due_seconds for child in self._running()]
        return min((seconds for seconds in (look, show, *held) if seconds is not None), default=None)

    def _ended(self, child: Child) -> None:
        told = self._terminating and child.role == "worker" and child.code in (-signal.SIGTERM, 128 + signal.SIGTERM)
        if child.code == 0 or told or (self._ending and not self._is_consequence(child)):
            child.pass_on_rest()
        elif self._ending:
            pass
        elif child.role == "worker":
            self._worker_failed(child)
        elif child.role == "scheduler" and (child.code or 0) < 0 and self._schedulers <= SCHEDULERS_MAX:
            restart = f"restart {self._schedulers} of {SCHEDULERS_MAX}"
            say(f"{child.name} ended with {how(child)}; {restart}, training goes on")
            self._start_scheduler()
        else:
            if child.code == CANNOT_BEGIN:
                self._failed = self._failed or child
                self._over = True
            self._failures.tell(child)
            if child.role == "server" and self._settings.checkpoint_dir is not None and not self._over:
                self._failed, self._over = self._failed or child, True
                self.lost = f"{child.name} ended with {describe(child.code or 0)}"

    def _is_consequence(self, child: Child) -> bool:
        """Whether what it ended with while we end everything is due to that, or to what was said already."""
        return self._failed is not None or child.last_words.error.startswith("KeyboardInterrupt")

    def _worker_failed(self, child: Child) -> None:
        """The others go on, unless they could not; or it is replaced."""
        rank = child.index
        if child.code == GROUP_LOST:
            self._failed, self._over = self._failed or child, True
            self._undecided.append(child)
            return
        if self._settings.on_worker_loss == "wait" and self._starts[rank] <= REPLACEMENTS_MAX:
            self._failures.tell(child, f"; replacement {self._starts[rank]} of {REPLACEMENTS_MAX} starts")
            self._replacing[rank] = time.monotonic() + self._settings.failure_timeout + 1.0
            return
        goes_on = self._settings.on_worker_loss == "continue" and bool(self._running("worker"))
        if goes_on and (child.code or 0) < 0:
            self._lost.append(child)
        else:
            self._failed = self._failed or child
        self._undecided.append(child)
        if self._settings.on_worker_loss == "wait":
            self._over = True

    def _status(self) -> dict[str, Any] | None:
        """What the scheduler says; None: nothing."""
        try:
            return dict(json.loads(self._fetch(_ASK_SECONDS)))
        except (WindlassError, OSError):
            return None

    def _fetch(self, timeout: float) -> str:
        from windlass.observe.status import fetch  # few runs need it

        return fetch(self._address, read_token(self._folder / "token"), timeout=timeout)

    def _decide(self, status: dict[str, Any] | None) -> None:
        """Whether the others go on: not before all have come once, since they wait for the one that failed."""
        if self._over or (status is None and self._running("scheduler")):
            return  # it may not be up yet
        if status is not None and not any(app["view"] > 0 for app in status["apps"]):
            self._over = bool(self._undecided)
            return
        self._tell_undecided()

    def _tell_undecided(self) -> None:
        go_on = self._running("worker") and not self._failures.service_lost
        while self._undecided:
            self._failures.tell(self._undecided.pop(0), "; the others go on" if go_on else "")

    def _replace(self, status: dict[str, Any] | None) -> None:
        """Once the scheduler knows that they are dead: it would refuse a second worker of the same rank."""
        pids = [] if status is None else [one["pid"] for one in status["members"] if one["role"] == "worker"]
        known = all(map(_lives, pids))
        for rank, latest in list(self._replacing.items()):
            if known or time.monotonic() > latest:
                del self._replacing[rank]
                self._failures.forgive()
                self._start(self._plans[rank])

    _ending = False
    _terminating = False  # workers may have got the signal, too, and end when the checkpoint is armed

    def end_all(self) -> None:
        """Ends whatever still runs: workers are asked first, the others when no worker needs them any more."""
        if self._ending:
            return
        self._ending = True
        if self._display is not None:
            self._display.close(show=False)
        for child in self._running() if self._interrupted is not None else []:
            child.hush()
        with contextlib.suppress(OSError):  # so that workers do not hold for a checkpoint at our SIGTERM
            (self._folder / ENDING).touch()
        polite = signal.SIGINT if self._interrupted == signal.SIGINT else signal.SIGTERM
        for child in self._running("worker"):
            child.signal(polite)
            child.signal(signal.SIGCONT)
        self._until_ended("worker", END_SECONDS)
        # The scheduler first, which tells the servers: to one that stays, theirs would be a loss.
        for role, seconds in (("scheduler", _GOODBYE_SECONDS), ("", 0.0)):
            for child in self._running(role):
                child.close_stdin()
                child.signal(signal.SIGCONT)
            self._wait_for(role, seconds)
        self._until_ended("", END_SECONDS)
        self._close()
