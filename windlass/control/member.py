"""A member's side of the control plane: one thread that listens to the scheduler, one that sees to the heartbeat.

When the scheduler is away, pushes and pulls go on, which do not pass through it; the member says so once, and comes
back under its incarnation as soon as it can. Questions wait for that, within their timeout. A scheduler that keeps a
journal may be another process when it is back, of a higher generation; one of a lower generation is not listened to.

A member that leaves says so and goes on listening and beating until the scheduler closes the connection: whoever hangs
up first resets the connection when the next message comes, and then the scheduler may never read what was said before.
"""

import contextlib
import logging
import math
import os
import pathlib
import random
import secrets
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import msgspec

from windlass import _core, _errors
from windlass._errors import AccessDenied, Closed, ProtocolError, RankTaken, ServerLost, Timeout, WindlassError
from windlass._net.address import Address, Attempts, why
from windlass._release import owns_native
from windlass.control import messages as m
from windlass.control.auth import REFUSAL, check_confirm, make_answer
from windlass.control.websocket import ClosedByScheduler, WebSocket, frame

_ATTEMPT_SECONDS = 2.0
_PAUSE_SECONDS = (0.02, 0.5)  # between attempts: the first, and the most it grows to
_CLOSE_SECONDS = 2.0
_FAREWELL_SECONDS = 10.0  # for the scheduler to take note of it
_PATIENT_SECONDS = 30.0  # the same, of a worker whose scheduler is away and has a journal: it will come back
_REPORT_SECONDS = 1.0
_LOOK_SECONDS = 0.1
_log = logging.getLogger("windlass")


def error_of(name: str, text: str) -> WindlassError:
    """The exception that the scheduler means."""
    kind = getattr(_errors, name, WindlassError)
    return kind(text) if isinstance(kind, type) and issubclass(kind, WindlassError) else WindlassError(text)


def connect(
    address: Address,
    path: str,
    token: bytes,
    deadline: float,
    tls: ssl.SSLContext | None,
    attempts: Attempts | None = None,
) -> WebSocket:
    """A connection both of whose ends have proved that they know the token."""
    ws = WebSocket.open(address, path, deadline, tls, attempts)
    try:
        challenge = ws.receive(deadline)
        answer = make_answer(token, challenge)
        ws.send(answer)
        confirm = ws.receive(deadline)
        if confirm == REFUSAL:
            raise AccessDenied(f"the scheduler at {address} refused us: it has another token, or none")
        if not check_confirm(token, challenge, answer, confirm):
            raise AccessDenied(f"the scheduler at {address} does not know the token")
        return ws
    except BaseException as error:
        ws.close()
        ws.end()
        raise _in_our_words(error, f"connect to the scheduler at {address}") from error


def _in_our_words(error: BaseException, what: str) -> BaseException:
    if isinstance(error, WindlassError) or not isinstance(error, OSError):
        return error
    if isinstance(error, TimeoutError):
        return Timeout(f"{what}: no answer within the time allowed")
    return ServerLost(f"{what}: {why(error)}")


