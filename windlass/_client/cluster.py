"""Clusters: where tensors and tables live."""

import atexit
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from windlass import _core
from windlass._client import open_clusters, saving
from windlass._client.all_reduce import Reduction, error_in, numbers_of, value_of
from windlass._client.barrier import NearBarrier
from windlass._client.buffer_ring import Slots
from windlass._client.near import Near
from windlass._client.reports import Reports
from windlass._data.lease import Lease, Split, make_lease
from windlass._errors import AccessDenied, InvalidArgument, Timeout, WindlassError
from windlass._net.address import Address
from windlass._net.dial import Dialer
from windlass._objects.arrays import ArrayLike, as_numpy, as_torch, core_dtype, dims_of, is_whole
from windlass._objects.named import ObjectInfo, find, listed, open_table, open_tensor
from windlass._objects.outputs import in_torch
from windlass._objects.step import Step
from windlass._objects.table import Table
from windlass._objects.tensor import Tensor
from windlass._objects.vector import root_of
from windlass._release import Released, owns_native
from windlass._rules.init import Init, Zeros
from windlass._rules.rule import Assign, Rule
from windlass._rules.sync import ASP, BSP, Sync, parse_sync
from windlass._rules.user_rules import UserRule
from windlass.control.all_reduce import combined
from windlass.control.messages import Numbers, Reduced, ReduceOp

if TYPE_CHECKING:
    from windlass._client.local_steps import Arrays, Elastic, Local
    from windlass._client.remote import Remote
    from windlass._client.scheduler_client import Attendance

