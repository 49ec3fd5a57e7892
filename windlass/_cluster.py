"""Clusters: where tensors and tables live."""

import atexit
import contextlib
import dataclasses
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import numpy as np

from windlass import _core
from windlass._address import Address, is_here
from windlass._arrays import as_numpy, core_dtype
from windlass._dial import Dialer
from windlass._errors import InvalidArgument, WindlassError
from windlass._handshake import check_token, load_token
from windlass._init import Init, Zeros
from windlass._lease import Lease, Split, make_lease
from windlass._release import Released, owns_native
from windlass._rules import Assign, Rule
from windlass._settings import load as load_settings
from windlass._settings import token_of
from windlass._slots import Slots
from windlass._step import Step
from windlass._sync import ASP, BSP, OVERDUE_SECONDS, Sync, parse_sync
from windlass._table import Table
from windlass._tensor import Tensor
from windlass._user_rules import UserRule
from windlass._values import Values
from windlass._vector import root_of

if TYPE_CHECKING:
    from windlass._desk import Ledgers
    from windlass._scheduled import Attendance
    from windlass._user_code import Calls

_THREADS_MAX = 256
_CLOSE_SECONDS = 5.0  # at most, after an error
_FOREVER_SECONDS = 1e6
Transport = Literal["auto", "arena", "socket"]
OnWorkerLoss = Literal["continue", "wait"]
_open: "weakref.WeakSet[Cluster]" = weakref.WeakSet()


