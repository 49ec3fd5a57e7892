"""A server as a member of a cluster."""

import itertools
import logging
import threading
import time
from typing import TYPE_CHECKING

from windlass import _core
from windlass._errors import Closed, ServerLost, Timeout, WindlassError
from windlass._net.address import Address
from windlass._net.move import send_shard
from windlass._net.serve import Stop
from windlass._net.tls import client_tls
from windlass._settings import SAVE_SECONDS, Settings
from windlass.control import messages as m
from windlass.control.consistency import sync_reports
from windlass.control.member import Member, here, new_incarnation

if TYPE_CHECKING:
    from windlass.control.checkpoints import ServerCheckpoints

_JOIN_SECONDS = 3.0
_ASKED_SECONDS = 2.0  # from SIGTERM to the order for a last checkpoint
_AWAY_SECONDS = 10.0  # for a scheduler that has a journal to come back and decide
_LOOK_SECONDS = 0.05
_MOVES_KEPT = 1024
_ORPHAN_LOOKS = 20  # in start_timeout
_log = logging.getLogger("windlass")


class ServerMember:
    """Joins, says what the server holds, and does what the scheduler orders."""

    def __init__(
        self, scheduler: Address, token: bytes, told: list[Address], host: _core.Host, settings: Settings, stop: Stop
    ) -> None:
        self._host = host
        self._token = token
        self._moving: dict[int, threading.Event] = {}  # by move: set when it is cancelled
        self._moved: dict[int, m.Moved] = {}  # what became of the latest: the scheduler may have that word on its way
        self._stop = stop
        self._settings = settings
        self._checkpoints: ServerCheckpoints | None = None
        self._closing = threading.Event()
        self._ending: threading.Thread | None = None
        self._leaving = False  # since SIGTERM
        self._retired = threading.Event()  # since we were told that it may be
        self.finished = False  #: the cluster has done its work
        join = m.Join(
            "server",
            new_incarnation(),
            rank=settings.number,
            addresses=[str(address) for address in told],
            **here(),
        )
        self._member = Member(scheduler, token, join, self._heard, client_tls(settings.tls_ca))
        self._member.report = self._report
        self._member.returned = self._say_ready

    def start(self) -> None:
        """Joins in the background: the server can be reached meanwhile, and lets nobody in who is of no cluster."""
        self._host.set_cluster(2**64 - 1, 0)  # nobody's, until the scheduler says whose
        self._joining = threading.Thread(target=self._join, name="windlass-join", daemon=True)
        self._joining.start()

    def _join(self) -> None:
        try:
            welcome = self._member.start(time.monotonic() + self._settings.start_timeout)
        except Closed:
            return
        except WindlassError as error:
            _log.error("server: %s", error)
            self._stop(1 if isinstance(error, (ServerLost, Timeout)) else self._refused_code)
            return
        self._host.set_cluster(welcome.cluster, welcome.index)
        self._say_ready()
        _log.info("server %d of cluster %016x", welcome.index, welcome.cluster)
        if not (self._settings.linger or welcome.linger):
            self._end_when_alone(welcome.index)

    def _end_when_alone(self, number: int) -> None:
        """Without a scheduler for start_timeout, and without a client: nobody would ever end this server."""
        patience = self._settings.start_timeout
        alone = away = 0.0  # for how long
        last = time.monotonic()
        while not self._closing.wait(patience / _ORPHAN_LOOKS):
            now = time.monotonic()
            passed, last = min(now - last, patience / 4), now  # if it was we who slept, it may come yet
            away = away + passed if self._member.away else 0.0
            alone = alone + passed if self._host.lanes == 0 else 0.0
            if away >= patience and alone >= min(patience, self._settings.failure_timeout):
                away_for = f"its scheduler at {self._member.address} has been away for {patience:g} s"
                _log.error("server %d ends: %s and no worker is connected (it stays with --linger)", number, away_for)
                self._stop(1)
                return

    def _say_ready(self) -> None:
        """Again whenever we come back: it may not have been heard."""
        self._member.tell(m.Ready())
        if self._leaving:
            self._member.tell(m.Leaving())

    def _heard(self, message: m.Message) -> None:
        match message:
            case m.Shutdown(why, unfinished):
                _log.info("server: the cluster ends: %s", why)
                self.finished = not unfinished
                self._stop(0)
            case m.Retire(why, drained):
                _log.info("server: %s: %s", "everything has moved to others" if drained else "ends", why)
                self._retired.set()
                if drained:
                    self._closing.set()
                    self._stop(0)
            case m.Refused(_, why):
                _log.error("server: the scheduler refused us: %s", why)
                self._stop(self._refused_code)
            case m.Quota(app, size):
                self._host.set_quota(app, size)
            case m.View():
                self._set_view(message)
            case m.Objects(placed):
                for one in placed:
                    self._host.know_object(_core.write_map(one.object, one.runs) + one.spec)
            case m.Forgotten(number):
                self._host.forget_object(number)
            case m.MoveShard(move) if (over := self._moved.get(move)) is not None:
                self._member.tell(over)
            case m.MoveShard(move) if move not in self._moving:
                cancelled = self._moving[move] = threading.Event()
                for old in list(self._moved)[:-_MOVES_KEPT]:
                    del self._moved[old]
                thread = threading.Thread(
                    target=self._move, args=(message, cancelled), name="windlass-move", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:  # no thread to be had: the shard stays
                    del self._moving[move]
                    self._member.tell(m.Moved(move, f"the shard stays: {error}"))
            case m.CancelMove():
                self._cancel(message)
            case m.Capture():
                self._shelf().save(message)
            case m.CaptureOver(save, complete):
                self._shelf().over(save, complete)
            case m.Load():
                self._shelf().load(message)

    @property
    def _refused_code(self) -> int:
        """Another cluster is there by now, or somebody has our number still: one that is started again may get in."""
        return int(self._settings.unfinished_code) or 1

    def stays(self) -> bool:
        """At SIGTERM: whether it ends by itself. If it alone was told to end, that is when others have all that it had;
        if all were, when a last checkpoint is written, for which workers ask soon, or not at all."""
        if self._member.away or not self._member.welcome.cluster:
            return False
        self._leaving = True
        if not self._member.tell(m.Leaving()):
            return False
        self._ending = threading.Thread(target=self._end_when_saved, name="windlass-end", daemon=True)
        self._ending.start()
        return True

    def _end_when_saved(self) -> None:
        """Once the scheduler has decided; or it is gone, too."""
        begun = time.monotonic()
        while not self._retired.wait(_LOOK_SECONDS):
            if self._closing.is_set():
                return
            if not self._member.away:
                begun = time.monotonic()
            elif time.monotonic() - begun > (_AWAY_SECONDS if self._member.welcome.generation else _ASKED_SECONDS):
                break
        begun = time.monotonic()
        while (waited := time.monotonic() - begun) < SAVE_SECONDS:
            going = self._checkpoints is not None and self._checkpoints.going
            if self._settings.checkpoint_dir is None or (not going and waited > _ASKED_SECONDS):
                break
            if self._closing.wait(_LOOK_SECONDS):
                return
        self._stop(0)

    def _shelf(self) -> "ServerCheckpoints":
        """Few clusters save."""
        if self._checkpoints is None:
            from windlass.control.checkpoints import ServerCheckpoints

            self._checkpoints = ServerCheckpoints(self._host, self._member, self._settings)
        return self._checkpoints

    def _set_view(self, view: m.View) -> None:
        """The core ignores one that is older than what it has. Who comes late is waited for once it has begun, but who
        comes in a lost worker's place at once."""
        workers = [(peer.index, peer.incarnation, peer.since == view.started) for peer in view.workers]
        waited = [*view.waited, *(peer.index for peer in view.workers if peer.instead)]
        self._host.set_view(view.app, view.number, workers, waited, view.clock)

    def _cancel(self, order: m.CancelMove) -> None:
        """Who is at it says what became of it; else the shard has left or is here."""
        if (cancelled := self._moving.get(order.move)) is not None:
            cancelled.set()
            return
        try:
            left = self._host.whereabouts(order.object, order.shard) == (order.server, order.term)
        except WindlassError:  # the order never came, and nobody else told us of the object
            left = False
        self._member.tell(m.Moved(order.move, "" if left else f"server {order.server} is gone; the shard stays"))

    def _move(self, order: m.MoveShard, cancelled: threading.Event) -> None:
        """Says what became of it. An order that was given twice is carried out once, and answered twice."""
        error = ""
        try:
            self._host.attach(_core.write_map(order.object, order.runs) + order.spec)
            send_shard(
                self._host,
                order.object,
                order.shard,
                to=Address.parse(order.address),
                token=self._token,
                server=order.server,
                term=order.term,
                deadline=time.monotonic() + self._settings.failure_timeout,
                cancelled=cancelled,
            )
        except WindlassError as failure:
            error = str(failure)
            _log.warning("server: %s", error)
        said = self._moved[order.move] = m.Moved(order.move, error[: m.TEXT_CHARS_MAX])
        del self._moving[order.move]
        self._member.tell(said)

    def _report(self) -> m.Report:
        host = self._host
        requests, bytes_in, bytes_out = host.traffic
        return m.Report(
            memory_bytes=host.memory_bytes,
            memory_bytes_max=self._settings.memory_bytes_max,
            sessions=host.sessions,
            requests=requests,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            quotas_used=host.quotas_used,
            sync=sync_reports(host.sync_stats()),
            saved_bytes=0 if self._checkpoints is None else self._checkpoints.captured_bytes,
            tables=dict(itertools.islice(host.table_sizes.items(), m.TABLES_MAX)),
        )

    def close(self) -> None:
        """Leaves."""
        self._closing.set()
        if self._ending is not None:
            self._ending.join()
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._member.close()
        self._joining.join(_JOIN_SECONDS)
        self._member.close()  # it may have come in meanwhile
