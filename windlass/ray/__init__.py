"""Windlass on Ray: `pip install 'windlass[ray]'`.

results = wl.ray.run(train, args, servers=4, workers=16, resources_per_worker={"GPU": 1})

with wl.ray.start(servers=4) as at:
    ...  # in tasks of Ray: wl.connect(at.address, token=at.token, rank=r, world_size=n)

docs/guide/engines.md says what happens when something fails.
"""

import contextlib
import difflib
import logging
import pathlib
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from windlass._errors import InvalidArgument
from windlass._extras import need
from windlass._rules.sync import Sync
from windlass._settings import SETTINGS, Settings, load
from windlass.launch import environment
from windlass.ray._actors import Work
from windlass.ray._job import Job
from windlass.ray._life import WorkerLost
from windlass.ray._room import Room, checked
from windlass.ray._run import init, live, noted, read_resume, results_of, room_for, token_for
from windlass.ray._services import Services

__all__ = ["Servers", "WorkerLost", "run", "start"]

_NOT_HERE = ("address", "role", "number", "listen", "advertise", "address_file", "no_token", "linger", "progress")
_log = logging.getLogger("windlass")


def run(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    servers: int = 1,
    workers: int = 1,
    resources_per_worker: Mapping[str, float] | None = None,
    resources_per_server: Mapping[str, float] | None = None,
    strategy: str = "SPREAD",
    sync: Sync | str | None = None,
    on_worker_loss: str | None = None,
    checkpoint_dir: str | None = None,
    checkpoint_every: str | None = None,
    resume: bool | str = False,
    restarts: int = 3,
    name: str | None = None,
    **settings: Any,
) -> list[Any]:
    """Calls a function on workers, which with servers and a scheduler are actors on Ray. What each returned, by rank.

    The function calls ``wl.connect()``, as in a script; its workers know their rank. It runs in the actor, so all of
    Ray can be used in it. What it raises is raised here, with its rank and its traceback. It is called again for a
    worker that died, with ``on_worker_loss="wait"``; otherwise the others go on, and the result of who died is None.

    args, kwargs: what it is called with, on every worker.
    resources_per_worker, resources_per_server: what Ray is to give each, such as ``{"CPU": 4, "GPU": 1}`` (default: a
        CPU). A server has as many threads as CPUs, and four fifths of its "memory", if that is among them.
    strategy: how they are placed: "SPREAD", "PACK", "STRICT_SPREAD" or "STRICT_PACK".
    resume: goes on from the newest good checkpoint (True), or from one by its id or tag.
    restarts: how often to start again from the last checkpoint when a server is lost; without ``checkpoint_dir`` that
        raises ServerLost.
    name: what `windlass status` on this machine calls it (default: the function's name).
    settings: everything else that `windlass run` takes, such as ``failure_timeout=5`` or ``config="windlass.toml"``.

    If Ray has no room for all of them within ``start_timeout`` (60 s), the error says what is missing.
    """
    ray = need("ray", "wl.ray.run")
    if not callable(function):
        raise InvalidArgument(f"wl.ray.run: expected a function, not {function!r}")
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise InvalidArgument(f"wl.ray.run: args: expected a tuple of arguments, such as (x,), not {args!r}")
    given = {
        "servers": servers,
        "workers": workers,
        "sync": None if sync is None else str(sync),
        "on_worker_loss": on_worker_loss,
        "checkpoint_dir": checkpoint_dir,
        "checkpoint_every": checkpoint_every,
    }
    read = _settings("wl.ray.run", given | settings)
    job = Job(
        "wl.ray.run",
        read,
        token_for(read),
        checked(resources_per_server, "wl.ray.run: resources_per_server"),
        checked(resources_per_worker, "wl.ray.run: resources_per_worker"),
        strategy,
        str(name or getattr(function, "__name__", "run")),
        read_resume(resume),
        _say,
        restarts,
        Work(function, tuple(args), dict(kwargs or {})),
        log_dir=None if read.log_dir is None else read.log_dir.absolute(),
    )
    init(ray, job.who)
    return results_of(live(ray, job), job)


class Servers:
    """Servers and a scheduler on Ray; made by ``wl.ray.start()``. A context manager."""

    def __init__(self, ray: Any, job: Job) -> None:
        self._job = job
        self._stack = contextlib.ExitStack()
        self._open = True
        with contextlib.ExitStack() as stack:
            room: Room = stack.enter_context(room_for(ray, job))
            self._services = Services(ray, job, room, job.resume)
            stack.callback(self._services.end)
            self._services.start()
            stack.enter_context(noted(job, self.address))
            self._stack = stack.pop_all()

    @property
    def address(self) -> str:
        """The scheduler's, for ``wl.connect()``."""
        return self._services.address

    @property
    def token(self) -> str:
        """Likewise; who has it may come in."""
        return self._job.token.decode()

    def __repr__(self) -> str:
        return f"<{self._job.settings.servers} servers on Ray, at {self.address}>"

    def close(self) -> None:
        """Ends them. Idempotent."""
        stack, self._stack = self._stack, contextlib.ExitStack()
        with stack:
            for line in self._services.early() if self._open else []:
                _log.error("wl.ray.start: %s", line)
            self._open = False

    def __enter__(self) -> "Servers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start(
    servers: int = 1,
    *,
    resources_per_server: Mapping[str, float] | None = None,
    strategy: str = "SPREAD",
    checkpoint_dir: str | None = None,
    checkpoint_every: str | None = None,
    resume: bool | str = False,
    name: str = "servers",
    **settings: Any,
) -> Servers:
    """Starts servers and a scheduler on Ray, without workers: for Ray Train, Tune and plain tasks.

    They are there until the block ends, whoever comes and goes. Arguments are those of ``run()``.
    """
    ray = need("ray", "wl.ray.start")
    given = {"servers": servers, "checkpoint_dir": checkpoint_dir, "checkpoint_every": checkpoint_every}
    read = _settings("wl.ray.start", given | settings)
    job = Job(
        "wl.ray.start",
        read,
        token_for(read),
        checked(resources_per_server, "wl.ray.start: resources_per_server"),
        {},
        strategy,
        name,
        read_resume(resume),
        _say,
        log_dir=None if read.log_dir is None else read.log_dir.absolute(),
    )
    init(ray, job.who)
    return Servers(ray, job)


def _settings(who: str, given: dict[str, Any]) -> Settings:
    config = given.pop("config", None)
    for name in given:
        if name not in SETTINGS or name in _NOT_HERE:
            known = [setting for setting in SETTINGS if setting not in _NOT_HERE]
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise InvalidArgument(f"{who}: there is no argument {name!r}{hint}")
    return environment.with_whole_paths(load(given, None if config is None else pathlib.Path(config)))


def _say(text: str) -> None:
    _log.warning("wl.ray.run: %s", text)
