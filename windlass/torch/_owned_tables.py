"""The tables of one optimizer: whose gradients leave in its steps, and with which numbers.

Every one of them takes part in every step, called in it or not: a worker whose batch had no ids counts in the mean.
"""

from typing import TYPE_CHECKING, Any

import torch

from windlass._errors import InvalidArgument
from windlass._objects.future import Future
from windlass._objects.step import Step
from windlass._rules.sync import BSP
from windlass.torch._rules import changed_in
from windlass.torch._table_module import TableModule, modules_of
from windlass.torch._trained_table import TrainedTable

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster


class OwnedTables:
    """See the head of this file. `what`: the optimizer, in errors."""

    def __init__(self, cluster: "Cluster", what: str) -> None:
        self._cluster = cluster
        self._what = what
        self._all: list[tuple[TrainedTable, dict[str, Any]]] = []
        self._closed: int | None = None  # the clock after the last step
        self._under_way: list[Future[None]] = []

    def add(self, table: TrainedTable, group: dict[str, Any], optimizer: Any) -> None:
        """One more, with its group. It is this optimizer's from now on."""
        if any(table is one for one, _ in self._all):
            raise InvalidArgument(f"{self._what}: {table.what} is in two groups")
        if type(table.table.rule) is not type(group["rule"]):
            raise InvalidArgument(
                f"{self._what}: {table.what} was made with {table.table.rule}, and its group asks for {group['rule']}"
            )
        table.own(optimizer)
        self._all.append((table, group))

    def describe(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """What all workers must agree on."""
        return [(f"table {table.table.name}", "", (table.table.dim,)) for table, _ in self._all]

    def check(self, optimizer: Any) -> None:
        """Whether a step of this optimizer would be the one that every worker makes now."""
        for table, _ in self._all:
            if (owner := table.owner()) is not optimizer:
                now = "no optimizer" if owner is None else owner._what
                raise InvalidArgument(
                    f"{self._what}: {table.what} belongs to {now} by now, the newest that was given it; a table has "
                    "one optimizer"
                )
        clock = self._cluster._session.clock
        if self._closed not in (None, clock) and self._cluster.world_size > 1 and self._follows_rounds():
            raise InvalidArgument(
                f"{self._what}: iterations were closed since its last step(), by another optimizer's step() or tick(); "
                "under BSP a worker that once leaves one out would make others' updates of tables twice as large: let "
                "one ServerOptimizer have all of them, in groups"
            )

    def _follows_rounds(self) -> bool:
        return any(isinstance(table.table.sync, BSP) for table, _ in self._all)

    def stepped(self) -> None:
        """The iteration of a step is closed."""
        self._closed = self._cluster._session.clock

    def join(self, step: Step, weight: float) -> None:
        """Gradients leave with the step."""
        for table, group in self._all:
            table.join(step, weight, changed_in(table.table.rule, group))

    def push(self, weight: float) -> None:
        """Gradients leave now; finish() waits for them."""
        self.finish()
        pushes = [table.push(weight, changed_in(table.table.rule, group)) for table, group in self._all]
        self._under_way = [future for future in pushes if future is not None]

    def finish(self) -> None:
        """Waits for what push() has sent."""
        futures, self._under_way = self._under_way, []
        for future in futures:
            future.wait()

    def drop(self) -> None:
        """Forgets gradients that have not left."""
        for table, _ in self._all:
            table.drop()

    def squares(self) -> list[Any]:
        """The squared norm of each table's gradients, those of a key added up."""
        found = [table.square() for table, _ in self._all]
        return [square for square in found if square is not None]

    def scale(self, factor: float) -> None:
        """Multiplies gradients that have not left."""
        for table, _ in self._all:
            table.scale(factor)

    def __bool__(self) -> bool:
        return bool(self._all)

    def __repr__(self) -> str:
        return ", ".join(repr(table.table) for table, _ in self._all)


def table_modules(given: Any, what: str) -> list[TableModule]:
    """The table modules in a module or in a list of modules."""
    listed = [given] if isinstance(given, torch.nn.Module) else list(given)
    for one in listed:
        if not isinstance(one, torch.nn.Module):
            raise InvalidArgument(f"{what}: 'tables' of a group are modules, not {type(one).__name__}")
    return [part for one in listed for part in modules_of(one)]


def cluster_of(params: Any) -> "Cluster | None":
    """The one cluster that the table modules in an optimizer's first argument were given; None: there is none."""
    given: list[Any] = []
    for one in params if isinstance(params, (list, tuple)) else [params]:
        tables = one.get("tables", []) if isinstance(one, dict) else one
        given += tables if isinstance(tables, (list, tuple)) else [tables]
    modules = [part for one in given if isinstance(one, torch.nn.Module) for part in modules_of(one)]
    named = {id(module._cluster): module._cluster for module in modules if module._cluster is not None}
    return next(iter(named.values())) if len(named) == 1 else None