def connect(
    address: str | None = None,
    *,
    servers: Sequence[str] | None = None,
    app: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    reader: bool = False,
    token: str | bytes | None = None,
    timeout: float = 60.0,
    failure_timeout: float = 5.0,
    checksums: bool | None = None,
    transport: Transport | None = None,
    sync: Sync | str | None = None,
    on_worker_loss: OnWorkerLoss | None = None,
    threads: int | None = None,
    memory_bytes_max: int | None = None,
) -> "Cluster":
    """Connects to a cluster, or starts a server inside this process.

    timeout: seconds that calls may take unless they say otherwise; also for all members of the cluster to come.

    With ``address``, or WINDLASS_ADDRESS as ``windlass run`` sets it, the scheduler there says where servers are. With
    ``servers=["tcp://host:port", ...]``, as ``windlass server`` prints them, there is no scheduler: every client gives
    the same list in the same order.

    app: the group of workers that trains together; names of tensors and tables are the app's own (default:
        WINDLASS_APP, else "default").
    rank, world_size: this worker's number and how many there are (default: RANK and WORLD_SIZE, else 0 of 1).
    reader: a client that nobody waits for, for evaluation or publishing.
    token: the secret that lets a process in (default: WINDLASS_TOKEN, or the file WINDLASS_TOKEN_FILE).
    failure_timeout: seconds after which a server that cannot be reached is given up. A scheduler says how many.
    checksums: whether numbers carry checksums (default: on TCP, but not on Unix sockets).
    transport: "auto" shares memory with servers on this host, so that numbers are not sent; "arena" is an error where
        that cannot be; "socket" sends everything (default: WINDLASS_TRANSPORT, else "auto").
    sync: the policy of the app's objects, such as BSP(), SSP(3) or "ssp:3" (default: WINDLASS_SYNC, else ASP()).
    on_worker_loss: whether the others "continue" without a worker that is lost, or "wait" for a replacement; the same
        for all workers of an app (default: WINDLASS_ON_WORKER_LOSS, else "continue").

    Without servers, the one inside this process has two settings.

    threads: how many work on one large request at once (default: the cores there are).
    memory_bytes_max: what tensors and tables may take on the server (default: no limit).

    Every call makes its own engine; ``cluster.worker(rank, world_size)`` gives further workers on the same one.
    """
    if not timeout >= 0:
        raise InvalidArgument(f"connect: timeout must be at least 0 seconds, not {timeout}")
    if complaint := _core.isa_complaint():
        raise InvalidArgument(complaint)
    if transport not in (None, "auto", "arena", "socket"):
        raise InvalidArgument(f'connect: transport must be "auto", "arena" or "socket", not {transport!r}')
    if on_worker_loss not in (None, "continue", "wait"):
        raise InvalidArgument(f'connect: on_worker_loss must be "continue" or "wait", not {on_worker_loss!r}')
    settings = load_settings({"address": address, "app": app, "transport": transport, "on_worker_loss": on_worker_loss})
    policy = parse_sync(sync, parse_sync(settings.sync, ASP(), "sync"), "connect: sync")
    if servers is None and settings.role != "worker":
        become_role(settings.role)
    if servers is None and settings.address is not None:
        if threads is not None or memory_bytes_max is not None:
            raise InvalidArgument("connect: threads and memory_bytes_max are settings of the servers here")
        from windlass._scheduled import Scheduled, client_tls, join

        if rank is None and world_size is None and not reader:
            rank, world_size = _from_environment("RANK", None), _from_environment("WORLD_SIZE", 1)
        scheduled = Scheduled(
            _scheduler_address(settings.address),
            settings.app,
            (token_of(settings) or b"") if token is None else _secret(token),
            checksums,
            settings.transport,
            reader,
            int(os.environ.get("WINDLASS_CLUSTER") or "0", 16),
            client_tls(settings.tls_ca),
            policy,
            settings.on_worker_loss,
        )
        return join(scheduled, rank, 1 if world_size is None else world_size, timeout)
    if address is not None:
        raise InvalidArgument("connect: either address, of a scheduler, or servers")
    if reader:
        raise InvalidArgument("connect: a reader needs the address of a scheduler")
    if on_worker_loss is not None:
        raise InvalidArgument("connect: on_worker_loss needs the address of a scheduler, who knows of losses")
    if servers is not None:
        if threads is not None or memory_bytes_max is not None:
            raise InvalidArgument("connect: threads and memory_bytes_max are settings of `windlass server` here")
        if rank is None and world_size is None:
            rank, world_size = _from_environment("RANK", 0), _from_environment("WORLD_SIZE", 1)
        remote = Remote.of(servers, settings.app, token, failure_timeout, checksums, settings.transport, policy)
        return remote.cluster(rank or 0, 1 if world_size is None else world_size, timeout)
    if (rank, world_size, token, checksums, transport, app) != (None,) * 6:
        raise InvalidArgument(
            "connect: app, rank, world_size, token, checksums and transport go with an address or servers=[...]"
        )
    world = os.environ.get("WORLD_SIZE", "1")
    if world not in ("", "1"):
        raise InvalidArgument(
            f"WORLD_SIZE={world} without a cluster's address would be {world} trainings that know nothing "
            "of each other; start the script with `windlass run`"
        )
    threads = _core.cores() if threads is None else threads
    if not is_whole(threads) or not 1 <= threads <= _THREADS_MAX:
        raise InvalidArgument(f"connect: threads must be between 1 and {_THREADS_MAX}, not {threads}")
    if memory_bytes_max is not None and not (is_whole(memory_bytes_max) and 0 <= memory_bytes_max < 2**64):
        raise InvalidArgument(f"connect: memory_bytes_max must be a whole number of bytes, not {memory_bytes_max!r}")
    engine = _core.Engine(threads, 2**64 - 1 if memory_bytes_max is None else memory_bytes_max)
    engine.set_overdue(OVERDUE_SECONDS)
    return Cluster(engine, _core.Session(engine, 0, 1), None, timeout, sync=policy)


