"""Tensors: named dense arrays on the servers."""

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from windlass import _core
from windlass._errors import InvalidArgument, NotApplied
from windlass._objects import snapshot
from windlass._objects.arrays import Array, ArrayLike, as_input, core_dtype
from windlass._objects.delay import Delayed
from windlass._objects.future import Future
from windlass._objects.outputs import (
    check_priority,
    check_weight,
    given_output,
    in_torch,
    landing_for,
    new_output,
    nothing,
)
from windlass._objects.query import Keys, Queries, Walk
from windlass._objects.rows import Rows, chosen_rows
from windlass._objects.snapshot import Snapshot
from windlass._objects.step import Step, given
from windlass._objects.vector import VectorOperations
from windlass._objects.version import Version
from windlass._release import owns_native
from windlass._rules.init import Constant, Init
from windlass._rules.rule import Rule
from windlass._rules.sync import Sync
from windlass._rules.written import write_rule

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster


class Pulled(NamedTuple):
    """What ``pull_newer()`` returns."""

    value: Any  #: the array; without out=, None if nothing has changed
    version: Version  #: for the next ``pull_newer()``
    changed: bool  #: whether anything was newer


@owns_native("_core")
class Tensor(Queries, VectorOperations):
    """A named dense array on the servers; made by ``cluster.tensor()``.

    ``t[10:20]`` and ``t[[3, 1, 4]]`` are the same thing for some of the rows.
    """

    __slots__ = (
        "_cluster",
        "_core",
        "_dtype",
        "_hyper",
        "_like",
        "_patience",
        "_rows",
        "_shape",
        "_stored",
        "_what",
        "init",
        "name",
        "reject_nonfinite",
        "rule",
        "seed",
        "sync",
    )

    def __init__(
        self,
        cluster: "Cluster",
        name: str,
        shape: tuple[int, ...],
        rule: Rule,
        init: Init,
        dtype: object,
        seed: int,
        reject_nonfinite: bool,
        sync: Sync,
        like: str,
    ) -> None:
        self._what = f"tensor {name!r}"
        self._cluster = cluster
        self._dtype = core_dtype(dtype, self._what)
        self._stored = self._dtype.name.lower()
        self._shape = shape
        self._rows: Rows | None = None
        self._hyper = rule._sent()
        self._like = like  # the name of the tensor that it lies like, or ""
        self.name = name
        self.rule = rule
        self.init = init
        self.seed = seed
        self.reject_nonfinite = reject_nonfinite
        self.sync = sync
        self._patience = cluster._patience(sync)
        kind, a, b = init._spec()
        if self._dtype == _core.Dtype.INT64 and isinstance(init, Constant):
            exact = a.is_integer() and int(a) == init.value  # it goes to the core as float64
            if not (exact and -(2**63) <= a < 2**63):
                raise InvalidArgument(f"{self._what}: {init} is not a number that an int64 tensor can start with")
        self._core = _core.Tensor(
            cluster._session,
            name,
            list(shape),
            self._dtype,
            cluster._rule_spec(rule, shape),
            kind,
            a,
            b,
            seed,
            reject_nonfinite,
            sync._spec(),
            like,
            cluster._timeout,
            write_rule(rule),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape; of rows, that of the rows."""
        return self._shape

    @property
    def dtype(self) -> str:
        """What is kept on the servers: 'float32', 'float64' or 'int64'."""
        return self._stored

    @property
    def shards(self) -> int:
        """How many shards the whole tensor is cut into."""
        return self._core.shards

    @property
    def shard_elements(self) -> int:
        """How many elements of the whole tensor are in one shard; the last shard may have fewer."""
        return self._core.shard_elements

    def __repr__(self) -> str:
        rows = "" if self._rows is None else " (rows)"
        return f"<Tensor {self.name!r}{rows} {self.dtype}{self.shape} {self.rule}>"

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError(f"tensor {self.name!r} is a scalar and has no len()")
        return self._shape[0]

    def __getitem__(self, rows: Any) -> "Tensor":
        """Some of the rows: a slice without a step, or a list of row numbers in any order."""
        what = f"tensor {self.name!r}"
        if self._rows is not None:
            raise InvalidArgument(f"{what}: rows of rows; index the whole tensor once")
        if not self._shape:
            raise InvalidArgument(f"{what}: a scalar has no rows")
        view = Tensor.__new__(Tensor)
        for slot in Tensor.__slots__:
            setattr(view, slot, getattr(self, slot))
        view._rows, count = chosen_rows(rows, self._shape[0], what)
        view._shape = (count, *self._shape[1:])
        return view

    # -- pull ------------------------------------------------------------------------------------------------------

    def pull(
        self,
        *,
        out: Any = None,
        dtype: object = None,
        timeout: float | None = None,
    ) -> Any:
        """The weights. Returns `out`, or a new array (of `dtype`, by default what is kept).

        A new array is torch's where `dtype` is, or those of the cluster are (``connect(arrays="torch")``).
        """
        target, result = self._target(out, dtype)
        self._core.call_now(None, target, self._rows, None, 1.0, self._patience.pull if timeout is None else timeout)
        return result

    def pull_async(
        self, *, out: Any = None, dtype: object = None, timeout: float | None = None, priority: int = 0
    ) -> Future[Any]:
        """``pull()`` as a future. The weights are in `out` once it has been waited for, not before.

        Among requests that wait to be sent to a server elsewhere, those of higher `priority`, 0 to 255, go first;
        requests about the same shard keep their order.
        """
        return self._later(None, None, out, dtype, None, 1.0, timeout, priority)

    def pull_newer(
        self,
        version: Version | None = None,
        *,
        out: Any = None,
        dtype: object = None,
        timeout: float | None = None,
    ) -> Pulled:
        """What has changed since an earlier ``pull_newer()``, which returned that version; without one, everything.

        Only shards that have changed travel. `out` must hold what the earlier call returned.
        """
        what, since = f"pull_newer of {self._what}", None
        if version is not None:
            if not isinstance(version, Version):
                raise InvalidArgument(f"{what}: expected a version from an earlier pull_newer, not {version!r}")
            if version.tensor != self.name:
                raise InvalidArgument(f"{what}: it is a version of tensor {version.tensor!r}")
            since = version.of
        target, result = self._target(out, dtype)
        seconds = self._patience.pull if timeout is None else timeout
        deadline = time.monotonic() + seconds
        seen, changed = self._core.pull_newer(target, self._rows, since, seconds)
        if out is None and since is not None and changed:
            # A fresh array has nothing of the earlier pull: fetch the shards that were left out, too.
            left = max(deadline - time.monotonic(), 0.0)
            seen, _ = self._core.pull_newer(target, self._rows, None, left)
        return Pulled(result if out is not None or changed else None, Version(self.name, seen), changed)

    # -- push ------------------------------------------------------------------------------------------------------

    def push(
        self,
        grad: ArrayLike,
        *,
        weight: float = 1.0,
        timeout: float | None = None,
        priority: int = 0,
        only: NotApplied | None = None,
        **hyper: float,
    ) -> Future[None]:
        """Sends a gradient; the servers apply the rule. A future: ``.wait()`` returns when it has been applied.

        Hyperparameters of the rule can be given for this push (``lr=0.01``). `weight` is this push's share under BSP,
        where an update is a mean over workers; elsewhere every push is an update of its own and `weight` changes
        nothing. Under BSP the future is done when every worker has closed the iteration. A registered array is borrowed
        until the future is done; an ordinary one is free when the call returns. `priority` is as for ``pull_async()``.
        `only` sends again what an earlier push of the same rows was refused, an entry of its error's `not_applied`.
        """
        check_weight(weight, "tensor", self.name)
        if self._cluster._saver.awake:
            self._cluster._before_push()
        urgency = check_priority(priority, self._what)
        source = as_input(grad, self._what, self._stored)
        seconds = self._cluster._timeout if timeout is None else timeout
        shards = None if only is None else only._of(self.name, self._what)
        call = self._core.call_later(
            source, None, self._rows, self._numbers(hyper), float(weight), seconds, urgency, shards
        )
        return Future(call, nothing, self._patience.push if timeout is None else timeout)

    push_async = push  #: push is a future already; the name its siblings have

    def push_pull(
        self,
        grad: ArrayLike,
        *,
        out: Any = None,
        dtype: object = None,
        weight: float = 1.0,
        timeout: float | None = None,
        **hyper: float,
    ) -> Any:
        """Sends a gradient and returns the weights after it, in one request.

        Closes the shards it touches: the worker's next push to one of them belongs to its next iteration and moves
        ``cluster.clock``, so a loop of push_pulls needs no ``tick()``.
        """
        check_weight(weight, "tensor", self.name)
        if self._cluster._saver.awake:
            self._cluster._before_push()
        source = as_input(grad, self._what, self._stored)
        target, result = self._target(out, dtype, grad)
        seconds = self._patience.pull if timeout is None else timeout
        self._core.call_now(source, target, self._rows, self._numbers(hyper), float(weight), seconds)
        return result

    def push_pull_async(
        self,
        grad: ArrayLike,
        *,
        out: Any = None,
        dtype: object = None,
        weight: float = 1.0,
        timeout: float | None = None,
        priority: int = 0,
        **hyper: float,
    ) -> Future[Any]:
        """``push_pull()`` as a future. The weights are in `out` once it has been waited for, not before.

        `priority` is as for ``pull_async()``.
        """
        check_weight(weight, "tensor", self.name)
        if self._cluster._saver.awake:
            self._cluster._before_push()
        source = as_input(grad, self._what, self._stored)
        return self._later(source, grad, out, dtype, self._numbers(hyper), float(weight), timeout, priority)

    def delayed(self, delay: int) -> Delayed:
        """For a loop that continues with weights up to `delay` of its own steps old while its push_pulls travel."""
        return Delayed(self, delay)

    # -- as it is kept ---------------------------------------------------------------------------------------------

    def snapshot(self, *, timeout: float | None = None) -> Snapshot:
        """Weights, rule state and counts of updates as they are kept, with everything that this worker has pushed.

        Waits for no other worker, whatever the policy. Each shard is of one moment; the tensor as a whole need not be.
        """
        taken = snapshot.take(self, self._cluster._timeout if timeout is None else timeout)
        return snapshot.in_torch(taken) if self._cluster._torch else taken

    def put(
        self,
        weights: "ArrayLike | None" = None,
        *,
        state: Mapping[str, ArrayLike] | None = None,
        updates: "int | ArrayLike | None" = None,
        timeout: float | None = None,
    ) -> None:
        """Sets weights, rule state (by the names of ``Snapshot.state``) and counts of updates, as far as given.

        Returns when it is done; pulls see it from then on. It is not a push: it applies no rule, closes no iteration
        and waits for nobody. Under BSP, pushes that wait for their update are applied to the new weights. Shards are
        set one after the other, not all at one moment. `updates` is one number for all shards or one for each.
        """
        snapshot.put(self, weights, state, updates, self._cluster._timeout if timeout is None else timeout)

    # -- the rest --------------------------------------------------------------------------------------------------

    def _join(
        self,
        step: Step,
        verb: str,
        arrays: tuple[ArrayLike, ...],
        out: Any,
        dtype: object,
        create: bool,
        weight: float,
        hyper: dict[str, float],
        only: NotApplied | None = None,
    ) -> Any:
        """Adds a request to a step."""
        core = step._open(self._cluster, self._what)
        if not create:
            raise InvalidArgument(f"pull of {self._what} in a step: create=False is for tables")
        source = target = result = hypers = None
        if verb != "pull":
            (grad,) = given(arrays, ("a gradient",), f"{verb} of {self._what} in a step")
            check_weight(weight, "tensor", self.name)
            source, hypers = as_input(grad, self._what, self._stored), self._numbers(hyper)
        else:
            given(arrays, (), f"{verb} of {self._what} in a step")
        if verb != "push":
            target, result = self._target(out, dtype, *arrays)
        shards = None if only is None else only._of(self.name, self._what)
        self._core.add_to(core, source, target, self._rows, hypers, float(weight), shards)
        step._kept.append((source, target))
        return result

    def fingerprint(self, *, timeout: float | None = None) -> str:
        """A checksum of weights and rule state; equal for equal contents, however they came about."""
        return f"{self._core.fingerprint(self._cluster._timeout if timeout is None else timeout):016x}"

    def _call(self, name: str, arguments: bytes, timeout: float) -> list[bytes]:
        return self._core.call(name, arguments, timeout)

    def _ask(self, query: bytes, timeout: float) -> bytes:
        return self._core.query(query, timeout)

    def _row_numbers(self) -> int:
        return math.prod(self._shape[1:])

    def _is_whole(self) -> bool:
        return self._dtype == _core.Dtype.INT64

    def _check_query(self, what: str) -> None:
        if self._rows is not None:
            raise InvalidArgument(f"{what}: of the whole tensor only; choose rows with where=, such as wl.key < 100")

    def _walk_keys(self, where: bytes) -> Walk:
        return Walk(self._core.keys(where))

    def _next_keys(self, walk: Walk, most: int, timeout: float) -> Keys:
        keys: Keys = walk.next(most, timeout)
        return keys

    def _numbers(self, hyper: dict[str, float]) -> tuple[float, ...]:
        return self.rule._with(hyper)._sent() if hyper else self._hyper

    def _target(self, out: Any, dtype: object, grad: Any = None) -> tuple[Any, Any]:
        """The array the core writes, and the same memory as the caller sees it, who gave this gradient."""
        if out is not None:
            return given_output(out, dtype, self._what, self._stored), out
        core = self._dtype if dtype is None else core_dtype(dtype, self._what)
        return new_output(self._cluster, self._shape, core, in_torch(self._cluster, dtype, grad))

    def _later(
        self,
        source: Any,
        grad: Any,
        out: Any,
        dtype: object,
        hyper: tuple[float, ...] | None,
        weight: float,
        timeout: float | None,
        priority: int,
    ) -> Future[Any]:
        urgency = check_priority(priority, self._what)
        target, result = self._target(out, dtype, grad)
        landing, land = landing_for(self._cluster, target)
        seconds = self._patience.pull if timeout is None else timeout
        call = self._core.call_later(source, landing, self._rows, hyper, weight, seconds, urgency)
        return Future(call, lambda: land(result), seconds)


__all__ = ["Array", "Pulled", "Tensor"]