@owns_native("_beat")
class Member:
    """One process's membership. `heard` is called with every message that is no answer, from the listening thread."""

    def __init__(
        self,
        address: Address,
        token: bytes,
        join: m.Join,
        heard: Callable[[m.Message], None],
        tls: ssl.SSLContext | None = None,
        *,
        beats: bool = True,
    ) -> None:
        self._beats = beats
        self.address = address
        self.join = join
        self.welcome = m.Welcome(0, 0, 10.0, 1.0)
        self._token = token
        self._heard = heard
        self.report: Callable[[], m.Message | None] = lambda: None  # what is told every second or so
        self.again: Callable[[m.Join], m.Join] = lambda join: join  # what is said when we come back
        self.returned: Callable[[], None] = lambda: None  # called when we have come back
        self._tls = tls
        self._lock = threading.Condition()  # of what follows
        self._ws: WebSocket | None = None
        self._answers: dict[int, m.Answer | None] = {}
        self._next = 1
        self._ended: WindlassError | None = None
        self._farewell: m.Leave | None = None
        self._leaving = threading.Event()  # since there is a farewell to be said, or the scheduler ends the cluster
        self._closed = threading.Event()  # since everything is over
        self._retry_seconds = 0.0  # what the scheduler said when it refused
        self._retry_told = False
        self._process = os.getpid()
        self._beat: _core.Heartbeat | None = None
        self.beating = threading.Event()  # since the first heartbeat
        self._reported: m.Message | None = None
        self._threads: list[threading.Thread] = []
        self._attempts = Attempts()  # of the threads
        _members.add(self)

    @property
    def ended(self) -> WindlassError | None:
        """What the scheduler ended the membership with."""
        return self._ended

    @property
    def over(self) -> bool:
        """Whether the cluster has ended, or the scheduler has given us up."""
        return self._ended is not None or self._leaving.is_set()

    @property
    def away(self) -> bool:
        """Whether there is no connection to the scheduler at the moment."""
        return self._ws is None

    def start(self, deadline: float, *, once: bool = False) -> m.Welcome:
        """Joins, trying for as long as the deadline allows. Raises what the scheduler refuses with.

        Who finds its rank taken tries again for as long as the scheduler says: whoever has it may have died just now.
        once: without another attempt.
        """
        pause = _PAUSE_SECONDS[0]
        while True:
            try:
                self._attach(self._greet(min(deadline, time.monotonic() + _ATTEMPT_SECONDS)))
                break
            except (ServerLost, Timeout, RankTaken) as error:
                if isinstance(error, RankTaken) and not self._retry_told:
                    self._retry_told = True
                    deadline = min(deadline, time.monotonic() + self._retry_seconds)
                    _log.warning("%s; tries again for %g s", error, max(0.0, deadline - time.monotonic()))
                if once or time.monotonic() + pause >= deadline:
                    raise
                if self._leaving.wait(pause):
                    raise Closed("the membership was closed") from None
                pause = min(2 * pause, _PAUSE_SECONDS[1])
        tasks = [("windlass-control", self._listen), ("windlass-beat", self._see_to_heartbeat)]
        for name, target in tasks if self._beats else tasks[:1]:
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        return self.welcome

    def _greet(self, deadline: float) -> WebSocket:
        ws = connect(self.address, "/control", self._token, deadline, self._tls, self._attempts)
        try:
            ws.send(m.encode(self._join()))
            match first := m.read_scheduler(ws.receive(deadline)):
                case m.Welcome(generation=generation) if generation < self.welcome.generation:
                    older = f"generation {generation}, and we know {self.welcome.generation}"
                    raise ServerLost(f"the scheduler at {self.address} is an older one: {older}")
                case m.Welcome():
                    self.welcome = first
                    # From now on a scheduler of another cluster at the same address is to refuse us.
                    self.join = msgspec.structs.replace(self.join, cluster=first.cluster)
                    ws.notice_silence(first.failure_timeout)
                    return ws
                case m.Refused(error, text, retry_seconds):
                    self._retry_seconds = retry_seconds
                    raise error_of(error, f"the scheduler at {self.address} refused: {text}")
                case _:
                    raise ProtocolError(f"the scheduler at {self.address}: expected a welcome, saw {first!r}")
        except BaseException as error:
            ws.close()
            ws.end()
            if isinstance(error, m.Malformed):
                raise ProtocolError(f"the scheduler at {self.address}: {error}") from error
            raise _in_our_words(error, f"join the scheduler at {self.address}") from error

    def _join(self) -> m.Join:
        """With what is to be said again, once we have been there."""
        return self.again(self.join) if self.welcome.cluster else self.join

    def _attach(self, ws: WebSocket) -> None:
        with self._lock:
            self._ws = ws
            self._lock.notify_all()
        if self._farewell is not None:
            self.tell(self._farewell)

    def _listen(self) -> None:
        while not self._closed.is_set():
            if self._ws is None:
                self._come_back()
                continue
            try:
                self._take(m.read_scheduler(self._ws.receive()))
            except (OSError, m.Malformed) as error:
                self._drop()
                if not self._leaving.is_set():
                    why_away = str(error) or type(error).__name__
                    _log.warning("the scheduler at %s is away (%s); pushes and pulls continue", self.address, why_away)
                elif self._farewell is None or isinstance(error, ClosedByScheduler):
                    break
        self._drop()
        self._stop_beating()

    def _stop_beating(self) -> None:
        self._closed.set()
        if self._beat is not None:
            self._beat.stop()

    def _drop(self) -> None:
        with self._lock:
            ws, self._ws = self._ws, None
        if ws is not None:
            ws.close()
            ws.end()

    def _come_back(self) -> None:
        """For a farewell one attempt is enough: a scheduler that is not there or knows us no more waits for nobody. One
        that has a journal will be back, and miss a worker that says nothing."""
        pause, begun = _PAUSE_SECONDS[0], time.monotonic()
        while not self._closed.is_set():
            (self._closed if self._leaving.is_set() else self._leaving).wait(pause * random.uniform(0.5, 1.0))
            try:
                ws = self._greet(time.monotonic() + _ATTEMPT_SECONDS)
            except WindlassError as error:
                patient = self._is_patient and isinstance(error, (ServerLost, Timeout))
                if self._leaving.is_set() and not (patient and time.monotonic() - begun < _PATIENT_SECONDS):
                    self._closed.set()
                    return
                if isinstance(error, (ServerLost, Timeout)):
                    pause = min(2 * pause, _PAUSE_SECONDS[1])
                    continue
                _log.error("%s", error)  # somebody else's scheduler, or we were given up
                self._end(error)
                self._heard(m.Refused(type(error).__name__, str(error)))
                return
            _log.warning("the scheduler at %s is back", self.address)
            self._attach(ws)
            self._reported = None  # it may be another
            if self._farewell is None:
                self.returned()
            return

    @property
    def _is_patient(self) -> bool:
        """Whether a farewell waits for the scheduler to be back."""
        return self.join.role == "worker" and self.welcome.generation > 0 and self._farewell is not None

    def _take(self, message: m.Message) -> None:
        if self._farewell is not None:
            return  # nobody here needs to know any more
        match message:
            case m.Answer(number):
                with self._lock:
                    if number in self._answers:
                        self._answers[number] = message
                        self._lock.notify_all()
            case m.Welcome():
                self.welcome = message
            case m.Shutdown() | m.Retire(drained=True):
                self._leaving.set()
                self._heard(message)
            case m.Refused(error, text):
                self._end(error_of(error, f"the scheduler at {self.address}: {text}"))
                self._heard(message)
            case _:
                self._heard(message)

    def _end(self, error: WindlassError) -> None:
        with self._lock:
            self._ended = error
            self._lock.notify_all()
        self._stop_beating()

    def tell(self, message: m.Message) -> bool:
        """Says something that needs no answer; False when the scheduler is away."""
        ws = self._ws
        if ws is None:
            return False
        try:
            ws.send(m.encode(message))
            return True
        except OSError:
            return False

    def ask(self, make: Callable[[int], m.Question], what: str, timeout: float) -> m.Answer:
        """Asks, again where the scheduler was away meanwhile. Raises Timeout, or what the scheduler refuses with."""
        deadline = time.monotonic() + timeout
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._answers[number] = None
        question, asked = make(number), None
        try:
            with self._lock:
                while (answer := self._answers[number]) is None:
                    if self._ended is not None:
                        raise self._ended
                    if self._farewell is not None or (self._leaving.is_set() and self._ws is None):
                        raise Closed(f"{what}: the cluster has been closed")
                    if self._ws is not None and self._ws is not asked:
                        asked = self._ws
                        with contextlib.suppress(OSError):  # the listening thread notices
                            asked.send(m.encode(question))
                    left = deadline - time.monotonic()
                    if left <= 0:
                        away = "which is away" if self._ws is None else "which does not answer"
                        raise Timeout(f"{what}: waiting for the scheduler at {self.address}, {away}")
                    self._lock.wait(min(left, 1.0))
        finally:
            with self._lock:
                del self._answers[number]
        if answer.error:
            raise error_of(answer.error, answer.why)
        return answer

    def _see_to_heartbeat(self) -> None:
        """A connection that is broken is made again at once: the scheduler waits for failure_timeout."""
        pause = _PAUSE_SECONDS[0]
        while not self._closed.is_set():
            begun = time.monotonic()
            with contextlib.suppress(WindlassError, OSError):
                deadline = begun + _ATTEMPT_SECONDS
                ws = connect(self.address, "/heartbeat", self._token, deadline, self._tls, self._attempts)
                self._beat_over(ws)
            if time.monotonic() - begun > _REPORT_SECONDS:
                pause = _PAUSE_SECONDS[0]
            elif not self._closed.wait(pause):
                pause = min(2 * pause, _PAUSE_SECONDS[1])

    def _beat_over(self, ws: WebSocket) -> None:
        """Until the connection is broken."""
        ws.send(self.join.incarnation.to_bytes(8, "little"))
        if self._tls is not None:
            self._beat_in_python(ws)
            return
        beat = self._beat = _core.Heartbeat(ws.detach(), frame(b"\0"), self.welcome.beat_seconds)
        self.beating.set()
        while not self._closed.is_set() and not beat.wait(_REPORT_SECONDS):
            self._tell_report()
        beat.stop()

    def _beat_in_python(self, ws: WebSocket) -> None:
        """What is encrypted only Python can write: here a GIL that is held for long does look like a death."""
        self.beating.set()
        with contextlib.suppress(OSError):
            while not self._closed.wait(self.welcome.beat_seconds):
                ws.send(b"\0")
                self._tell_report()
        ws.close()
        ws.end()

    def _tell_report(self) -> None:
        if (report := self.report()) is not None and report != self._reported:
            self._reported = report
            self.tell(report)

    def close(self, *, failed: bool = False, why_: str = "", timeout: float = math.inf) -> None:
        """Leaves, and waits until the scheduler knows. Idempotent; in the child of a fork it does nothing."""
        if self._process != os.getpid():
            return
        if self._farewell is None and not self._closed.is_set():
            self._tell_report()  # the last one, which may be younger than a second
            with self._lock:
                self._farewell = m.Leave(failed, why_)
                self._lock.notify_all()
            self._leaving.set()
            self.tell(self._farewell)
        if not self._threads or threading.current_thread() in self._threads:
            return  # the one that listens, or is about to, sees to the rest
        begun, patience = time.monotonic(), _FAREWELL_SECONDS
        while self._threads[0].is_alive() and (left := begun + min(timeout, patience) - time.monotonic()) > 0:
            self._threads[0].join(min(left, _LOOK_SECONDS))
            if self._is_patient and self.away and patience < _PATIENT_SECONDS and not self._closed.is_set():
                _log.warning("the scheduler at %s is away; waits for it to take note of the end", self.address)
                patience = _PATIENT_SECONDS
        self._stop_beating()
        if (ws := self._ws) is not None:
            ws.close()
        self._attempts.end(self._threads, time.monotonic() + _CLOSE_SECONDS)
        self._beat = None


_members: "weakref.WeakSet[Member]" = weakref.WeakSet()


def close_all(failed: bool, timeout: float) -> bool:
    """At the end of a process: those whose owner is gone leave, too. Whether there was any."""
    living = [member for member in list(_members) if any(thread.is_alive() for thread in member._threads)]
    for member in living:
        member.close(failed=failed, timeout=timeout)
    return bool(living)


def _forget() -> None:
    """In the child of a fork: the connections are the parent's."""
    for member in list(_members):
        if (ws := member._ws) is not None:
            member._ws = None
            ws.end()


os.register_at_fork(after_in_child=_forget)


def new_incarnation() -> int:
    """A random number that is not 0."""
    return secrets.randbelow(2**64 - 1) + 1


def here() -> dict[str, Any]:
    """What every join says of its process."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "home": home()}


def home() -> str:
    """This boot of this host, and the namespace that numbers of processes are from; "": that cannot be found out."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