@dataclasses.dataclass(frozen=True)
class Remote:
    """How to reach servers elsewhere: what a further worker needs, too."""

    servers: tuple[Address, ...]
    app: str
    token: bytes = dataclasses.field(repr=False)
    failure_timeout: float
    checksums: bool | None
    transport: Transport
    sync: Sync  #: of its objects

    @classmethod
    def of(
        cls,
        servers: Sequence[str],
        app: str,
        token: str | bytes | None,
        failure_timeout: float,
        checksums: bool | None,
        transport: Transport,
        sync: Sync,
    ) -> "Remote":
        """Checks what connect() was given."""
        if isinstance(servers, str) or not all(isinstance(s, str) for s in servers) or not servers:
            raise InvalidArgument(f"connect: servers must be a list of addresses, not {servers!r}")
        addresses = tuple(Address.parse(text) for text in servers)
        if len(set(addresses)) != len(addresses):
            raise InvalidArgument(f"connect: servers has an address twice: {[str(a) for a in addresses]}")
        if not isinstance(app, str) or not app.isprintable() or "/" in app or not 1 <= len(app.encode()) <= 256:
            raise InvalidArgument(f"connect: app must be 1 to 256 bytes of printable text without '/', not {app!r}")
        if not failure_timeout > 0:
            raise InvalidArgument(f"connect: failure_timeout must be above 0 seconds, not {failure_timeout}")
        secret = _secret(token)
        if transport == "arena" and (far := [str(address) for address in addresses if not is_here(address)]):
            raise InvalidArgument(f'connect: transport="arena" needs servers on this host, not {far}')
        return cls(addresses, app, secret, failure_timeout, checksums, transport, sync)

    def cluster(self, rank: int, world_size: int, timeout: float, arena_of: "_core.Engine | None" = None) -> "Cluster":
        """A cluster on the servers, once all connections are up."""
        if not (is_whole(rank) and is_whole(world_size) and 0 <= rank < world_size < 2**32):
            raise InvalidArgument(f"connect: rank {rank!r} is not in a world of {world_size!r}")
        sums = -1 if self.checksums is None else int(self.checksums)
        shares = self.transport != "socket" and any(map(is_here, self.servers))
        links = _core.Links([str(a) for a in self.servers], self.app, rank, world_size, sums, shares)
        engine = _core.Engine.on(links, arena_of)
        dialer = Dialer(links, list(self.servers), self.token, self.failure_timeout, self.transport)
        try:
            links.wait_ready(timeout)
            session = _core.Session(engine, rank, world_size)
            session.enter(timeout)
        except BaseException:
            links.stop()
            dialer.close()
            raise
        return Cluster(engine, session, dialer, timeout, self, sync=self.sync)


def _scheduler_address(text: str) -> Address:
    address = Address.parse(text)
    if address.kind != "tcp":
        raise InvalidArgument(f"connect: a scheduler is at tcp://HOST:PORT, not {text!r}")
    return address


def _secret(token: str | bytes | None) -> bytes:
    if token is not None and not isinstance(token, (str, bytes)):
        raise InvalidArgument(f"connect: token must be a string or bytes, not {type(token).__name__}")
    secret = token.encode() if isinstance(token, str) else token
    secret = load_token() if secret is None else check_token(secret, "connect: token")
    return secret or b""


def become_role(role: str) -> NoReturn:
    """The process is a server or the scheduler from now on, and exits with it: one script for every role."""
    from windlass.launch.roles import run_role

    sys.exit(run_role(role))


def _from_environment(name: str, default: Any) -> Any:
    text = os.environ.get(name)
    if not text:
        return default
    if not text.isdecimal():
        raise InvalidArgument(f"{name}={text} is not a whole number")
    return int(text)