_CLOSE_SECONDS = 5.0  # at most, after an error
_FOREVER_SECONDS = 1e6


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
        remote: "Remote | None" = None,
        attendance: "Attendance | None" = None,
        near: Near | None = None,
        *,
        sync: Sync | None,
    ) -> None:
        self._engine = engine
        self._torch = False  # whether new arrays are torch's; connect() knows
        self._session = session
        self._dialer = dialer
        self._remote = remote
        self._attendance = attendance
        self._timeout = timeout
        self._sync = sync  # None: nobody has chosen one
        self._notes: dict[str, bytes] = {}  # on objects, for their checkpoints: JSON
        self._reports = Reports()
        if attendance is not None:
            attendance.reports = self._reports
        self._leases: dict[str, Lease] = {}  # by name
        self._near = Near() if near is None else near
        self._near_barrier: NearBarrier | None = None
        self._at_barrier = threading.Lock()
        self._unmet: list[Numbers | None] = []  # what it gave at the barrier where it stands, after a timeout
        self._further = False  # made by worker(), not by connect()
        open_clusters.note(self)

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
        """Creates a tensor, or opens an existing one of the same spec.

        The name alone opens an existing tensor of any spec.

        dtype: float32, the default; for Sum, Max, Min and Assign also float64 and int64. reject_nonfinite: refuse NaN
        and infinity. sync: how tightly its workers are coupled, such as BSP(), SSP(3) or "ssp:3" (default:
        ``cluster.sync``).
        like: a tensor of the same app. The new one has its shape and dtype, which are then not given, and every shard
        lies on the same server, for good: vector operations such as ``y.axpy(a, x)`` work between the two. The rule is
        ``Assign()`` unless another is given. It is part of the spec.
        """
        what = f"tensor {name!r}"
        if shape is None and rule is None and like is None:
            self._only_name(what, name, init, dtype, seed, reject_nonfinite, sync)
            return open_tensor(self, name)
        root = ""
        if like is not None and isinstance(name, str):
            root = root_of(self, name, like, shape, dtype)
            shape, dtype, rule = like.shape, like.dtype, Assign() if rule is None else rule
        if shape is None:
            raise InvalidArgument(f"{what}: shape must be whole numbers, not None, unless it is like= another tensor")
        dims = dims_of(what, shape)
        self._check(what, name, rule, init, seed)
        assert rule is not None
        self._session.check()
        if self._reads:
            find(self, name, "tensor")  # what is not there it cannot make
        return Tensor(
            self,
            name,
            dims,
            rule,
            init if init is not None else Zeros(),
            np.float32 if dtype is None else dtype,
            seed,
            reject_nonfinite,
            parse_sync(sync, self.sync, what),
            root,
        )

    def table(
        self,
        name: str,
        dim: int | None = None,
        *,
        rule: Rule | None = None,
        init: Init | None = None,
        seed: int = 0,
        reject_nonfinite: bool = False,
        sync: Sync | str | None = None,
    ) -> Table:
        """Creates a table of rows of `dim` float32 numbers, or opens an existing one of the same spec.

        The name alone opens an existing table of any spec.

        sync: how tightly its workers are coupled, such as BSP(), SSP(3) or "ssp:3" (default: ``cluster.sync``).
        """
        what = f"table {name!r}"
        if dim is None and rule is None:
            self._only_name(what, name, init, None, seed, reject_nonfinite, sync)
            return open_table(self, name)
        if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)) or not 1 <= dim <= 2**20:
            raise InvalidArgument(f"{what}: dim must be a whole number between 1 and {2**20}, not {dim!r}")
        self._check(what, name, rule, init, seed)
        assert rule is not None
        policy = parse_sync(sync, self.sync, what)
        self._session.check()
        if self._reads:
            find(self, name, "table")
        return Table(self, name, int(dim), rule, init if init is not None else Zeros(), seed, reject_nonfinite, policy)

    def objects(self, *, timeout: float | None = None) -> list[ObjectInfo]:
        """All tensors and tables of all apps, sorted by name.

        Objects of the cluster's own app have their plain names, others are called "app/name"; ``tensor()`` and
        ``table()`` accept both.
        """
        self._session.check()
        return listed(self, self._timeout if timeout is None else timeout)

    def _only_name(
        self, what: str, name: str, init: object, dtype: object, seed: int, reject_nonfinite: bool, sync: object
    ) -> None:
        """Checks that nothing but a name was given."""
        if (init, dtype, sync) != (None, None, None) or seed or reject_nonfinite:
            missing = "a shape and a rule" if what.startswith("tensor") else "dim and a rule"
            raise InvalidArgument(f"{what}: to open it, give the name alone; to make one, give {missing}, too")
        self._check_name(what, name)
        self._session.check()

    def delete(self, name: str, *, timeout: float | None = None) -> None:
        """Deletes a tensor or table of this app: the servers free its memory, and its name can be used again.

        Every handle of it, this worker's and others', raises Deleted from then on, and so do requests that are under
        way. A tensor that others were made ``like=`` is refused while they are there. Shards that are on their way to
        another server go no further.
        """
        if not isinstance(name, str) or not name.isprintable():
            raise InvalidArgument(f"delete: the name must be a string of printable characters, not {name!r}")
        self._session.check()
        self._session.remove(name, self._timeout if timeout is None else timeout)

    @staticmethod
    def _check_name(what: str, name: str) -> None:
        if not isinstance(name, str) or not name.isprintable():
            raise InvalidArgument(f"{what}: the name must be a string of printable characters")

    @classmethod
    def _check(cls, what: str, name: str, rule: Rule | None, init: Init | None, seed: int) -> None:
        cls._check_name(what, name)
        if not isinstance(rule, Rule):
            raise InvalidArgument(f"{what}: rule must be a windlass rule such as SGD(lr=0.1), not {rule!r}")
        if init is not None and not isinstance(init, Init):
            raise InvalidArgument(f"{what}: init must be a windlass initialiser such as Normal(std=0.01), not {init!r}")
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**64:
            raise InvalidArgument(f"{what}: seed must be a whole number between 0 and 2**64 - 1, not {seed!r}")

    def empty(self, shape: int | Sequence[int], dtype: object = np.float32) -> Any:
        """A registered array with undefined contents: requests use it in place, and borrow it until they are done.

        It is torch's where `dtype` is, or the arrays of the cluster are; ``torch.from_numpy`` of one of numpy's is
        registered, too.
        """
        self._session.check()
        raw = self._engine.empty(list(dims_of("empty", shape)), core_dtype(dtype, "empty"))
        return as_torch(raw) if in_torch(self, dtype) else as_numpy(raw)

    def slots(self, shape: int | Sequence[int], dtype: object = np.float32, *, count: int = 2) -> Slots:
        """Registered arrays that take turns: ``slots.next()`` is one that no request uses."""
        if not is_whole(count) or count < 1:
            raise InvalidArgument(f"slots: count must be a whole number of at least 1, not {count!r}")
        return Slots(self, tuple(self.empty(shape, dtype) for _ in range(count)))

    def worker(self, rank: int, world_size: int) -> "Cluster":
        """A further worker on the same servers, for a thread that acts as a worker. ::

            def work(rank):
                with cluster.worker(rank, 4) as worker:  # nobody waits for it once it is closed
                    train(worker)

        Each thread calls it with a rank of its own; they share registered arrays, and the end of one is not the end of
        the others. Where there is a scheduler, a cluster that ``connect()`` made is itself the worker of its rank:
        ``connect(reader=True)`` makes one that is none, so that threads have all the ranks.
        """
        if not (is_whole(rank) and is_whole(world_size) and 0 <= rank < world_size < 2**32):
            raise InvalidArgument(f"worker: rank {rank!r} is not in a world of {world_size!r}")
        self._session.check()
        if self._remote is None:
            session = _core.Session(self._engine, rank, world_size)
            made = Cluster(self._engine, session, None, self._timeout, near=self._near, sync=self._sync)
            made._near_barrier = self._near.barriers.enter(rank, world_size)
        elif self._attendance is not None:
            from windlass._client.scheduler_client import join

            at = self._attendance.at
            if not at.reader and rank == self.rank:
                raise InvalidArgument(
                    f"worker: this cluster is worker {rank} itself; a thread takes another rank, or "
                    "connect(reader=True) makes a cluster that is no worker"
                )
            made = join(dataclasses.replace(at, reader=False), rank, world_size, self._timeout, self._engine)
        else:
            made = self._remote.cluster(rank, world_size, self._timeout, self._engine)
        made._further, made._torch = True, self._torch
        return made

    def reader(self) -> "Cluster":
        """A reader on the same servers: it has no clock, nobody waits for it, and it changes nothing.

        Where the servers are inside the process it shares them: closing it leaves them to the others.
        """
        self._session.check()
        if self._remote is None:
            session = _core.Session(self._engine, 0, 0)
            made = Cluster(self._engine, session, None, self._timeout, near=self._near, sync=self._sync)
        elif self._attendance is not None:
            from windlass._client.scheduler_client import join

            made = join(dataclasses.replace(self._attendance.at, reader=True), None, 1, self._timeout, self._engine)
        else:
            made = self._remote.cluster(0, 0, self._timeout, self._engine)
        made._further, made._torch = True, self._torch
        return made

    @property
    def _reads(self) -> bool:
        """Whether it is a reader."""
        return self._session.world_size == 0

    def _no_reader(self, what: str, why: str) -> None:
        if self._reads:
            raise AccessDenied(f"{what}: a reader {why}")

    def _rule_spec(self, rule: Rule, shape: tuple[int, ...], *, is_table: bool = False) -> _core.RuleSpec:
        """What the core needs to know of a rule. Makes sure that a server inside the process finds the user's own."""
        spec = rule._spec(shape)
        if isinstance(rule, UserRule):
            if self._remote is None:
                rule._prepare(shape, is_table)
            self._know(rule._name(shape), rule._found)
        return spec

    def _know(self, name: str, found: object) -> None:
        """Registers what a server inside the process has to find; others find it themselves."""
        if self._remote is not None:
            return
        self._session.check()
        calls = self._near.calls(self._engine)
        calls.own.add(name, found)
        calls.start()

    def lease(
        self,
        samples: int,
        batch_size: int,
        *,
        name: str = "data",
        epochs: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        split: Split = "leased",
        ahead_seconds: float = 45.0,
        lease_size: int | None = None,
    ) -> Lease:
        """This worker's part of so many samples, leased from the scheduler; each iteration over it is one epoch.

        ``for epoch in range(3): for indices in lease: ...`` gives int64 arrays of at most `batch_size` sample numbers.
        If a worker dies, others get what it has not done; they also get what a slow worker has not begun. A lease is
        done when the iteration that used its last batch is closed (``tick()``, ``step()``, or the next push) and the
        servers have answered everything that was pushed in it.

        name: workers that use the same name share the samples; all terms must be the same.
        epochs: how often to go through the data. shuffle, seed: every epoch has an order of its own.
        split: "static" gives worker r of W the batches r, r + W, ...: the same in every run of W workers, without a
            scheduler; if a worker dies, its samples are lost.
        ahead_seconds: how much work to hold, so that the scheduler may be away for so long.
        lease_size: samples in one lease, a multiple of `batch_size` (default: 8 batches, fewer where there are few).
        """
        self._session.check()
        self._no_reader(f"lease {name!r}", "takes no leases: they are work that is done once")
        return make_lease(
            self,
            samples,
            batch_size,
            name=name,
            epochs=epochs,
            shuffle=shuffle,
            seed=seed,
            split=split,
            ahead_seconds=ahead_seconds,
            lease_size=lease_size,
        )

    def local(
        self,
        arrays: "Arrays",
        *,
        every: int,
        outer: Rule,
        name: str = "local",
        sync: Sync | str | None = None,
        timeout: float | None = None,
    ) -> "Local":
        """Local steps between exchanges: an optimizer of the worker's own, and an outer one on the servers. ::

            avg = cluster.local({"w": w, "b": b}, every=8, outer=wl.SGD(lr=0.7, momentum=0.9, nesterov=True))
            for x, y in batches:
                w -= lr * gradient(w, x, y)  # whatever the worker does to its arrays
                avg.step()  # after every 8 steps w and b become what the outer rule made of them
            avg.finish()

        Every worker calls it with arrays of the same names and shapes, at the same point.

        arrays: an array, a list of them, or a dictionary; float32 or float64, changed in place. Servers keep float32.
        every: how many steps there are between two exchanges.
        outer: the rule on the servers. SGD gets the arrays as they were after the last exchange minus as they are now:
            with a momentum and nesterov this is DiLoCo, ``SGD(lr=1.0)`` takes the mean of what workers have moved.
            Average gets the arrays themselves.
        name: of its tensors.
        sync: the policy of its tensors. Under BSP workers wait for each other at every exchange and the outer rule gets
            their mean. Under ASP each exchange is an update of its own: choose lr=1/world_size to move as far.
        timeout: seconds for the first weights to come.

        All workers begin with the same weights: those on the servers if there are any, else those of the lowest rank,
        for which the others wait. An exchange is an iteration: it closes what this worker has open. After a failed
        exchange, make a new one.
        """
        from windlass._client.local_steps import Local

        return Local(self, arrays, every=every, outer=outer, name=name, sync=sync, timeout=timeout)

    def elastic(
        self,
        arrays: "Arrays",
        *,
        every: int,
        alpha: float,
        name: str = "elastic",
        sync: Sync | str | None = None,
        timeout: float | None = None,
    ) -> "Elastic":
        """Elastic averaging (EASGD): a worker and the centre on the servers move towards each other. ::

            easgd = cluster.elastic([w, b], every=4, alpha=0.1)
            for x, y in batches:
                w -= lr * gradient(w, x, y)
                easgd.step()  # after every 4 steps: d = alpha * (w - centre); w -= d; centre += d
            easgd.finish()
            w, b = easgd.centre()  # the result; a worker's own weights are only near it

        arrays, every, name, sync, timeout: as of ``local()``.
        alpha: how far they move, above 0 and at most 1. Workers times alpha should be at most 1, or the centre
            overshoots.
        """
        from windlass._client.local_steps import Elastic

        return Elastic(self, arrays, every=every, alpha=alpha, name=name, sync=sync, timeout=timeout)

    def _close_leases(self, timeout: float, *, failed: bool = False) -> None:
        while self._leases:  # they refer to us: a cycle that the collector would not find
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
        return ASP() if self._sync is None else self._sync

    @property
    def memory_bytes(self) -> int:
        """What the server inside this process has taken for tensors and tables."""
        if self._remote is not None:
            raise InvalidArgument("memory_bytes: the servers are other processes")
        return self._engine.memory_bytes

    def tick(self) -> None:
        """Closes this worker's iteration, at every object of its app. Does not wait for the servers."""
        self._session.check()
        self._session.raise_unseen()
        self._session.tick(self._timeout)
        self._between()

    def _between(self) -> None:
        """Between two iterations: takes the checkpoint that is due, if one is."""
        if self._attendance is not None and self._attendance.saver.due:
            saving.take_due(self)

    def save(
        self,
        tag: str | None = None,
        *,
        only: Sequence[str | Tensor | Table] | None = None,
        extra: Any = None,
        timeout: float | None = None,
    ) -> saving.SavedCheckpoint:
        """Takes a checkpoint of this app, cut at this worker's clock. Call it between two iterations.

        Blocks until nothing of the cut can be lost; the files are written while training goes on, and ``wait()`` of
        what is returned ends when the checkpoint is complete. Under BSP it has exactly the updates that were closed
        before; under other policies each shard has what had arrived. tag: a name to find it by; those with a tag stay.
        only: some objects; nobody resumes from such a checkpoint unasked. extra: whatever JSON can say, which this rank
        finds in ``cluster.resumed`` again.
        """
        self._session.check()
        self._no_reader("save", "takes no checkpoints: `windlass checkpoint save` asks for one from outside")
        return saving.save(self, tag, only, extra, self._timeout if timeout is None else timeout)

    def keep(self, extra: "Callable[[], Any] | None") -> None:
        """Keeps what `extra()` returns in each checkpoint, for this rank to find after a restart. None: keeps nothing.

        It is called whenever a checkpoint is due, between two iterations, and returns whatever JSON can say.
        ``cluster.resumed.extra`` has that value in a run that resumes.
        """
        if self._attendance is not None:
            self._attendance.saver.keeps = extra

    @property
    def resumed(self) -> "saving.Resumed | None":
        """The checkpoint that this cluster began with: id, clock, and what this rank left in it, if there was one."""
        return None if self._attendance is None else self._attendance.resumed

    def settle(self, *, timeout: float | None = None) -> None:
        """Waits until everything this worker has pushed and closed has arrived at the servers.

        What was pushed is then in every other worker's next pull, or under BSP in the update of its iteration, whatever
        becomes of this process. Errors of futures that nobody waited for are raised here.
        """
        self._session.check()
        self._session.settle(self._timeout if timeout is None else timeout)

    def barrier(self, *, timeout: float | None = None) -> None:
        """Waits until every worker of the view has arrived, too.

        It calls ``settle()`` first: what any worker pushed before the barrier is in everybody's pulls after it. It
        closes no iteration; under BSP a push is in the update of its iteration, so call ``tick()`` before.

        It no longer waits for a worker that leaves or is lost. Under ``on_worker_loss="wait"`` it waits for the
        replacement, which joins the others at the barrier where they stand. Timeout names the ranks that are missing.
        The worker has arrived all the same: a second call waits at the same barrier, or returns at once if the others
        have passed it.
        """
        self._meet("barrier", None, timeout)

    def all_reduce(self, x: ArrayLike, op: ReduceOp = "sum", *, timeout: float | None = None) -> Any:
        """The sum, mean, maximum or minimum of what every worker of the view gives, the same bits for all. ::

            right, total = cluster.all_reduce([right, len(y)])  # of this worker; of all from here on

        x: a number, or a small array of numpy's or torch's: at most 1 MiB of float32, float64 or int64. All workers
            give the same dtype and shape for the same `op`, or all get an error that names two that differ. For more
            numbers use ``push_pull()`` of a tensor under BSP with the rule Sum or Average.

        The result is in the form of `x`. A sum of int64 wraps around, and the mean of int64 is float64.

        It is a barrier that carries numbers, without ``settle()``: whose turn it is, who is waited for and what Timeout
        means is as for ``barrier()``. A worker that leaves or is lost before all have arrived is not in the result;
        ``all_reduce_counted()`` says of how many workers it is. After Timeout, call it again with the same numbers.
        """
        return self.all_reduce_counted(x, op, timeout=timeout).value

    def all_reduce_counted(self, x: ArrayLike, op: ReduceOp = "sum", *, timeout: float | None = None) -> Reduction:
        """``all_reduce()``, and of how many workers the result is: fewer where some have left or were lost."""
        numbers = numbers_of(x, op)
        reduced = self._meet("all_reduce", numbers, timeout)
        if reduced is None:  # nobody else is there
            reduced = combined([numbers])
        return Reduction(value_of(reduced, x, self._torch), reduced.workers)

    def _meet(self, what: str, numbers: Numbers | None, timeout: float | None) -> Reduced | None:
        """Stands at the next barrier until all do, and gives these numbers there. None: there was nothing to give."""
        timeout = self._timeout if timeout is None else timeout
        if not timeout >= 0:
            raise InvalidArgument(f"{what}: timeout must be at least 0 seconds, not {timeout}")
        self._session.check()
        self._no_reader(what, "is not waited for, and waits for nobody")
        if self._attendance is None and self._near_barrier is None and self.world_size > 1:
            where = "with servers=[...] there is no scheduler that could count" if self._remote else "nobody counts"
            raise InvalidArgument(f"{what}: {where} {self.world_size} workers")
        if not self._at_barrier.acquire(blocking=False):
            raise InvalidArgument(f"{what}: another thread of this worker is at it")
        try:
            if self._unmet and self._unmet[0] != numbers:
                raise InvalidArgument(
                    f"{what}: the last barrier or all_reduce of this worker has not ended, and what it gave there may "
                    "count; call that again with the same numbers"
                )
            deadline = time.monotonic() + timeout
            if numbers is None:
                self._session.settle(timeout)
            self._unmet = [numbers]
            reduced = None
            try:
                if self._attendance is not None:
                    reduced = self._attendance.arrive(deadline, numbers)
                elif self._near_barrier is not None:
                    # The wait holds no native object: the process may end meanwhile, and with it the thread, as it is.
                    reduced = self._near_barrier.arrive(deadline, lambda: self._session.check(), numbers)
            except Timeout:  # the worker stands there all the same, as it does after Ctrl-C
                raise
            except WindlassError:
                self._unmet = []
                raise
            self._unmet = []
        finally:
            self._at_barrier.release()
        if reduced is not None and reduced.error:
            raise error_in(reduced, what)
        return reduced

    def report(self, **values: Any) -> None:
        """Reports numbers for people to see, such as ``report(loss=0.3)``: the newest of each name counts.

        They travel to the scheduler at most once a second, the last ones when the worker leaves, and are shown by
        ``windlass status``, ``/metrics`` and ``windlass run --progress``. At most 32 names of up to 64 characters.
        A number that is not finite is shown as nan.
        """
        self._reports.put(values)

    @property
    def reported(self) -> dict[str, float | None]:
        """What ``report()`` was given last, by name; None: a number that was not finite."""
        return self._reports.newest()

    def _patience(self, sync: Sync) -> Patience:
        """How long calls on an object wait, unless they say otherwise.

        Where a scheduler watches, a wait at a gate has no limit: it ends when the awaited worker comes, or is lost.
        """
        seconds = self._timeout if self._attendance is None else _FOREVER_SECONDS
        return Patience(
            self._timeout if isinstance(sync, ASP) else seconds, seconds if isinstance(sync, BSP) else self._timeout
        )

    def step(self, *, timeout: float | None = None) -> Step:
        """Gathers what one iteration pushes and pulls, for a ``with`` block.

        ``with cluster.step() as s: s.push_pull(w, grad, out=out); rows = s.pull(table, keys)``. At its end everything
        leaves as one request per server, in order, the worker's iteration is closed (``tick()``), and the block waits
        for all of it. It is one iteration, even with several pushes to the same object. A block that raises sends
        nothing. If a request fails, its error is raised when the others are done; if it could not even be sent, the
        iteration is not closed.
        """
        # Where a scheduler watches, a wait at a gate has no limit; a server that hangs is given up by it.
        patience = self._timeout if self._attendance is None else _FOREVER_SECONDS
        return Step(self, patience if timeout is None else timeout)

    def fingerprint(self, *, timeout: float | None = None) -> str:
        """A checksum of everything on the servers; equal contents have equal checksums, however they came about."""
        return f"{self._session.fingerprint(self._timeout if timeout is None else timeout):016x}"

    def abandon(self, server: int | str) -> None:
        """Gives up a server for good, by its number or its address: requests to it raise ServerLost from now on.

        For a server that hangs. If it shares memory with this process it could still finish a write; so arrays that it
        was given get fresh pages at the same addresses, with the same contents.
        """
        self._session.check()
        if self._dialer is None or self._remote is None:
            raise InvalidArgument("abandon: the server is inside this process")
        addresses = [str(address) for address in self._remote.servers]
        if isinstance(server, str) and str(Address.parse(server)) in addresses:
            server = addresses.index(str(Address.parse(server)))
        if not is_whole(server) or not 0 <= int(server) < len(addresses):
            raise InvalidArgument(f"abandon: {server!r} is none of the servers {addresses}")
        self._dialer.abandon(int(server))

    def close(self, *, timeout: float | None = None) -> None:
        """Waits for requests under way; every later call raises Closed, and nobody waits for this worker any more.

        Idempotent. The end of a further worker (``worker()``) is that of nobody else.
        """
        self._close(self._timeout if timeout is None else timeout)

    def _close(self, timeout: float, *, failed: bool = False) -> None:
        """`failed`: this worker did not finish, and may be replaced."""
        if self._engine.forked or isinstance(self._engine, Released):
            return
        if self._further and self._remote is None and not self._engine.closed:
            self._close_alone(timeout, failed=failed)
            return
        deadline = time.monotonic() + timeout
        try:
            if not failed and not self._engine.closed and self._session.has_open_pushes:
                self._session.tick(timeout)  # the last iteration counts, too
            self._close_leases(timeout, failed=failed)
            with contextlib.suppress(WindlassError):  # a lost server waits for nobody
                self._session.leave(min(timeout, _CLOSE_SECONDS))
            self._engine.close(timeout)
        finally:
            self._near.barriers.wake()
            if self._engine.closed:
                self._near.close()
            if self._dialer is not None:
                self._dialer.close()
            if self._attendance is not None:
                self._attendance.close(failed=failed, timeout=max(0.5, deadline - time.monotonic()))
        self._session.raise_unseen()

    def _close_alone(self, timeout: float, *, failed: bool) -> None:
        """Of a worker that shares its engine with others."""
        if self._session.closed:
            return
        try:
            if not failed:
                if self._session.has_open_pushes:
                    self._session.tick(timeout)  # the last iteration counts, too
                self._session.settle(timeout)
        finally:
            self._close_leases(timeout, failed=failed)
            if self._near_barrier is not None:
                self._near_barrier.leave()
            self._session.leave(timeout)
            self._session.close()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # the error that is being raised says more than close() could add
            meant = isinstance(error, SystemExit) and error.code in (None, 0)
            with contextlib.suppress(WindlassError):
                self._close(min(self._timeout, _CLOSE_SECONDS), failed=not meant)

    def __repr__(self) -> str:
        if isinstance(self._engine, Released):
            return "<Cluster, closed>"
        state = "closed" if self._engine.closed or self._session.closed else "open"
        where = "embedded" if self._remote is None else f"{len(self._remote.servers)} servers, app {self._remote.app!r}"
        return f"<Cluster, {where}, rank {self.rank} of {self.world_size}, {state}>"


atexit.register(open_clusters.close_all)  # after those of _release and dial, so that it is called before them
