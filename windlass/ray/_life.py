"""One life of a run: from the start of its processes to their end, or to the loss of a server.

What becomes of workers that fail is as in `windlass run` (windlass/launch/run.py):

    killed    wait: started again, with its rank and in its bundle; continue: the others go on, and the run may succeed
    failed    wait: the same; continue: the others go on, and the run has failed

A life has no thread of its own; wait() looks at what Ray has to tell.
"""

import collections
import math
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from windlass._errors import ServerLost, WindlassError
from windlass._settings import SAVE_SECONDS
from windlass.launch import CANNOT_BEGIN, GROUP_LOST, environment
from windlass.launch.child import describe
from windlass.launch.failures import Failures
from windlass.launch.last_save import LastSave, newest_in
from windlass.launch.run import END_SECONDS, REPLACEMENTS_MAX
from windlass.ray._actors import Caller, Ended, Here, How, Process, why_lost
from windlass.ray._interrupts import Interrupts
from windlass.ray._job import Job
from windlass.ray._room import Room
from windlass.ray._services import Services, end_all

if TYPE_CHECKING:
    from windlass.observe.display import Display

_LOOK_SECONDS = 0.25  # between two looks at what Ray does not tell
_SERVER_SECONDS = 2.0  # for the end of a server to be known after a worker has noticed it


class WorkerLost(WindlassError):
    """A worker's process has died, and nobody has done its work."""


class Failure:
    """How a worker failed: by an end of its process that was seen, by an exception, or with its actor."""

    def __init__(
        self, rank: int, *, ended: Ended | None = None, raised: Exception | None = None, lost: str = ""
    ) -> None:
        self.rank = rank
        self.ended = ended
        self.raised = raised
        self._lost = lost

    @property
    def code(self) -> int:
        """Its exit code, or the signal with a minus; that of an exception is Python's."""
        if self.ended is not None:
            return self.ended.code
        return -signal.SIGKILL if self._lost else 1

    @property
    def why(self) -> str:
        """In words."""
        if self.raised is not None:
            cause = getattr(self.raised, "cause", self.raised)
            return f"raised {type(cause).__name__}: {cause}"
        return f"was lost: {self._lost}" if self.ended is None else f"ended with {describe(self.code)}"

    @property
    def says_server_lost(self) -> bool:
        """Whether the end of a server may be the cause."""
        words = "" if self.ended is None else self.ended.last_words.error
        return isinstance(self.raised, ServerLost) or "ServerLost" in words.partition(":")[0]

    def tell(self, failures: Failures, say: Callable[[str], object], then: str) -> None:
        """Says it, and what happens now."""
        if self.ended is not None:
            failures.tell(self.ended, then)
        else:
            say(f"worker {self.rank} {self.why}{then}")