def is_whole(x: object) -> bool:
    """Whether it is an integer, of Python's or numpy's."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def _dims(what: str, shape: Any) -> tuple[int, ...]:
    """A shape as it was given, checked."""
    dims = (shape,) if is_whole(shape) or not isinstance(shape, Iterable) else tuple(shape)
    if not all(is_whole(d) and d >= 0 for d in dims):
        raise InvalidArgument(f"{what}: shape must be whole numbers of at least 0, not {shape!r}")
    return tuple(int(d) for d in dims)


class Patience(NamedTuple):
    """Seconds that calls may take unless they say otherwise."""

    pull: float
    push: float


@owns_native("_engine", "_session")
class Cluster:
    """One worker's view of the servers. Made by ``connect()``; a context manager that closes at the end."""

    def __init__(
        self,
        engine: _core.Engine,
        session: _core.Session,
        dialer: Dialer | None,
        timeout: float,
        remote: Remote | None = None,
        attendance: "Attendance | None" = None,
        *,
        sync: Sync,
    ) -> None:
        self._engine = engine
        self._session = session
        self._dialer = dialer
        self._remote = remote
        self._attendance = attendance
        self._timeout = timeout
        self._sync = sync
        self._values = Values()
        if attendance is not None:
            attendance.values = self._values
        self._leases: dict[str, Lease] = {}  # by name
        self._near_ledgers: Ledgers | None = None
        self._near_calls: Calls | None = None
        self._further = False  # made by worker(), not by connect()
        _open.add(self)

    def tensor(
        self,
        name: str,
        shape: int | Sequence[int] | None = None,
        *,
        rule: Rule | None = None,
        init: Init | None = None,
        dtype: object = None,
        seed: int = 0,
        reject_nonfinite: bool = False,
        sync: Sync | str | None = None,
        like: Tensor | None = None,
    ) -> Tensor:
        """Creates a tensor, or opens it if it is there with the same spec.

        dtype: float32, the default; for Sum, Max, Min and Assign also float64 and int64. reject_nonfinite: refuse NaN
        and infinity. sync: how tightly its workers are coupled, such as BSP(), SSP(3) or "ssp:3" (default:
        ``cluster.sync``).
        like: a tensor of the same app. The new one has its shape and dtype, which are then not given, and every shard
        lies on the same server, for good: vector operations such as ``y.axpy(a, x)`` work between the two. The rule is
        ``Assign()`` unless another is given. It is part of the spec.
        """
        what = f"tensor {name!r}"
        root = ""
        if like is not None and isinstance(name, str):
            root = root_of(self, name, like, shape, dtype)
            shape, dtype, rule = like.shape, like.dtype, Assign() if rule is None else rule
        if shape is None:
            raise InvalidArgument(f"{what}: shape must be whole numbers, not None, unless it is like= another tensor")
        dims = _dims(what, shape)
        self._check(what, name, rule, init, seed)
        assert rule is not None
        self._engine.check()
        return Tensor(
            self,
            name,
            dims,
            rule,
            init if init is not None else Zeros(),
            np.float32 if dtype is None else dtype,
            seed,
            reject_nonfinite,
            parse_sync(sync, self._sync, what),
            root,
        )

    def table(
        self,
        name: str,
        dim: int,
        *,
        rule: Rule,
        init: Init | None = None,
        seed: int = 0,
        reject_nonfinite: bool = False,
        sync: Sync | str | None = None,
    ) -> Table:
        """Creates a table of rows of `dim` float32 numbers, or opens it if it is there with the same spec.

        sync: how tightly its workers are coupled, such as BSP(), SSP(3) or "ssp:3" (default: ``cluster.sync``).
        """
        what = f"table {name!r}"
        if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)) or not 1 <= dim <= 2**20:
            raise InvalidArgument(f"{what}: dim must be a whole number between 1 and {2**20}, not {dim!r}")
        self._check(what, name, rule, init, seed)
        policy = parse_sync(sync, self._sync, what)
        self._engine.check()
        return Table(self, name, int(dim), rule, init if init is not None else Zeros(), seed, reject_nonfinite, policy)

    @staticmethod
    def _check(what: str, name: str, rule: Rule | None, init: Init | None, seed: int) -> None:
        if not isinstance(name, str) or not name.isprintable():
            raise InvalidArgument(f"{what}: the name must be a string of printable characters")
        if not isinstance(rule, Rule):
            raise InvalidArgument(f"{what}: rule must be a windlass rule such as SGD(lr=0.1), not {rule!r}")
        if init is not None and not isinstance(init, Init):
            raise InvalidArgument(f"{what}: init must be a windlass initialiser such as Normal(std=0.01), not {init!r}")
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**64:
            raise InvalidArgument(f"{what}: seed must be a whole number between 0 and 2**64 - 1, not {seed!r}")

    def empty(self, shape: int | Sequence[int], dtype: object = np.float32) -> Any:
        """A registered array, not initialised: requests use it in place, and borrow it until they are done.

        ``torch.from_numpy`` of it is registered, too.
        """
        return as_numpy(self._engine.empty(list(_dims("empty", shape)), core_dtype(dtype, "empty")))

    def slots(self, shape: int | Sequence[int], dtype: object = np.float32, *, count: int = 2) -> Slots:
        """Registered arrays that take turns: ``slots.next()`` is one that no request uses."""
        if not is_whole(count) or count < 1:
            raise InvalidArgument(f"slots: count must be a whole number of at least 1, not {count!r}")
        return Slots(self, tuple(self.empty(shape, dtype) for _ in range(count)))

    def worker(self, rank: int, world_size: int) -> "Cluster":
        """A further worker on the same servers, for threads that act as workers; they share registered arrays."""
        if not (is_whole(rank) and is_whole(world_size) and 0 <= rank < world_size < 2**32):
            raise InvalidArgument(f"worker: rank {rank!r} is not in a world of {world_size!r}")
        self._engine.check()
        if self._remote is None:
            session = _core.Session(self._engine, rank, world_size)
            made = Cluster(self._engine, session, None, self._timeout, sync=self._sync)
            made._near_ledgers = self._ledgers
            made._near_calls = self._calls
        elif self._attendance is not None:
            from windlass._scheduled import join

            made = join(self._attendance.at, rank, world_size, self._timeout, self._engine)
        else:
            made = self._remote.cluster(rank, world_size, self._timeout, self._engine)
        made._further = True
        return made

    @property
    def _ledgers(self) -> "Ledgers":
        """Of the engine inside the process; its workers share them."""
        if self._near_ledgers is None:
            from windlass._desk import Ledgers

            self._near_ledgers = Ledgers()
        return self._near_ledgers

    @property
    def _calls(self) -> "Calls":
        """Functions of the user's, of the engine inside the process."""
        if self._near_calls is None:
            from windlass._user_code import Calls, Own

            self._near_calls = Calls(Own(), load_settings().function_seconds)
            self._engine.set_user_code(self._near_calls.core)
        return self._near_calls

    def _rule_spec(self, rule: Rule, shape: tuple[int, ...], *, is_table: bool = False) -> _core.RuleSpec:
        """What the core is told of a rule; one of the user's must be found by servers."""
        spec = rule._spec(shape)
        if isinstance(rule, UserRule):
            if self._remote is None:
                rule._prepare(shape, is_table)
            self._know(rule._name(shape), rule._found)
        return spec

    def _know(self, name: str, found: object) -> None:
        """A server inside the process finds what is used here; others find it themselves."""
        if self._remote is not None:
            return
        self._engine.check()
        self._calls.own.add(name, found)
        self._calls.start()

    def lease(
        self,
        n: int,
        *,
        batch: int,
        name: str = "data",
        epochs: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        split: Split = "leased",
        ahead_seconds: float = 45.0,
        range: int | None = None,
    ) -> Lease:
        """This worker's part of `n` samples, leased from the scheduler; each iteration over it is one epoch.

        ``for epoch in range(3): for indices in lease: ...`` gives int64 arrays of at most `batch` sample numbers. What
        a worker holds and has not done when it dies is given to others, and what a slow one has not begun, too. A lease
        is done when the iteration that used its last batch is closed (``tick()``, ``step()``, or the next push).

        name: workers that say the same name share the samples; all terms must be the same.
        epochs: how often the data is gone through. shuffle, seed: every epoch has an order of its own.
        split: "static" gives worker r of W the batches r, r + W, ...: the same in every run of W workers, without a
            scheduler; what a dead worker had is lost.
        ahead_seconds: work to hold, so that the scheduler may be away for so long.
        range: samples of one lease, a multiple of `batch` (default: 8 batches, fewer where there are few).
        """
        self._engine.check()
        return make_lease(
            self,
            n,
            name=name,
            batch=batch,
            epochs=epochs,
            shuffle=shuffle,
            seed=seed,
            split=split,
            ahead_seconds=ahead_seconds,
            range=range,
        )

    def _close_leases(self, timeout: float, *, failed: bool = False) -> None:
        while self._leases:  # they hold us, and nobody would see the circle
            self._leases.popitem()[1]._close(timeout, failed=failed)

    @property
    def rank(self) -> int:
        """This worker's number among the workers."""
        return self._session.rank

    @property
    def world_size(self) -> int:
        """How many workers the app has; where there is a scheduler it may grow."""
        if self._attendance is not None and self._session.world_size:
            return self._attendance.view.world_size
        return max(self._session.world_size, 1)  # a reader is none of them

    @property
    def clock(self) -> int:
        """How many iterations this worker has closed."""
        return self._session.clock

    @property
    def sync(self) -> Sync:
        """The policy of its objects."""
        return self._sync

    @property
    def memory_bytes(self) -> int:
        """What the server inside this process has taken for tensors and tables."""
        if self._remote is not None:
            raise InvalidArgument("memory_bytes: the servers are other processes")
        return self._engine.memory_bytes

    def tick(self) -> None:
        """Closes this worker's iteration, at every object of its app. Does not wait for the servers."""
        self._engine.check()
        self._session.raise_unseen()
        self._session.tick(self._timeout)

    def settle(self, *, timeout: float | None = None) -> None:
        """Waits until everything this worker has pushed and closed has arrived at the servers.

        What was pushed is then in every other worker's next pull, or under BSP in the update of its iteration, whatever
        becomes of this process. Errors of futures that nobody waited for are raised here.
        """
        self._engine.check()
        self._session.settle(self._timeout if timeout is None else timeout)

    def report(self, **values: Any) -> None:
        """Numbers to be seen, such as ``report(loss=0.3)``: the newest under each name.

        They travel to the scheduler at most once a second, the last ones when the worker leaves, and are shown by
        ``windlass status``, ``/metrics`` and ``windlass run --progress``. At most 32 names of up to 64 characters.
        A number that is not finite is shown as nan.
        """
        self._values.put(values)

    @property
    def reported(self) -> dict[str, float | None]:
        """What ``report()`` was given last, by name; None: a number that was not finite."""
        return self._values.newest()

    def leave(self) -> None:
        """This worker is done: nobody waits for it any more. ``close()`` says the same; for a thread as a worker on
        servers inside the process this is the way, since it shares them with the others."""
        if self._remote is not None:
            self.close()
        else:
            self._close_leases(self._timeout)
            self._session.leave(self._timeout)

    def _patience(self, sync: Sync) -> Patience:
        """How long calls on an object wait, unless they say otherwise.

        Where a scheduler watches, a wait at a gate has no limit: it ends when the one waited for comes, or is lost.
        """
        seconds = self._timeout if self._attendance is None else _FOREVER_SECONDS
        return Patience(
            self._timeout if isinstance(sync, ASP) else seconds, seconds if isinstance(sync, BSP) else self._timeout
        )

    def step(self, *, timeout: float | None = None) -> Step:
        """Gathers what one iteration pushes and pulls, for a ``with`` block.

        ``with cluster.step() as s: s.push_pull(w, grad, out=out); rows = s.pull(table, keys)``. At its end everything
        leaves as one request per server, in order, the worker's iteration is closed (``tick()``), and all of it is
        waited for. It is one iteration, also where several pushes are to the same object. A block that raises sends
        nothing. If a request fails, its error is raised when the others are done; where it could not even be sent, the
        iteration is not closed.
        """
        # Where a scheduler watches, a wait at a gate has no limit; a server that hangs is given up by it.
        patience = self._timeout if self._attendance is None else _FOREVER_SECONDS
        return Step(self, patience if timeout is None else timeout)

    def fingerprint(self, *, timeout: float | None = None) -> str:
        """A checksum of everything on the server; equal for equal contents, however they came about."""
        return f"{self._session.fingerprint(self._timeout if timeout is None else timeout):016x}"

    def abandon(self, server: int | str) -> None:
        """Gives a server up for good, by its number or its address: requests to it raise ServerLost from now on.

        For a server that hangs. Where it shares memory with this process it could still write what it began to write;
        so arrays that it was given get fresh pages under the same addresses, with the contents they have.
        """
        self._engine.check()
        if self._dialer is None or self._remote is None:
            raise InvalidArgument("abandon: the server is inside this process")
        addresses = [str(address) for address in self._remote.servers]
        if isinstance(server, str) and str(Address.parse(server)) in addresses:
            server = addresses.index(str(Address.parse(server)))
        if not is_whole(server) or not 0 <= int(server) < len(addresses):
            raise InvalidArgument(f"abandon: {server!r} is none of the servers {addresses}")
        self._dialer.abandon(int(server))

    def close(self, *, timeout: float | None = None) -> None:
        """Waits for requests under way and ends the engine; every later call raises Closed. Idempotent."""
        self._close(self._timeout if timeout is None else timeout)

    def _close(self, timeout: float, *, failed: bool = False) -> None:
        """`failed`: this worker did not get to its end, and may be replaced."""
        if self._engine.forked or isinstance(self._engine, Released):
            return
        try:
            if not failed and not self._engine.closed and self._session.has_open_pushes:
                self._session.tick(timeout)  # the last iteration counts, too
            self._close_leases(timeout, failed=failed)
            with contextlib.suppress(WindlassError):  # a server that is lost waits for nobody
                self._session.leave(min(timeout, _CLOSE_SECONDS))
            self._engine.close(timeout)
        finally:
            if self._near_calls is not None and self._engine.closed:
                self._near_calls.close()
            if self._dialer is not None:
                self._dialer.close()
            if self._attendance is not None:
                self._attendance.close(failed=failed)
        self._session.raise_unseen()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # the error on its way says more than what close() would add
            meant = isinstance(error, SystemExit) and error.code in (None, 0)
            with contextlib.suppress(WindlassError):
                self._close(min(self._timeout, _CLOSE_SECONDS), failed=not meant)

    def __repr__(self) -> str:
        if isinstance(self._engine, Released):
            return "<Cluster, closed>"
        state = "closed" if self._engine.closed else "open"
        where = "embedded" if self._remote is None else f"{len(self._remote.servers)} servers, app {self._remote.app!r}"
        return f"<Cluster, {where}, rank {self.rank} of {self.world_size}, {state}>"


