"""A run on Ray from beginning to end: its room, its lives, and what came of it."""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from windlass._errors import ServerLost, WindlassError
from windlass._net.address import Address, dial
from windlass._settings import Settings, given_token
from windlass.launch import rundir
from windlass.launch.run import newest_checkpoint
from windlass.ray._interrupts import Interrupts
from windlass.ray._job import Job
from windlass.ray._life import Life, WorkerLost
from windlass.ray._room import Room
from windlass.ray._services import NodeLost

if TYPE_CHECKING:
    from windlass.observe.display import Display

_DIAL_SECONDS = 10.0


def token_for(settings: Settings) -> bytes:
    """The one that is given, or a new one: nodes share no folder where they would find the user's own."""
    return given_token(settings) or secrets.token_hex(32).encode()


@contextlib.contextmanager
def room_for(ray: Any, job: Job) -> Iterator[Room]:
    """Room for all of its processes."""
    servers = [job.of_server] * job.settings.servers
    room = Room(ray, servers, [job.of_worker] * job.workers, job.strategy)
    try:
        room.wait(job.settings.start_timeout, job.who)
        yield room
    finally:
        room.close()


@contextlib.contextmanager
def noted(job: Job, address: str) -> Iterator[None]:
    """`windlass status` on this machine finds it by its name."""
    script = job.script[0] if job.script else job.name
    folder = rundir.make(address, job.token, name=rundir.free_name(job.name), script=script)
    try:
        yield
    finally:
        rundir.remove(folder)


def live(
    ray: Any,
    job: Job,
    *,
    interrupts: Interrupts | None = None,
    display: "Callable[[Life], Display] | None" = None,
) -> Life:
    """Its last life, which has ended."""
    interrupts = Interrupts() if interrupts is None else interrupts
    work = None if job.work is None else ray.put(job.work)
    with room_for(ray, job) as room:
        resume = job.resume
        for attempt in range(job.restarts + 1):
            life = begun(ray, job, room, resume, work)
            try:
                with noted(job, life.address), interrupts.heard():
                    life.wait(interrupts, None if display is None else display(life))
            finally:
                life.end()
            if life.lost is None or attempt == job.restarts or interrupts.first is not None:
                break
            resume = newest_checkpoint(job.settings) or resume
            where = "from the beginning: there is no checkpoint yet" if resume is None else "from the last checkpoint"
            job.say(f"{life.lost}; restart {attempt + 1} of {job.restarts}, {where}")
    return life


def begun(ray: Any, job: Job, room: Room, resume: str | None, work: Any) -> Life:
    """A life that has begun; another one, for start_timeout, if Ray takes a node for alive that is not."""
    deadline = time.monotonic() + job.settings.start_timeout
    while True:
        life = Life(ray, job, room, resume, work)
        try:
            life.begin()
            return life
        except NodeLost:
            life.end()
            if time.monotonic() > deadline:
                raise
        except BaseException:
            life.end()
            raise


def results_of(life: Life, job: Job) -> list[Any]:
    """What the workers have returned, by rank. Raises what the run failed with."""
    if life.refused is not None:
        raise life.refused
    if life.lost is not None:
        raise ServerLost(f"{job.who}: {life.lost}")
    if life.failed is not None:
        if life.failed.raised is not None:
            raise life.failed.raised
        raise WorkerLost(f"{job.who}: worker {life.failed.rank} {life.failed.why}")
    for failure in life.lost_workers:
        job.say(f"done by the others; worker {failure.rank} was lost, and its result is None")
    return [life.results.get(rank) for rank in range(job.workers)]


def read_resume(resume: bool | str) -> str | None:
    """Which checkpoint is meant: the newest, the one that is named, or none."""
    return "newest" if resume is True else resume or None


def init(ray: Any, who: str, **options: Any) -> None:
    """Connects to the cluster that Ray finds by itself, unless the program has done so."""
    if ray.is_initialized():
        return
    at = os.environ.get("RAY_ADDRESS", "")
    try:
        if at and at not in ("auto", "local") and "://" not in at:  # Ray itself would try for minutes
            dial(Address.parse(at), time.monotonic() + _DIAL_SECONDS).close()
        ray.init(**options)
    except (WindlassError, ConnectionError, RuntimeError, ValueError) as error:
        raise WindlassError(f"{who}: Ray{f' at RAY_ADDRESS={at}' if at else ''}: {error}") from error