class Life:
    """See the head of this file."""

    def __init__(self, ray: Any, job: Job, room: Room, resume: str | None, work: Any) -> None:
        self._ray = ray
        self._job = job
        self._room = room
        self._work = work  # where Ray keeps what workers call
        self._failures = Failures(job.say)
        self._services = Services(ray, job, room, resume)
        self._kind = ray.remote(Process if job.script is not None else Caller)
        self._workers: dict[int, Any] = {}  # actors, by rank
        for rank in range(job.workers):
            self._make(rank)
        self._here: dict[int, Here] = {}
        self._coming: dict[Any, int] = {}  # by what tells where it is: ranks that are started again
        self._running: dict[Any, int] = {}  # by what tells how it ended
        self._starts: collections.Counter[int] = collections.Counter()
        self._undecided: list[Failure] = []  # until it is known whether the others go on
        self._gone = False  # a server or the scheduler
        self._lost_code = 1  # of the server that was lost
        self.over = False  #: the others cannot go on
        self.results: dict[int, Any] = {}  #: by rank
        self.lost_workers: list[Failure] = []  #: without which the others went on
        self.failed: Failure | None = None  #: the first for which there was no replacement
        self.refused: WindlassError | None = None  #: by a server that cannot begin as it is told to
        self.lost: str | None = None  #: the server whose end was the end of all, with checkpoints to go on from

    def _make(self, rank: int) -> None:
        options = self._room.options(self._job.settings.servers + rank)
        arguments = ("worker", rank) if self._job.script is not None else (rank,)
        self._workers[rank] = self._kind.options(**options).remote(*arguments)

    # -- starting ----------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """The scheduler's."""
        return self._services.address

    def begin(self) -> None:
        """Starts everything."""
        self._services.start()
        ranks = list(self._workers)
        asked = [self._workers[rank].here.remote() for rank in ranks]
        self._here = dict(zip(ranks, self._services.reach(asked, "workers"), strict=True))
        for rank in ranks:
            self._start(rank)

    def _start(self, rank: int) -> None:
        actor, how = self._workers[rank], How(self._job.token, log_dir=self._job.log_dir, again=self._starts[rank] > 0)
        self._starts[rank] += 1
        theirs = self._environment(rank)
        if self._job.script is None:
            self._running[actor.call.remote(theirs, how, self._work)] = rank
        else:
            self._running[actor.run.remote(self._job.script, theirs, how)] = rank

    def _environment(self, rank: int) -> dict[str, str]:
        settings, at = self._job.settings, self._here[rank]
        beside = sorted(other for other, there in self._here.items() if there.node == at.node)
        found = environment.of_all(settings, self._services.address, self._services.cluster)
        found |= environment.of_worker(settings, rank)
        found |= {
            "LOCAL_RANK": str(beside.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(beside)),
            "MASTER_ADDR": self._here[0].ip,
            "MASTER_PORT": str(self._here[0].port),
        }
        gpus = [gpu for other in beside for gpu in self._here[other].gpus]
        if self._job.script is not None and gpus:  # so that LOCAL_RANK means what it does under other launchers
            found["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(gpus))
        return found

    # -- running -----------------------------------------------------------------------------------------------------

    def wait(self, interrupts: Interrupts, display: "Display | None" = None) -> None:
        """Until the workers are done or cannot go on, and what is being saved is saved."""
        try:
            while (self._running or self._coming) and not self.over and interrupts.first is None:
                self._look(_LOOK_SECONDS)
                if display is not None:
                    display.look()
                if self._undecided:
                    self._decide()
        finally:
            if display is not None:
                display.close(show=interrupts.first is None)
        self._tell_undecided()
        if self._job.settings.checkpoint_dir is not None and self.lost is None:
            self._finish_checkpoints(interrupts)

    def _look(self, seconds: float) -> None:
        """Handles what has happened, waiting for something to."""
        refs = [*self._services.ends, *self._coming, *self._running]  # a server's end before that of workers
        ready, _ = self._ray.wait(refs, num_returns=1, timeout=seconds)
        if ready:
            ready = set(self._ray.wait(refs, num_returns=len(refs), timeout=0)[0])
        for ref in [ref for ref in refs if ref in ready]:
            if ref in self._services.ends:
                self._service_ended(ref)
            elif ref in self._coming:
                self._came(ref)
            else:
                self._worker_ended(ref)

    def _service_ended(self, ref: Any) -> None:
        ended = self._services.outcome(ref)
        del self._services.ends[ref]
        self._gone = True
        self.refused = self.refused or self._services.refused(ended)
        if self.refused is not None:
            self.over = True
        elif ended.role == "server" and self._job.settings.checkpoint_dir is not None and not self.over:
            self.lost, self.over = f"{ended.name} ended with {describe(ended.code)}", True
            self._lost_code = ended.code
        else:
            self._failures.tell(ended)

    def _came(self, ref: Any) -> None:
        """An actor in place of one that was lost is there."""
        rank = self._coming.pop(ref)
        try:
            self._here[rank] = self._ray.get(ref)
            self._start(rank)
        except self._ray.exceptions.RayActorError as error:
            self._starts[rank] += 1
            self._worker_failed(Failure(rank, lost=why_lost(error)))

    def _worker_ended(self, ref: Any) -> None:
        rank = self._running.pop(ref)
        try:
            result = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            error.add_note(f"raised by worker {rank} of {self._job.workers}, on {self._here[rank].ip}")
            self._worker_failed(Failure(rank, raised=error))
        except self._ray.exceptions.RayActorError as error:
            self._worker_failed(Failure(rank, lost=why_lost(error)))
        else:
            if self._job.script is not None and result.code != 0:
                self._worker_failed(Failure(rank, ended=result))
            else:
                self.results[rank] = result

    def _worker_failed(self, failure: Failure) -> None:
        """The others go on, unless they could not; or it is replaced."""
        settings, rank = self._job.settings, failure.rank
        if failure.says_server_lost and settings.checkpoint_dir is not None:
            self._await_server()
            self.lost = self.lost or f"worker {rank} {failure.why}"  # a node that is out of reach tells nothing itself
            self.over = True
            return
        waits = settings.on_worker_loss == "wait"
        if waits and failure.code != GROUP_LOST and self._starts[rank] <= REPLACEMENTS_MAX and not self._gone:
            then = f"; replacement {self._starts[rank]} of {REPLACEMENTS_MAX} starts"
            failure.tell(self._failures, self._job.say, then)
            self._failures.forgive()
            end_all(self._ray, [self._workers[rank]], politely=False)
            self._make(rank)
            self._coming[self._workers[rank].here.remote()] = rank
            return
        if failure.code < 0 and not waits and (self._running or self.results):
            self.lost_workers.append(failure)
        else:
            self.failed = self.failed or failure
        self.over = self.over or waits or failure.code == GROUP_LOST
        self._undecided.append(failure)

    def _await_server(self) -> None:
        """The end of a server that a worker has noticed first."""
        deadline = time.monotonic() + _SERVER_SECONDS
        while self.lost is None and self._services.ends and time.monotonic() < deadline:
            ready, _ = self._ray.wait(list(self._services.ends), num_returns=1, timeout=_LOOK_SECONDS)
            for ref in ready:
                self._service_ended(ref)

    def _decide(self) -> None:
        """Whether the others go on: not before all have come once, since they wait for the one that failed."""
        if self.over or (status := self._services.status()) is None:
            return
        if any(app["view"] > 0 for app in status["apps"]):
            self._tell_undecided()
        else:
            self.over = True
            self.failed = self.failed or self._undecided[0]

    def _tell_undecided(self) -> None:
        then = "; the others go on" if self._running and not self.over and not self._gone else ""
        while self._undecided:
            self._undecided.pop(0).tell(self._failures, self._job.say, then)

    # -- ending ------------------------------------------------------------------------------------------------------

    def _finish_checkpoints(self, interrupts: Interrupts) -> None:
        """Servers stay until what is being written is written; at SIGTERM one more checkpoint is taken first."""
        deadline = time.monotonic() + (SAVE_SECONDS if interrupts.first is not None else math.inf)
        asked = bool(interrupts.one_more and self._running)
        before = newest_in(self._services.status()) if asked else None
        if asked and (why := self._services.save(self._job.settings.app)):
            self._job.say(f"no checkpoint: {why}")
            asked = False
        elif asked:
            self._job.say(
                f"takes a checkpoint before it ends, within {SAVE_SECONDS:g} s; a second signal ends it at once"
            )
        last = LastSave(asked, before)
        while time.monotonic() < deadline and not interrupts.again and self._services.lives:
            if last.is_over(self._services.status()):
                break
            self._look(_LOOK_SECONDS)

    def fetch(self) -> str:
        """The JSON of the status. Raises if there is none."""
        return self._services.fetch()

    def end(self) -> None:
        """Ends what still runs: workers first. When this returns, the processes of the run are gone."""
        end_all(self._ray, list(self._workers.values()), politely=self._job.script is not None)
        if self._running:
            self._ray.wait(list(self._running), num_returns=len(self._running), timeout=END_SECONDS)
        self._services.end()

    def exit_code(self) -> int:
        """0, or that of what the run has failed with, which is said."""
        if self.refused is not None:
            self._job.say(str(self.refused))
            return CANNOT_BEGIN
        if self.lost is not None:
            self._job.say(self.lost)
            return _positive(self._lost_code)
        for failure in self.lost_workers:
            self._job.say(f"done by the others; worker {failure.rank} was lost")
        if self.failed is None:
            return 0
        code = _positive(self.failed.code)
        if self.failed.ended is not None:
            self._failures.conclude(self.failed.ended, code, False)
        return code


def _positive(code: int) -> int:
    """As a shell says it."""
    return code if code > 0 else 128 - code