_made_by_default: list[Cluster] = []


def default_cluster() -> Cluster:
    """The cluster of this process: the one that connect() made and that is open, or one made now."""
    found = [cluster for cluster in _open if not (cluster._further or cluster._engine.forked or cluster._engine.closed)]
    if len(found) > 1:
        raise InvalidArgument(f"cluster: this process has {len(found)} open clusters; say which one with cluster=")
    if not found:
        _made_by_default[:] = found = [connect()]
    return found[0]


def _others_inside() -> bool:
    """Whether another thread is in one of our calls."""
    here, me = os.path.dirname(__file__), threading.get_ident()
    frames = sys._current_frames().items()
    return any(frame.f_code.co_filename.startswith(here) for thread, frame in frames if thread != me)


@atexit.register
def _close_all() -> None:
    """Requests under way end before the interpreter takes their memory away.

    Daemon threads leave our calls, too: the interpreter ends a thread that comes back to it too late, and a C++
    function that is left that way ends the process.
    """
    clusters = list(_open)
    _made_by_default.clear()
    failed = hasattr(sys, "last_value") and not hasattr(sys, "ps1")  # a traceback, and nobody there to go on after it
    for cluster in clusters:
        with contextlib.suppress(WindlassError):
            cluster._close(5.0, failed=failed)
    deadline = time.monotonic() + 1.0
    while clusters and _others_inside() and time.monotonic() < deadline:
        time.sleep(0.001)
