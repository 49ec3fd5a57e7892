"""A table as the modules and the optimizer of one worker share it: rows out, gradients in.

    forward    keys --- pull ---> rows, a leaf of the graph       nothing but the graph remembers it
    backward   the leaf's gradient ---> pending                   by a hook of the leaf, which keeps no gradient itself
    step()     pending --- one push ---> servers                  a key that several lookups had is summed there

A lookup that no backward pass follows leaves nothing behind, and gradients of several lookups add up until the step.
"""

import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from windlass._errors import InvalidArgument, NotFound
from windlass._objects.arrays import as_torch, core_dtype
from windlass._objects.future import Future
from windlass._objects.step import Step
from windlass._objects.table import Table
from windlass._rules.init import Init, Normal
from windlass._rules.rule import Rule
from windlass._rules.sync import BSP, Sync, parse_sync
from windlass.torch._found import distinct
from windlass.torch._staging import Staging

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster

DEFAULT_INIT = Normal(std=0.01)
_POOLED = 4  # arrays that are kept for the next batches
_SMALL = 4096  # numbers; fewer need no registered array


class Pool:
    """Arrays of rows that are used again once no tensor shows them; registered, or plain memory. Not thread-safe."""

    def __init__(self, cluster: "Cluster", dim: int, dtype: torch.dtype, *, registered: bool = True) -> None:
        self._cluster = cluster
        self._registered = registered
        self._dim = dim
        self._dtype = core_dtype(dtype, "rows")
        self._plain = dtype is torch.float32
        self._arrays: list[Any] = []

    def take(self, n: int) -> Any:
        """A tensor of `n` rows with any contents; the memory is taken for as long as somebody refers to it."""
        if self._plain and n * self._dim <= _SMALL:
            return torch.from_numpy(np.empty((n, self._dim), np.float32))
        for i in range(len(self._arrays)):
            if len(self._arrays[i]) >= n and sys.getrefcount(self._arrays[i]) <= _UNUSED:
                return as_torch(self._arrays[i][:n])
        self._arrays.sort(key=len, reverse=True)
        del self._arrays[_POOLED - 1 :]  # batches have become larger: the smallest makes room
        shape = [n + n // 8 + 1, self._dim]
        made = self._cluster._engine.empty(shape, self._dtype) if self._registered else np.empty(shape, np.float32)
        self._arrays.append(made)
        del made  # the list alone refers to it
        return as_torch(self._arrays[-1][:n])


def _references() -> int:
    """What the interpreter counts for an object that is in a list and nowhere else."""
    held = [object()]
    return sys.getrefcount(held[0])


_UNUSED = _references()


class _Piece(NamedTuple):
    """Gradients that wait for the step."""

    keys: Any  # different ones
    grad: Any
    dtype: torch.dtype  # that travels


class TrainedTable:
    """See the head of this file. Made by trained_table()."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.what = table._what
        self.cluster = table._cluster
        self._owner: Any = None  # a weak reference to the optimizer that sends its gradients
        self._lock = threading.Lock()
        self._pending: list[_Piece] = []
        self._distinct = 0  # keys of what was first pending, or put together last
        self._pools: dict[torch.dtype, Pool] = {}
        self._outputs = Pool(self.cluster, table.dim, torch.float32, registered=False)
        self._staging: dict[tuple[str, torch.device, torch.dtype], Staging] = {}

    # -- rows out ----------------------------------------------------------------------------------------------------

    def rows(self, keys: Any, device: torch.device, dtype: torch.dtype, padding: int | None) -> Any:
        """The rows of different keys as a float32 tensor on the device. `dtype`: what travels."""

        def pull(out: Any) -> None:
            if len(keys):
                self.table.pull(keys, out=out, create=False)
            if padding is not None:
                out[padding] = 0

        with self._lock:
            if device.type != "cpu":
                return self._stage("rows", device, dtype).to_device(len(keys), pull).float()
            out = self._pool(dtype).take(len(keys))
        pull(out)
        return out.float()

    def room(self, n: int) -> Any:
        """Registered memory for `n` rows of float32, with any contents, as a tensor."""
        with self._lock:
            return self._pool(torch.float32).take(n)

    def output(self, n: int) -> Any:
        """Memory for `n` rows that a forward pass returns, with any contents, as a tensor."""
        with self._lock:
            return self._outputs.take(n)

    def _pool(self, dtype: torch.dtype) -> Pool:
        if dtype not in self._pools:
            self._pools[dtype] = Pool(self.cluster, self.table.dim, dtype)
        return self._pools[dtype]

    def _stage(self, of: str, device: torch.device, dtype: torch.dtype) -> Staging:
        at = (of, device, dtype)
        if at not in self._staging:
            self._staging[at] = Staging(self.cluster, self.table.dim, dtype, device)
        return self._staging[at]

    # -- gradients in ------------------------------------------------------------------------------------------------

    def watch(self, leaf: Any, keys: Any, padding: int | None, dtype: torch.dtype) -> None:
        """From now on a backward pass brings the gradient of these rows here."""
        leaf.requires_grad_()
        leaf.register_post_accumulate_grad_hook(_hook(weakref.ref(self), self.what, keys, padding, dtype))

    def arrived(self, keys: Any, grad: Any, padding: int | None, dtype: torch.dtype) -> None:
        """A backward pass has completed the gradient of a lookup."""
        if self.owner() is None:
            raise _unowned(self.what)
        if padding is None:
            pieces = [_Piece(keys, grad, dtype)]
        else:
            parts = (slice(0, padding), slice(padding + 1, None))
            pieces = [_Piece(keys[part], grad[part], dtype) for part in parts]
        with self._lock:
            self._pending += [piece for piece in pieces if len(piece.keys)]
            rows = sum(len(piece.keys) for piece in self._pending)
            if rows > 2 * self._distinct > 0:
                self._fold()
            self._distinct = self._distinct or rows

    def _fold(self) -> None:
        """Adds up what is pending for the same keys: many lookups before a step take no more memory than few."""
        if len(self._pending) > 1:
            grads = [piece.grad for piece in self._pending]
            dtypes = {piece.dtype for piece in self._pending}
            keys, places = distinct(torch.from_numpy(np.concatenate([piece.keys for piece in self._pending])))
            summed = torch.zeros((len(keys), self.table.dim), device=grads[0].device)
            summed.index_add_(0, places.to(summed.device), torch.cat([g.to(summed.device) for g in grads]))
            self._pending = [_Piece(keys, summed, dtypes.pop() if len(dtypes) == 1 else torch.float32)]
        self._distinct = sum(len(piece.keys) for piece in self._pending)

    def drop(self) -> None:
        """Forgets what is pending."""
        with self._lock:
            self._pending, self._distinct = [], 0

    def square(self) -> Any:
        """The squared norm of what is pending, the gradients of a key added up; None: nothing is."""
        with self._lock:
            self._fold()
            return self._pending[0].grad.double().square().sum().cpu() if self._pending else None

    def scale(self, factor: float) -> None:
        """Multiplies what is pending."""
        with self._lock:
            self._pending = [piece._replace(grad=piece.grad * factor) for piece in self._pending]

    # -- the step ----------------------------------------------------------------------------------------------------

    def owner(self) -> Any:
        """The optimizer that sends its gradients, or None."""
        return None if self._owner is None else self._owner()

    def own(self, optimizer: Any) -> None:
        """From now on this optimizer sends its gradients."""
        self._owner = weakref.ref(optimizer)

    def join(self, step: Step, weight: float, hyper: dict[str, Any]) -> None:
        """Everything pending leaves with the step. Under BSP, so does nothing: this worker counts in the mean."""
        pieces = self._take()
        if pieces or isinstance(self.table.sync, BSP):
            step.push(self.table, _keys_of(pieces), self._in_place(pieces), weight=weight, **hyper)

    def push(self, weight: float, hyper: dict[str, Any]) -> Future[None] | None:
        """Everything pending leaves now, and the worker goes on."""
        pieces = self._take()
        if not pieces and not isinstance(self.table.sync, BSP):
            return None
        grads = torch.cat([piece.grad.cpu() for piece in pieces]) if pieces else torch.empty((0, self.table.dim))
        return self.table.push(_keys_of(pieces), grads, weight=weight, **hyper)

    def _take(self) -> list[_Piece]:
        with self._lock:
            pieces, self._pending, self._distinct = self._pending, [], 0
        return pieces

    def _in_place(self, pieces: list[_Piece]) -> Any:
        """The gradients, one piece after the other, in memory that servers read in place and later steps use again."""
        if not pieces:
            return np.empty((0, self.table.dim), np.float32)
        grads, dtypes = [piece.grad for piece in pieces], {piece.dtype for piece in pieces}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        if len(grads) == 1 and grads[0].device.type == "cpu" and dtype is torch.float32:
            return grads[0]
        there = next((grad.device for grad in grads if grad.device.type != "cpu"), None)
        with self._lock:
            if there is not None:
                return self._stage("gradients", there, dtype).to_host([grad.to(there) for grad in grads])
            out = self._pool(dtype).take(sum(map(len, grads)))
        first = 0
        for grad in grads:
            out[first : first + len(grad)].copy_(grad)
            first += len(grad)
        return out


def _keys_of(pieces: list[_Piece]) -> Any:
    if len(pieces) == 1:
        return pieces[0].keys
    return np.concatenate([piece.keys for piece in pieces]) if pieces else np.empty(0, np.int64)


def _hook(
    table: "weakref.ref[TrainedTable]", what: str, keys: Any, padding: int | None, dtype: torch.dtype
) -> Callable[[Any], None]:
    """The graph owns the leaf, and the leaf its hook; so the hook keeps neither the leaf nor the table."""

    def arrived(leaf: Any) -> None:
        grad, leaf.grad = leaf.grad.detach(), None
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        to = table()
        if to is None:
            raise _unowned(what)
        to.arrived(keys, grad, padding, dtype)

    return arrived


def _unowned(what: str) -> InvalidArgument:
    return InvalidArgument(
        f"{what}: a backward pass has computed gradients of its rows, but no optimizer sends them: give the module to "
        "ServerOptimizer(model, rule) (the module itself: its parameters() have no tables), or freeze it with "
        "requires_grad_(False)"
    )


# -- which one ---------------------------------------------------------------------------------------------------------

#: Of each worker, by name: modules of the same name share a table.
_open: "weakref.WeakKeyDictionary[Cluster, weakref.WeakValueDictionary[str, TrainedTable]]"
_open = weakref.WeakKeyDictionary()
_opening = threading.RLock()


class TableSpec(NamedTuple):
    """What a module says of its table; None: nothing."""

    name: str
    dim: int
    rule: Rule | None
    init: Init | None
    seed: int
    sync: Sync | str | None
    reject_nonfinite: bool


def trained_table(
    cluster: "Cluster", spec: TableSpec, rule: Rule | None = None, sync: Sync | None = None
) -> TrainedTable:
    """The table of a module, made where there is none. `rule`, `sync`: an optimizer's, where the module has none."""
    with _opening:
        tables = _open.setdefault(cluster, weakref.WeakValueDictionary())
        found = tables.get(spec.name)
        if found is None:
            found = TrainedTable(_made(cluster, spec, rule, sync))
            tables[spec.name] = found
        _check_same(found.table, spec, sync)
        return found


def _made(cluster: "Cluster", spec: TableSpec, rule: Rule | None, sync: Sync | None) -> Table:
    rule = spec.rule if spec.rule is not None else rule
    if rule is None:
        try:
            return cluster.table(spec.name)
        except NotFound:
            raise InvalidArgument(
                f"table {spec.name!r}: what should servers do with its gradients? Give the module a rule, as in "
                f"rule=wl.RowAdagrad(lr=0.05), or make ServerOptimizer(model, rule) before the first forward()"
            ) from None
    init = DEFAULT_INIT if spec.init is None else spec.init
    policy = next(one for one in (spec.sync, sync, cluster._sync, BSP()) if one is not None)
    return cluster.table(
        spec.name,
        spec.dim,
        rule=rule,
        init=init,
        seed=spec.seed,
        sync=policy,
        reject_nonfinite=spec.reject_nonfinite,
    )


def _check_same(table: Table, spec: TableSpec, sync: Sync | None) -> None:
    """Whether a module means the table that is open under its name."""
    asked = spec.sync if spec.sync is not None else sync
    policy = None if asked is None else parse_sync(asked, BSP(), table._what)
    pairs = (
        ("dim", spec.dim, table.dim),
        ("rule", spec.rule, table.rule),
        ("init", spec.init, table.init),
        ("seed", spec.seed, table.seed),
        ("sync", policy, table.sync),
    )
    for name, asked_for, there in pairs:
        if asked_for is not None and asked_for != there:
            raise InvalidArgument(
                f"{table._what}: a module or optimizer asks for {name} {asked_for!r}, but this worker has it open with "
                f"{there!r}; modules of one table say the same, and the optimizer is made before the first forward()"
            )
