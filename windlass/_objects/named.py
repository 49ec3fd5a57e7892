"""What there is on the servers: a list of it, and tensors and tables that are opened by their names alone."""

import dataclasses
import difflib
from typing import TYPE_CHECKING, Literal, NamedTuple

from windlass import _core
from windlass._errors import InvalidArgument, NotFound, SpecMismatch
from windlass._objects.table import Table
from windlass._objects.tensor import Tensor
from windlass._rules.init import Init, init_of
from windlass._rules.rule import Rule
from windlass._rules.sync import Sync, sync_of
from windlass._rules.written import NotWritten, imported, read_rule

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster

Kind = Literal["tensor", "table"]
_SHOWN = 8  # names in an error


@dataclasses.dataclass(frozen=True)
class ObjectInfo:
    """A tensor or a table as ``cluster.objects()`` lists it."""

    name: str  #: as ``tensor()`` and ``table()`` take it; of another app "app/name"
    kind: Kind
    shape: tuple[int, ...] | None  #: of a tensor; None for a table
    dim: int | None  #: how many numbers a table's row has; None for a tensor
    dtype: str  #: of what is kept: 'float32', 'float64' or 'int64'
    rule: str  #: with the numbers that it was made with
    sync: Sync  #: its policy of consistency
    rows: int  #: that a table has; of a tensor its length, 1 for a scalar
    bytes: int  #: of weights and rule state; of a table what its rows take


class _Spec(NamedTuple):
    """All of a spec, in the core's order."""

    full_name: str
    is_table: bool
    shape: list[int]
    dtype: _core.Dtype
    rule: _core.RuleSpec
    rule_text: str
    init_numbers: tuple[_core.InitKind, float, float]
    seed: int
    reject_nonfinite: bool
    sync_numbers: tuple[int, int, float]
    like: str
    description: str
    row_bytes: int

    @property
    def kind(self) -> Kind:
        return "table" if self.is_table else "tensor"

    @property
    def dtype_name(self) -> str:
        return self.dtype.name.lower()

    @property
    def init(self) -> Init:
        return init_of(*self.init_numbers)

    @property
    def sync(self) -> Sync:
        return sync_of(*self.sync_numbers)

    def name_in(self, cluster: "Cluster") -> str:
        """Its name as that cluster's user gives it."""
        app, _, own = self.full_name.partition("/")
        return own if cluster._remote is None or cluster._remote.app == app else self.full_name

    def rule_of(self, cluster: "Cluster") -> Rule:
        """Its rule. Raises NotWritten."""
        return read_rule(self.rule_text, self.rule, tuple(self.shape), lambda name: _function(cluster, name))


def _function(cluster: "Cluster", name: str) -> object:
    """A function of the user's that this process knows already."""
    if cluster._remote is None:
        return cluster._near.calls(cluster._engine).own.find(name)
    return imported(name)


def listed(cluster: "Cluster", timeout: float) -> list[ObjectInfo]:
    """What ``cluster.objects()`` returns."""
    found = []
    for data, rows in cluster._session.objects(True, timeout):
        spec = _Spec(*_core.read_object(data))
        try:
            rule = str(spec.rule_of(cluster))
        except (NotWritten, InvalidArgument, ImportError):  # nobody here can push to it by its name
            rule = spec.description
        if spec.is_table:
            size = rows * spec.row_bytes
        else:
            rows = spec.shape[0] if spec.shape else 1
            size = sum(_core.read_spec(data)[3])
        found.append(
            ObjectInfo(
                spec.name_in(cluster),
                spec.kind,
                None if spec.is_table else tuple(spec.shape),
                spec.shape[0] if spec.is_table else None,
                spec.dtype_name,
                rule,
                spec.sync,
                rows,
                size,
            )
        )
    return sorted(found, key=lambda one: one.name)


def find(cluster: "Cluster", name: str, kind: Kind) -> _Spec:
    """The spec of an object that is there. Raises NotFound with the names that are nearest."""
    what = f"{kind} {name!r}"
    known = {spec.name_in(cluster): spec for spec in _specs(cluster)}
    spec = known.get(name)
    if spec is None and "/" in name:  # its own app, spelt out
        spec = next((one for one in known.values() if one.full_name == name), None)
    if spec is None:
        raise NotFound(f"{what}: there is none{_nearest(name, sorted(known))}{_what_to_do(cluster, kind)}")
    if spec.kind != kind:
        raise SpecMismatch(
            f"{what}: expected a {kind}, saw a {spec.kind}: {spec.description}; cluster.{spec.kind}({name!r}) opens it"
        )
    return spec


def _specs(cluster: "Cluster") -> list[_Spec]:
    return [_Spec(*_core.read_object(data)) for data, _ in cluster._session.objects(False, cluster._timeout)]


def _nearest(name: str, names: list[str]) -> str:
    if close := difflib.get_close_matches(name, names, 3):
        return f"; did you mean {' or '.join(map(repr, close))}?"
    app = name.rpartition("/")[0]
    names = [one for one in names if one.rpartition("/")[0] == app]
    if not names:
        return f"; app {app!r} has nothing" if app else "; this app has nothing yet"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"; there are {', '.join(map(repr, names[:_SHOWN]))}{more}"


def _what_to_do(cluster: "Cluster", kind: Kind) -> str:
    if cluster._reads:
        return " (a reader makes nothing: a worker must have made it)"
    return f" (to make it, give {'a shape' if kind == 'tensor' else 'dim'} and a rule)"


def _rule(cluster: "Cluster", spec: _Spec, what: str) -> Rule:
    try:
        return spec.rule_of(cluster)
    except (NotWritten, ImportError) as error:
        raise InvalidArgument(f"{what}: its rule cannot be read here ({error}); open it with its whole spec") from error


def rule_in(spec: bytes) -> tuple[Rule, tuple[int, ...], int]:
    """The rule in the bytes of a spec, the shape of the tensor or of a table's row, and the count of shards."""
    about = _Spec(*_core.read_object(spec))
    try:
        rule = read_rule(about.rule_text, about.rule, tuple(about.shape), imported)
    except NotWritten as error:
        raise InvalidArgument(f"{about.kind} {about.full_name!r}: its rule cannot be read here ({error})") from error
    return rule, tuple(about.shape), len(_core.read_spec(spec)[3])


def open_tensor(cluster: "Cluster", name: str) -> Tensor:
    """A tensor that is there, as it was made."""
    return _tensor(cluster, find(cluster, name, "tensor"))


def _tensor(cluster: "Cluster", spec: _Spec) -> Tensor:
    name = spec.name_in(cluster)
    rule = _rule(cluster, spec, f"tensor {name!r}")
    return Tensor(
        cluster,
        name,
        tuple(spec.shape),
        rule,
        spec.init,
        spec.dtype_name,
        spec.seed,
        spec.reject_nonfinite,
        spec.sync,
        spec.like,
    )


def open_table(cluster: "Cluster", name: str) -> Table:
    """A table that is there, as it was made."""
    return _table(cluster, find(cluster, name, "table"))


def make_from(cluster: "Cluster", data: bytes) -> Tensor | Table:
    """An object as the bytes of a spec say, made if it is not there."""
    spec = _Spec(*_core.read_object(data))
    return _table(cluster, spec) if spec.is_table else _tensor(cluster, spec)


def _table(cluster: "Cluster", spec: _Spec) -> Table:
    name = spec.name_in(cluster)
    rule = _rule(cluster, spec, f"table {name!r}")
    return Table(cluster, name, spec.shape[0], rule, spec.init, spec.seed, spec.reject_nonfinite, spec.sync)
