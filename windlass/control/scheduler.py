"""The scheduler process: a thin shell around the state machine.

    /control        a member's WebSocket: challenge, answer, confirm, Join, then messages both ways
    /heartbeat      its second one, on which only its beats arrive
    /api/v1/status  what `windlass status` shows, as JSON; /metrics for Prometheus: with a Bearer value
    /healthz        "ok", for anybody

The shell knows sockets and time, and nothing else.

With a journal, what the state machine wants kept is on disk before anything that follows from it is done: a thread
writes, and whatever happens meanwhile waits behind it and is written together. Heartbeats, reports and leases change no
row, and wait only behind one that does.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import WSMsgType, web

from windlass import _core
from windlass._net.address import Address, bound_to
from windlass._net.address import listen as listen_on
from windlass._net.serve import told_by_end_of, told_by_signal
from windlass._settings import SAVE_SECONDS
from windlass._specs import settled_in
from windlass.control import kept
from windlass.control import messages as m
from windlass.control.api import metrics_text, status_of
from windlass.control.auth import ANSWER_BYTES, REFUSAL, check_answer, check_bearer, make_challenge, make_confirm
from windlass.control.browsers import refuse_other_sites
from windlass.control.door import STRANGER_SECONDS, Door
from windlass.control.events import (
    Action,
    Admit,
    Came,
    Cut,
    Defer,
    Died,
    End,
    Event,
    Fired,
    Keep,
    Log,
    Refuse,
    Said,
    SaveManifest,
    Tell,
    Timer,
    Written,
)
from windlass.control.evidence import Evidence
from windlass.control.kept import Key
from windlass.control.liveness import Liveness
from windlass.control.model import Spec, Terms
from windlass.control.state import State

if TYPE_CHECKING:
    from windlass.control.journal import Journal
    from windlass.control.manifests import Checkpoints

QUEUE_MESSAGES_MAX = 1024  # to one member that does not read
_BACKLOG = 256  # also how many the event loop accepts at once
_GOODBYE_SECONDS = 2.0
_PRUNE_SECONDS = 30.0
_CUT_OFF = "more than half of the members are silent: this host may be cut off; nobody is given up for silence soon"
_AGAIN_SECONDS = 1.0  # to the next try of the journal, where the disk is full
_log = logging.getLogger("windlass.scheduler")


def read_spec(data: bytes) -> Spec:
    """What the core makes of the bytes of a spec."""
    return Spec(*_core.read_spec(data), settled_in(data), _core.spec_facts(data)[6])


class _Line:
    """What goes out to one member; a task of its own sends it."""

    def __init__(self, ws: web.WebSocketResponse, transport: asyncio.Transport | None) -> None:
        self.ws = ws
        self._transport = transport
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUE_MESSAGES_MAX)
        self.task = asyncio.get_running_loop().create_task(self._send())

    def put(self, data: bytes | None) -> bool:
        try:
            self.queue.put_nowait(data)
            return True
        except asyncio.QueueFull:
            return False

    async def _send(self) -> None:
        try:
            while (data := await self.queue.get()) is not None:
                await self.ws.send_bytes(data)
        except (ConnectionError, RuntimeError):
            return  # whoever reads from it notices, after all that was said before
        await self.ws.close()

    def abort(self) -> None:
        """Ends it at once, with all that was to be sent."""
        self.task.cancel()
        if self._transport is not None:
            self._transport.abort()


class Scheduler:
    """See the head of this file. Lives in one event loop."""

    def __init__(
        self,
        terms: Terms,
        token: bytes | None,
        settings: dict[str, object] | None = None,
        checkpoints: "Checkpoints | None" = None,
        journal: "Journal | None" = None,
    ) -> None:
        resume = None if checkpoints is None else checkpoints.resume
        self.state = State(terms, read_spec, _core.same_spec, resume)
        self.journal = journal
        self._behind: list[tuple[list[Keep], list[Action], asyncio.Future[None]]] = []  # what waits for the journal
        self._writing: asyncio.Task[None] | None = None
        if journal is not None:
            self.state.keeps, self.state.generation = True, journal.generation
            if journal.rows:
                self.state.restore(journal.rows, self._written_at)
                journal.rows = {}
        self._checkpoints = checkpoints
        self._tasks: set[asyncio.Task[None]] = set()
        self.settings = settings or {}
        self.started_at = time.time()
        self.ended = asyncio.Event()
        self.end = End(False, "")
        self._token = token or b""
        self._needs_bearer = token is not None
        self._lines: dict[int, _Line] = {}  # by connection
        self._line_of: dict[int, _Line] = {}  # by member
        self._alive = Liveness(terms.failure_timeout)
        self._evidence = Evidence(lambda member, how: self._alive.gone(member, how, self._now()))
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._next_connection = 1
        self._door: Door | None = None
        self._encoded: tuple[m.Message, bytes] | None = None  # the last one: views go to many

    # -- the state machine -------------------------------------------------------------------------------------------

    def _written_at(self, one: kept.Saving) -> float | None:
        return None if self._checkpoints is None else self._checkpoints.written_at(one.app, one.clock, one.id)

    def feed(self, event: Event) -> "asyncio.Future[None] | None":
        """Handles an event and does what follows from it. None: it is done; else when that is."""
        return self._do(self.state.handle(event))

    def _do(self, actions: list[Action]) -> "asyncio.Future[None] | None":
        keeps = [action for action in actions if isinstance(action, Keep)]
        if self.journal is None or (not keeps and self._writing is None):
            self._act(actions)
            return None
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._behind.append((keeps, actions[len(keeps) :], done))
        if self._writing is None:
            self._writing = loop.create_task(self._write())
        return done

    async def _write(self) -> None:
        """All that has come by now is one transaction, and done in order."""
        assert self.journal is not None
        while self._behind:
            batch, self._behind = self._behind, []
            rows: dict[Key, bytes | None] = {(one.table, one.key): one.value for keeps, *_ in batch for one in keeps}
            while rows and (error := await asyncio.to_thread(self.journal.write, rows)):
                _log.error("%s; whatever is new waits until it can be written", error)
                if any(isinstance(action, End) for _, actions, _ in batch for action in actions):
                    break
                await asyncio.sleep(_AGAIN_SECONDS)
            for _, actions, done in batch:
                self._act(actions)
                if not done.done():
                    done.set_result(None)
        self._writing = None

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Admit(connection, member):
                    if (old := self._line_of.pop(member, None)) is not None:
                        old.put(None)
                    if (line := self._lines.get(connection)) is not None:  # it may have hung up meanwhile
                        self._line_of[member] = line
                    if member not in self.state.members:
                        continue  # given up meanwhile
                    if (join := self.state.members[member].join).role != "operator" or join.tasks:
                        self._alive.add(member, self._now())
                        self._evidence.watch(member, join)
                case Refuse(connection, message):
                    if (refused := self._lines.get(connection)) is not None:
                        refused.put(m.encode(message))
                        refused.put(None)
                case Defer(connection):
                    if (deferred := self._lines.get(connection)) is not None:
                        deferred.put(None)
                case Tell(member, message):
                    self._tell(member, message)
                case Cut(member):
                    self._alive.remove(member)
                    self._evidence.forget(member)
                    if (gone := self._line_of.pop(member, None)) is not None and not gone.put(None):
                        gone.abort()
                case Timer(name, seconds):
                    self._set_timer(name, seconds)
                case Log(level, text):
                    getattr(_log, level)("%s", text)
                case SaveManifest():
                    task = asyncio.get_running_loop().create_task(self._write_manifest(action))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case End():
                    self.end = action
                    self.ended.set()

    async def _write_manifest(self, order: SaveManifest) -> None:
        assert self._checkpoints is not None
        specs = [self.state.objects[number].spec for number in order.save.objects]
        error = await asyncio.to_thread(self._checkpoints.write, order.save, specs)
        self.feed(Written(order.save.number, error, time.time()))
        if not error:  # nobody waits for it: it may take as long as the writing
            going = self.state.saves.going
            writing = {order.save.id, *([] if going is None else [going.id])}
            await asyncio.to_thread(self._checkpoints.prune, order.save.app, writing)

    def _tell(self, member: int, message: m.Message) -> None:
        line = self._line_of.get(member)
        if line is None:
            return  # away; it catches up when it comes back
        if self._encoded is None or self._encoded[0] is not message:
            self._encoded = (message, m.encode(message))
        if not line.put(self._encoded[1]):
            line.abort()  # it does not read: it may come back and catch up
            self._line_of.pop(member, None)

    def _set_timer(self, name: str, seconds: float | None) -> None:
        if (old := self._timers.pop(name, None)) is not None:
            old.cancel()
        if seconds is not None:
            self._timers[name] = asyncio.get_running_loop().call_later(seconds, self.feed, Fired(name))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    # -- who is alive ------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Declares dead who is."""
        cut_off = False
        while True:
            await asyncio.sleep(self._alive.period)
            self._evidence.suspect(self._alive.away(self._now()))
            for member, why in self._alive.look(self._now()):
                self.feed(Died(member, why))
            if self._alive.cut_off != cut_off:
                cut_off = self._alive.cut_off
                _log.warning(_CUT_OFF if cut_off else "members are heard again, or given up")

    # -- connections -------------------------------------------------------------------------------------------------

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[refuse_other_sites(any_name=self._needs_bearer)])
        app.router.add_get("/control", self._control)
        app.router.add_get("/heartbeat", self._heartbeat)
        app.router.add_get("/api/v1/status", self._status)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/healthz", self._healthz)
        return app

    async def _meet(self, request: web.Request) -> web.WebSocketResponse | None:
        """A WebSocket whose other end knows the token, or None."""
        ws = web.WebSocketResponse(max_msg_size=m.MESSAGE_BYTES_MAX, compress=False, timeout=1.0)
        try:
            await ws.prepare(request)
        except ConnectionError:  # it has left again
            return None
        if self._door is not None and request.protocol is not None:
            self._door.expect_proof(request.protocol)
        challenge = make_challenge()
        with contextlib.suppress(ConnectionError, asyncio.TimeoutError, TypeError):
            await ws.send_bytes(challenge)
            answer = await ws.receive_bytes(timeout=STRANGER_SECONDS)
            if len(answer) == ANSWER_BYTES and check_answer(self._token, challenge, answer):
                if self._door is not None and request.protocol is not None:
                    self._door.let_in(request.protocol)
                await ws.send_bytes(make_confirm(self._token, challenge, answer))
                return ws
            _log.info("refused %s: it does not know the token", request.remote, extra={"source": str(request.remote)})
            await ws.send_bytes(REFUSAL)
        await ws.close()
        return None

    async def _control(self, request: web.Request) -> web.StreamResponse:
        ws = await self._meet(request)
        if ws is None:
            return web.WebSocketResponse()
        connection, self._next_connection = self._next_connection, self._next_connection + 1
        line = self._lines[connection] = _Line(ws, request.transport)
        member: int | None = None
        try:
            join = m.read_member(await ws.receive_bytes(timeout=STRANGER_SECONDS))
            if not isinstance(join, m.Join):
                raise m.Malformed(f"expected a join, saw {type(join).__name__}")
            if (done := self.feed(Came(connection, join))) is not None:
                await done
            if self._line_of.get(join.incarnation) is not line:
                await asyncio.wait({line.task}, timeout=_GOODBYE_SECONDS)
                return ws
            member = join.incarnation
            async for message in ws:
                if message.type != WSMsgType.BINARY:
                    raise m.Malformed(f"expected a binary message, saw {message.type!r}")
                self.feed(Said(member, m.read_member(message.data)))
        except m.Malformed as error:
            _log.warning("%s broke the rules: %s", request.remote, error, extra={"source": str(request.remote)})
            line.put(m.encode(m.Refused("ProtocolError", str(error))))
            line.put(None)
            await asyncio.wait({line.task}, timeout=_GOODBYE_SECONDS)
        except (ConnectionError, TimeoutError, TypeError):
            pass
        finally:
            self._lines.pop(connection, None)
            line.task.cancel()
            if member is not None and self._line_of.get(member) is line:
                del self._line_of[member]
                there = self.state.members.get(member)
                if there is not None and there.join.role == "operator" and not there.join.tasks:
                    self.feed(Said(member, m.Leave()))
        return ws

    async def _heartbeat(self, request: web.Request) -> web.StreamResponse:
        ws = await self._meet(request)
        if ws is None:
            return web.WebSocketResponse()
        member, known = 0, False
        try:
            first = await ws.receive_bytes(timeout=STRANGER_SECONDS)
            member = int.from_bytes(first, "little")
            known = len(first) == 8 and self._alive.connected(member, self._now())
            if known:
                async for _ in ws:
                    self._alive.heard(member, self._now())
        except (ConnectionError, TimeoutError, TypeError):
            pass
        finally:
            if known:
                self._alive.disconnected(member, self._now())
        return ws

    # -- for people and tools ----------------------------------------------------------------------------------------

    def _let_in(self, request: web.Request) -> None:
        if self._needs_bearer and not check_bearer(self._token, request.headers.get("Authorization", "")):
            raise web.HTTPUnauthorized(headers={"WWW-Authenticate": "Bearer"}, text="expected the Bearer value\n")

    async def _status(self, request: web.Request) -> web.StreamResponse:
        self._let_in(request)
        now = self._now()
        heard, away = self._alive.ages(now), self._alive.away(now)
        return web.json_response(status_of(self.state, heard, self.settings, self.started_at, away))

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        self._let_in(request)
        return web.Response(body=metrics_text(self.state, self._alive.ages(self._now())), content_type="text/plain")

    async def _healthz(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    # -- running -----------------------------------------------------------------------------------------------------

    async def serve(self, sock: socket.socket, tls: ssl.SSLContext | None, ready: Callable[[], None]) -> End:
        """Until the cluster ends."""
        loop = asyncio.get_running_loop()
        runner = web.AppRunner(
            self.application(), access_log=None, keepalive_timeout=2.0, shutdown_timeout=0.1, handle_signals=False
        )
        await runner.setup()
        assert runner.server is not None
        self._door = Door(runner.server, tls)
        server = await loop.create_server(self._door, sock=sock, backlog=_BACKLOG)
        watch = loop.create_task(self.watch())
        try:
            ready()
            for member in self.state.returning:
                self._alive.add(member, self._now())
                self._evidence.expect(member, self.state.members[member].join)
            self._do(self.state.begin())
            await self.ended.wait()
            await self._say_goodbye()
            if self._tasks:  # older checkpoints are being removed
                await asyncio.wait(self._tasks, timeout=_PRUNE_SECONDS)
            return self.end
        finally:
            watch.cancel()
            self._evidence.close()
            for timer in self._timers.values():
                timer.cancel()
            server.close()
            self._door.close()
            await runner.cleanup()

    async def _say_goodbye(self) -> None:
        """Everybody gets the last message, and some time to read it and leave."""
        lines = list(self._lines.values())
        for line in lines:
            line.put(None)
        if lines:
            await asyncio.wait({line.task for line in lines}, timeout=_GOODBYE_SECONDS)

    def terminate(self) -> bool:
        """At SIGTERM: whether checkpoints are taken before the cluster ends by itself."""
        self._do(self.state.terminate(SAVE_SECONDS))
        return True

    def stop(self, why: str) -> None:
        """Ends the cluster from within."""
        self._do(self.state.stop(why))


def run(
    terms: Terms,
    listen: Address,
    token: bytes | None,
    ready: Callable[[Address], None],
    *,
    tls: ssl.SSLContext | None = None,
    settings: dict[str, object] | None = None,
    checkpoints: "Checkpoints | None" = None,
    journal: "Journal | None" = None,
    listen_fd: int | None = None,
    until_eof: int | None = None,
) -> End:
    """Runs a scheduler until its cluster ends, SIGINT, SIGTERM, or the end of the file `until_eof`.

    ready: called with the address, port filled in. listen_fd: a socket that listens already, instead of `listen`.
    """

    async def main() -> End:
        sock = listen_on(listen, _BACKLOG) if listen_fd is None else socket.socket(fileno=listen_fd)
        stop = asyncio.Event()
        try:
            scheduler = Scheduler(terms, token, settings, checkpoints, journal)
            with told_by_signal(stop, scheduler.terminate), told_by_end_of(until_eof, stop):
                told = asyncio.create_task(stop.wait())
                told.add_done_callback(lambda task: scheduler.stop("the scheduler was told to end"))
                try:
                    return await scheduler.serve(sock, tls, lambda: ready(bound_to(sock)))
                finally:
                    told.cancel()
        finally:
            sock.close()

    return asyncio.run(main())
