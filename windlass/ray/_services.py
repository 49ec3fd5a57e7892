"""The scheduler and the servers of one life of a run, as actors, and what is asked of them."""

import collections
import json
import secrets
from typing import Any

from windlass._errors import InvalidArgument, StorageFailed, Timeout, WindlassError
from windlass.launch import CANNOT_BEGIN, environment
from windlass.launch.child import describe
from windlass.ray._actors import Ended, How, Process
from windlass.ray._job import Job
from windlass.ray._room import Room

_END_SECONDS = 6.0  # for an actor to say that its process has ended
_ANSWER_SECONDS = 5.0
_NODE_LOST = "its node has died"  # what Ray says, and nothing else that tells it


class NodeLost(WindlassError):
    """Ray has placed an actor on a node that it did not know to be dead."""


class Services:
    """Made at once and started by start(), so that actors of workers can be made in between."""

    def __init__(self, ray: Any, job: Job, room: Room, resume: str | None) -> None:
        self._ray = ray
        self._job = job
        self._room = room
        self._resume = resume
        self.cluster = secrets.randbelow(2**64 - 1) + 1
        self.address = ""  #: of the scheduler, once it has started
        kind = ray.remote(Process)
        self._scheduler = kind.options(**room.options(0, takes_nothing=True)).remote("scheduler", 0)
        self._servers = [kind.options(**room.options(i)).remote("server", i) for i in range(job.settings.servers)]
        self.ends: dict[Any, str] = {}  #: by what becomes known when one has ended, once they have started: its name

    def start(self) -> None:
        """Starts them; they find each other by themselves."""
        job, settings = self._job, self._job.settings
        self.address = self.reach(self._scheduler.listen.remote(), "the scheduler")
        common = environment.of_all(settings, self.address, self.cluster) | environment.of_services(settings)
        nodes = collections.Counter(self._room.node_of(i) for i in range(settings.servers))
        how = How(job.token, verbose=job.verbose, log_dir=job.log_dir, near=job.near)
        config = settings.config.read_text() if settings.config is not None and settings.quotas else None
        started = [
            self._scheduler.start.remote(
                ["scheduler"],
                common | environment.of_scheduler(settings, self._resume),
                how.but(config=config),
            )
        ]
        for i, server in enumerate(self._servers):
            theirs = how.but(
                cpus=job.of_server.get("CPU"),
                memory_bytes=job.of_server.get("memory"),
                beside=nodes[self._room.node_of(i)],
            )
            number = {"WINDLASS_NUMBER": str(i)}
            started.append(server.start.remote(["server"], common | number, theirs))
        self.reach(started, "servers and scheduler")
        self.ends = {self._scheduler.ended.remote(): "scheduler"}
        self.ends |= {server.ended.remote(): f"server {i}" for i, server in enumerate(self._servers)}

    def reach(self, refs: Any, what: str) -> Any:
        """What actors answer that may not be up yet. Raises Timeout with what is missing."""
        seconds = self._job.settings.start_timeout
        try:
            return self._ray.get(refs, timeout=seconds)
        except self._ray.exceptions.GetTimeoutError as error:
            raise Timeout(
                f"{self._job.who}: {what} did not start within {seconds:g} s\n{self._room.missing()}"
            ) from error
        except self._ray.exceptions.RayActorError as error:
            kind = NodeLost if _NODE_LOST in str(error) else WindlassError
            raise kind(f"{self._job.who}: {what} cannot start: {error}") from error

    def outcome(self, ref: Any) -> Ended:
        """How one of them has ended; also when its actor was lost."""
        try:
            ended: Ended = self._ray.get(ref)
            return ended
        except self._ray.exceptions.RayActorError as error:
            return Ended.lost(self.ends[ref], error)

    def refused(self, ended: Ended) -> WindlassError | None:
        """The error of one that cannot begin as it is told to."""
        return InvalidArgument(f"{self._job.who}: {ended.last_words.error}") if ended.code == CANNOT_BEGIN else None

    def status(self) -> dict[str, Any] | None:
        """What the scheduler says; None: nothing."""
        text = self._ask("status")
        return None if text is None else dict(json.loads(text))

    def fetch(self) -> str:
        """The same as JSON. Raises if there is none."""
        text = self._ask("status")
        if text is None:
            raise StorageFailed("the scheduler does not answer")
        return str(text)

    def save(self, app: str) -> str:
        """Asks for a checkpoint. Why there will be none, or nothing."""
        why = self._ask("save", app)
        return "the scheduler does not answer" if why is None else str(why)

    def _ask(self, method: str, *arguments: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(getattr(self._scheduler, method).remote(*arguments), timeout=_ANSWER_SECONDS)
        except (errors.RayActorError, errors.GetTimeoutError, errors.RayTaskError):
            return None

    @property
    def lives(self) -> bool:
        """Whether the scheduler does."""
        return "scheduler" in self.ends.values()

    def early(self) -> list[str]:
        """Those that have ended, and how."""
        if not self.ends:
            return []
        ready, _ = self._ray.wait(list(self.ends), num_returns=len(self.ends), timeout=0)
        found = [self.outcome(ref) for ref in ready]
        return [f"{ended.name} ended with {describe(ended.code)}" for ended in found]

    def end(self) -> None:
        """The scheduler first, which tells the servers; when this returns, their processes are gone."""
        for actors in ([self._scheduler], self._servers):
            end_all(self._ray, actors)


def end_all(ray: Any, actors: list[Any], *, politely: bool = True) -> None:
    """Ends actors; politely: those that have processes, whose end is waited for."""
    refs = [actor.end.remote() for actor in actors] if politely else []
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=_END_SECONDS)
    for actor in actors:
        ray.kill(actor)
