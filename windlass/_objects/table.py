"""Tables: maps from 64-bit keys to rows, which grow by themselves."""

from collections.abc import Iterable, Iterator, Mapping
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from windlass import _core
from windlass._errors import InvalidArgument, NotApplied
from windlass._objects.arrays import ArrayLike, as_keys, as_rows, core_dtype
from windlass._objects.delay import check_delay, pull_ahead
from windlass._objects.expressions import Expression
from windlass._objects.future import Future
from windlass._objects.outputs import (
    check_priority,
    check_weight,
    given_output,
    in_torch,
    landing_for,
    new_output,
    nothing,
    shown,
)
from windlass._objects.query import Keys, Queries, Walk
from windlass._objects.row_state import ChunkWithState, chunk_of, put
from windlass._objects.step import Step, given
from windlass._release import owns_native
from windlass._rules.init import Init
from windlass._rules.rule import Rule
from windlass._rules.sync import Sync
from windlass._rules.written import write_rule

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster


class Chunk(NamedTuple):
    """Some rows of a table."""

    keys: Any  #: (n,) of uint64; in torch int64
    weights: Any  #: (n, dim) of float32


@owns_native("_core")
class Table(Queries):
    """A named map from 64-bit keys to rows of `dim` float32 numbers; made by ``cluster.table()``.

    Keys are arrays of int64, uint64 or int32, in any order, repeated ones too. They are bit patterns: -1 and
    2**64 - 1 are one key.
    """

    __slots__ = (
        "_cluster",
        "_core",
        "_hyper",
        "_patience",
        "_what",
        "dim",
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
        dim: int,
        rule: Rule,
        init: Init,
        seed: int,
        reject_nonfinite: bool,
        sync: Sync,
    ) -> None:
        self._what = f"table {name!r}"
        self._cluster = cluster
        self._hyper = rule._sent()
        self.name = name
        self.dim = dim
        self.rule = rule
        self.init = init
        self.seed = seed
        self.reject_nonfinite = reject_nonfinite
        self.sync = sync
        self._patience = cluster._patience(sync)
        kind, a, b = init._spec()
        self._core = _core.Table(
            cluster._session,
            name,
            dim,
            cluster._rule_spec(rule, (dim,), is_table=True),
            kind,
            a,
            b,
            seed,
            reject_nonfinite,
            sync._spec(),
            cluster._timeout,
            write_rule(rule),
        )

    def __repr__(self) -> str:
        return f"<Table {self.name!r} dim={self.dim} {self.rule}>"

    def __len__(self) -> int:
        """How many rows there are."""
        return self._core.rows(self._cluster._timeout)

    # -- pull ------------------------------------------------------------------------------------------------------

    def pull(
        self,
        keys: ArrayLike,
        *,
        out: Any = None,
        dtype: object = None,
        create: bool = True,
        timeout: float | None = None,
    ) -> Any:
        """The rows of the keys, (len(keys), dim), in their order. Missing rows are made by the initialiser.

        With ``create=False`` a missing row's initial value is returned, too, but nothing is stored. A new array is
        torch's where keys or `dtype` are, or those of the cluster (``connect(arrays="torch")``).
        """
        source, target, result = self._arrays(keys, out, dtype)
        seconds = self._patience.pull if timeout is None else timeout
        self._core.call_now(source, None, target, None, 1.0, create, seconds)
        return result

    def pull_async(
        self,
        keys: ArrayLike,
        *,
        out: Any = None,
        dtype: object = None,
        create: bool = True,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Future[Any]:
        """``pull()`` as a future. The rows are in `out` once it has been waited for, not before.

        Among requests that wait to be sent to a server elsewhere, those of higher `priority`, 0 to 255, go first;
        requests about the same shard keep their order.
        """
        urgency = check_priority(priority, self._what)
        source, target, result = self._arrays(keys, out, dtype)
        landing, land = landing_for(self._cluster, target)
        seconds = self._patience.pull if timeout is None else timeout
        call = self._core.call_later(source, None, landing, None, 1.0, create, seconds, urgency)
        return Future(call, lambda: land(result), seconds)

    def ahead(
        self,
        batches: Iterable[ArrayLike],
        *,
        delay: int = 1,
        dtype: object = None,
        create: bool = True,
        timeout: float | None = None,
    ) -> Iterator[tuple[Any, Any]]:
        """``(keys, rows)`` of every batch of keys, pulled up to `delay` steps before it is used. ::

            for keys, rows in users.ahead(batches, delay=2):
                users.push(keys, gradient(rows))

        Rows may lack what this worker pushed in its last `delay` steps; with 0 they lack nothing. They are in a new
        array. A batch is requested `delay` steps early and must not change until it comes back.
        """
        steps = check_delay(delay, f"ahead: {self._what}")
        self._cluster._session.check()
        return pull_ahead(self, batches, steps, dtype, create, timeout)

    # -- push ------------------------------------------------------------------------------------------------------

    def push(
        self,
        keys: ArrayLike,
        grads: ArrayLike,
        *,
        weight: float = 1.0,
        timeout: float | None = None,
        priority: int = 0,
        only: NotApplied | None = None,
        **hyper: float,
    ) -> Future[None]:
        """Sends a gradient per key, (len(keys), dim); the servers apply the rule to those rows. A future.

        Gradients of a repeated key are combined, in order, into one update: optimizers and Sum add them, Max takes
        the largest, Assign the last, Average the mean. `priority` is as for ``pull_async()``. `only` sends again what
        an earlier push of the same keys was refused, an entry of its error's `not_applied`.
        """
        check_weight(weight, "table", self.name)
        if self._cluster._saver.awake:
            self._cluster._before_push()
        urgency = check_priority(priority, self._what)
        keyed, source = as_keys(keys, self._what), as_rows(grads, self._what, self.dim)
        seconds = self._cluster._timeout if timeout is None else timeout
        shards = None if only is None else only._of(self.name, self._what)
        call = self._core.call_later(
            keyed, source, None, self._numbers(hyper), float(weight), True, seconds, urgency, shards
        )
        return Future(call, nothing, self._patience.push if timeout is None else timeout)

    push_async = push  #: push is a future already; the name its siblings have

    def push_pull(
        self,
        keys: ArrayLike,
        grads: ArrayLike,
        *,
        out: Any = None,
        dtype: object = None,
        weight: float = 1.0,
        timeout: float | None = None,
        **hyper: float,
    ) -> Any:
        """Sends gradients and returns the rows after them, in one request."""
        check_weight(weight, "table", self.name)
        if self._cluster._saver.awake:
            self._cluster._before_push()
        source, target, result = self._arrays(keys, out, dtype, grads)
        grad = as_rows(grads, self._what, self.dim)
        seconds = self._patience.pull if timeout is None else timeout
        self._core.call_now(source, grad, target, self._numbers(hyper), float(weight), True, seconds)
        return result

    def push_pull_async(
        self,
        keys: ArrayLike,
        grads: ArrayLike,
        *,
        out: Any = None,
        dtype: object = None,
        weight: float = 1.0,
        timeout: float | None = None,
        priority: int = 0,
        **hyper: float,
    ) -> Future[Any]:
        """``push_pull()`` as a future. The rows are in `out` once it has been waited for, not before.

        `priority` is as for ``pull_async()``.
        """
        check_weight(weight, "table", self.name)
        if self._cluster._saver.awake:
            self._cluster._before_push()
        urgency = check_priority(priority, self._what)
        source, target, result = self._arrays(keys, out, dtype, grads)
        grad = as_rows(grads, self._what, self.dim)
        landing, land = landing_for(self._cluster, target)
        seconds = self._patience.pull if timeout is None else timeout
        call = self._core.call_later(source, grad, landing, self._numbers(hyper), float(weight), True, seconds, urgency)
        return Future(call, lambda: land(result), seconds)

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
        names = ("keys",) if verb == "pull" else ("keys", "a gradient per key")
        keys, *grads = given(arrays, names, f"{verb} of {self._what} in a step")
        grad = target = result = hypers = None
        if verb == "push":
            source = as_keys(keys, self._what)
        else:
            source, target, result = self._arrays(keys, out, dtype, *grads)
        if grads:
            check_weight(weight, "table", self.name)
            grad, hypers = as_rows(grads[0], self._what, self.dim), self._numbers(hyper)
        shards = None if only is None else only._of(self.name, self._what)
        self._core.add_to(core, source, grad, target, hypers, float(weight), create, shards)
        step._kept.append((grad, target))
        return result

    def delete(
        self, keys: "ArrayLike | EllipsisType" = ..., *, where: Expression | None = None, timeout: float | None = None
    ) -> int:
        """Removes rows with their rule state; returns how many there were.

        With `where`, only rows for which the condition holds when they are removed: among these keys, or in the whole
        table, chunk by chunk; the timeout is that of one chunk.
        """
        condition = self._condition("delete", where)
        seconds = self._cluster._timeout if timeout is None else timeout
        if keys is not ...:  # None is no list of keys, and not all of them
            return self._core.erase(as_keys(keys, self._what), condition, seconds)
        if where is None:
            raise InvalidArgument(f"delete of {self._what}: which rows? Give keys, where=, or both")
        return sum(self._core.erase(found, condition, seconds) for found in self._key_chunks(condition, 65536, seconds))

    @overload
    def export(
        self,
        where: Expression | None = None,
        *,
        chunk_rows: int = 65536,
        state: Literal[False] = False,
        timeout: float | None = None,
    ) -> Iterator[Chunk]: ...

    @overload
    def export(
        self,
        where: Expression | None = None,
        *,
        chunk_rows: int = 65536,
        state: Literal[True],
        timeout: float | None = None,
    ) -> Iterator[ChunkWithState]: ...

    def export(
        self,
        where: Expression | None = None,
        *,
        chunk_rows: int = 65536,
        state: bool = False,
        timeout: float | None = None,
    ) -> Iterator[Chunk] | Iterator[ChunkWithState]:
        """All rows, or those for which a condition holds, in chunks of at most `chunk_rows`.

        Their order depends on the keys alone. Training may continue meanwhile: a row that is there from start to end
        comes exactly once. `timeout` is that of one chunk.

        With ``state=True`` each chunk also has the rule's state and counts of updates, and goes into ``put()`` as it
        is. Rows that were neither updated nor put are left out: they have what the initialiser gives them anywhere.
        """
        self._check_chunk("export", chunk_rows)
        condition = self._condition("export", where)
        self._cluster._session.check()
        seconds = self._cluster._timeout if timeout is None else timeout
        if state:
            return self._chunks_with_state(chunk_rows, condition, seconds)
        return self._chunks(chunk_rows, condition, seconds)

    def _chunks(self, chunk_rows: int, condition: bytes, timeout: float) -> Iterator[Chunk]:
        walk = Walk(self._core.export(condition, _core.Scanned.ROWS))
        while True:
            keys, weights = walk.next(chunk_rows, timeout)
            if len(keys) == 0:
                return
            yield Chunk(shown(self._cluster, keys), shown(self._cluster, weights))

    def _chunks_with_state(self, chunk_rows: int, condition: bytes, timeout: float) -> Iterator[ChunkWithState]:
        walk = Walk(self._core.export(condition, _core.Scanned.ROWS_WITH_STATE))
        while True:
            keys, weights, arrays, updates = walk.next(chunk_rows, timeout)
            if len(keys) == 0:
                return
            yield chunk_of(self, keys, weights, arrays, updates)

    def put(
        self,
        keys: ArrayLike,
        weights: ArrayLike,
        state: Mapping[str, ArrayLike] | None = None,
        updates: "int | ArrayLike | None" = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Sets whole rows, and makes those that are missing: weights, rule state by name, and counts of updates.

        State that is not given starts anew, as that of a fresh row; so does the count, at 0. Of a repeated key the last
        row counts. Any number of rows is sent in portions, one after the other; `timeout` is that of one portion.

        Returns when it is done; pulls see it from then on. It is not a push: it applies no rule, closes no iteration
        and waits for nobody. Under BSP, pushes that wait for their update are applied to the new rows. Rows are not set
        all at one moment. `updates` is one number for all rows or one for each.
        """
        put(self, keys, weights, state, updates, self._cluster._timeout if timeout is None else timeout)

    def _call(self, name: str, arguments: bytes, timeout: float) -> list[bytes]:
        return self._core.call(name, arguments, timeout)

    def _ask(self, query: bytes, timeout: float) -> bytes:
        return self._core.query(query, timeout)

    def _row_numbers(self) -> int:
        return self.dim

    def _walk_keys(self, where: bytes) -> Walk:
        return Walk(self._core.export(where, _core.Scanned.KEYS))

    def _next_keys(self, walk: Walk, most: int, timeout: float) -> Keys:
        keys: Keys = walk.next(most, timeout)[0]
        return keys

    def fingerprint(self, *, timeout: float | None = None) -> str:
        """A checksum of all rows that were ever updated or put, and their rule state, in whatever order they came."""
        return f"{self._core.fingerprint(self._cluster._timeout if timeout is None else timeout):016x}"

    def _numbers(self, hyper: dict[str, float]) -> tuple[float, ...]:
        return self.rule._with(hyper)._sent() if hyper else self._hyper

    def _arrays(self, keys: ArrayLike, out: Any, dtype: object, grads: Any = None) -> tuple[Any, Any, Any]:
        """The keys, the array the core writes, and the same memory as the caller sees it."""
        source = as_keys(keys, self._what)
        if out is not None:
            return source, given_output(out, dtype, self._what), out
        core = _core.Dtype.FLOAT32 if dtype is None else core_dtype(dtype, self._what)
        rows = source.shape[0] if source.ndim == 1 else 0
        torch = in_torch(self._cluster, dtype, keys, grads)
        return source, *new_output(self._cluster, (rows, self.dim), core, torch)
