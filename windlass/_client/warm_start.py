"""cluster.load(): weights, rule state and counts from a checkpoint or a file, put into tensors and tables.

The client reads and puts, as any client may; a server never reads what a client names.
"""

import difflib
import logging
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from windlass import _core
from windlass._checkpoint.arrays import state_names
from windlass._checkpoint.arrays_file import ENDINGS, ArraysFile, of_mapping, open_arrays
from windlass._checkpoint.folder import Folder
from windlass._checkpoint.layout import DTYPES, Object
from windlass._checkpoint.names import place_of, unescape
from windlass._checkpoint.reader import Checkpoint, find, newest
from windlass._errors import CorruptCheckpoint, InvalidArgument, NotFound, SpecMismatch
from windlass._objects.named import make_from
from windlass._objects.row_state import put as put_rows
from windlass._objects.snapshot import as_kept, state_shapes
from windlass._objects.table import Table
from windlass._objects.tensor import Tensor
from windlass._specs import like_of

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster

NEWEST = "newest"
_KEYS_AT_ONCE = 1 << 16
_SHOWN = 8
_log = logging.getLogger("windlass")


def load(
    cluster: "Cluster",
    source: Any,
    names: Sequence[str] | None,
    rename: Mapping[str, str] | None,
    timeout: float,
) -> list[str]:
    """Puts what there is; returns the names of what was put."""
    found = _source(cluster, source)
    if isinstance(found, ArraysFile):
        return _put_arrays(cluster, found, _Choice(found.where, list(found), names, rename), timeout)
    if cluster._remote is None and names is None and rename is None and _is_new(cluster):
        cluster._near_saves().resume(found)
        cluster._begin_again()
        return [_own(one.name) for one in found.manifest.objects]
    where = found.folder.where(found.place)
    choice = _Choice(where, [_own(one.name) for one in found.manifest.objects], names, rename)
    return [
        _put_object(cluster, found, one, choice, timeout) for one in found.manifest.objects if _own(one.name) in choice
    ]


def _is_new(cluster: "Cluster") -> bool:
    """Whether nothing was made yet, so that the cluster can begin where a checkpoint was cut."""
    near = cluster._near
    if cluster._further or near.has_ledgers or cluster._leases or cluster.clock or len(near.workers) > 1:
        return False
    return not cluster._session.objects(False, cluster._timeout)


def _own(name: str) -> str:
    return name.partition("/")[2]


class _Choice:
    """What of a source is taken, and what it is called here."""

    def __init__(
        self, where: str, there: Sequence[str], names: Sequence[str] | None, rename: Mapping[str, str] | None
    ) -> None:
        self.where, self._rename = where, {} if rename is None else dict(rename)
        if isinstance(names, str) or not all(isinstance(name, str) for name in [*(names or ()), *self._rename]):
            raise InvalidArgument(f"load: names must be a list of names, not {names!r}")
        self.names = None if names is None else set(names)
        known = {*there, *(name[:at] for name in there for at in range(len(name)) if name[at] == ".")}
        for name in [*(names or ()), *self._rename]:
            if name not in known:
                raise NotFound(f"load: {where} has no {name!r}{nearest(name, there)}")

    def __contains__(self, name: str) -> bool:
        return self.names is None or name in self.names

    def here(self, name: str) -> str:
        """Its name here."""
        return self._rename.get(name, name)


def nearest(name: str, names: Collection[str]) -> str:
    """The names that are like it, or some."""
    if close := difflib.get_close_matches(name, list(names), 3):
        return f"; did you mean {' or '.join(map(repr, close))}?"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"; there are {', '.join(map(repr, sorted(names)[:_SHOWN]))}{more}" if names else "; there is nothing"


# -- where it comes from ---------------------------------------------------------------------------------------------


def _source(cluster: "Cluster", source: Any) -> "Checkpoint | ArraysFile":
    if isinstance(source, Mapping):
        return of_mapping(source)
    if not isinstance(source, (str, os.PathLike)):
        raise InvalidArgument(
            f"load: expected a checkpoint's tag, id or path, a file, or arrays by name, not {type(source).__name__}"
        )
    text = os.fspath(source)
    if text.endswith(ENDINGS):
        return open_arrays(text)
    app, where = _app(cluster), cluster._near.terms.where
    if where is not None and "/" not in text:
        folder = Folder(where)
        try:
            return _newest(folder, app) if text == NEWEST else Checkpoint.open(folder, find(folder, app, text))
        except NotFound:
            if not os.path.isdir(text):
                raise
    elif "/" not in text and not os.path.isdir(text):
        raise InvalidArgument(
            f"load: {text!r} is no path, and there is no folder to look for it in; give a path, or "
            "connect(checkpoint_dir=), or WINDLASS_CHECKPOINT_DIR"
        )
    return _at_path(text.rstrip("/"), app)


def _app(cluster: "Cluster") -> str:
    return cluster._near.terms.app if cluster._remote is None else cluster._remote.app


def _at_path(text: str, app: str) -> Checkpoint:
    """A checkpoint's own folder, or the newest in a folder of checkpoints, or of an app's."""
    above, _, last = text.rpartition("/")
    root, _, folder = above.rpartition("/")
    if (of := unescape(folder)) is not None and (place := place_of(of, last)) is not None:
        return Checkpoint.open(Folder(root or "."), place)
    apps = Folder(text).apps()
    if apps:
        return _newest(Folder(text), app if app in apps or len(apps) > 1 else apps[0])
    if (of := unescape(last)) is not None and above and of in Folder(above).apps():
        return _newest(Folder(above), of)
    raise NotFound(f"load: {text}: there is no checkpoint, and no file that ends in {', '.join(ENDINGS)}")


def _newest(folder: Folder, app: str) -> Checkpoint:
    found, passed = newest(folder, app)
    for one in passed:
        _log.warning("checkpoint %s is passed over: %s", one.place.name, one.why)
    if found is None:
        raise NotFound(f"load: {folder.store.url}: there is no checkpoint of app {app!r}")
    return found


# -- from a checkpoint -----------------------------------------------------------------------------------------------


def _put_object(cluster: "Cluster", checkpoint: Checkpoint, one: Object, choice: _Choice, timeout: float) -> str:
    """A tensor or table, which is made if it is missing."""
    name = choice.here(_own(one.name))
    here = {_own(spec_name): data for data, spec_name in _here(cluster)}
    spec = here.get(name)
    if spec is None:
        if (like := like_of(one.spec)) and choice.here(like) != like:
            raise InvalidArgument(f"load: {one.name!r} lies like {like!r}, which is to be renamed; make it here first")
        spec = _core.renamed_spec(one.spec, f"{_app_here(cluster)}/{name}")
        target: Tensor | Table = make_from(cluster, spec)
    else:
        _, is_table, shape, dtype, *_ = _core.spec_facts(spec)
        seen = ("table" if is_table else "tensor", list(shape), dtype)
        if (expected := (one.kind, list(one.shape), DTYPES[one.dtype])) != seen:
            raise SpecMismatch(
                f"load: {name!r}: {choice.where} has a {expected[0]} {expected[2]} {tuple(expected[1])}, and here is a "
                f"{seen[0]} {seen[2]} {tuple(seen[1])}"
            )
        target = cluster.table(name) if is_table else cluster.tensor(name)
    whole = bool(_core.same_rule(spec, one.spec))
    states = state_names(one.spec, one.shards) if whole else None
    if states is None:
        _log.warning("load: %r has another rule than in %s: only its weights are taken", name, choice.where)
    if isinstance(target, Table):
        _put_table(target, checkpoint, one, states, timeout)
    else:
        _put_tensor(target, checkpoint, one, states, timeout)
    return name


def _here(cluster: "Cluster") -> Iterable[tuple[bytes, str]]:
    """Specs of this app's objects."""
    app = _app_here(cluster)
    for data, _ in cluster._session.objects(False, cluster._timeout):
        name = _core.spec_facts(data)[0]
        if name.partition("/")[0] == app:
            yield data, name


def _app_here(cluster: "Cluster") -> str:
    return "embedded" if cluster._remote is None else cluster._remote.app


def _put_tensor(tensor: Tensor, checkpoint: Checkpoint, one: Object, states: list[str] | None, timeout: float) -> None:
    shards = checkpoint.shards(one.name)
    shapes = state_shapes(tensor) if states else {}
    wanted: dict[str, tuple[int, ...]] = {"weights": tensor.shape, **shapes}
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    begins: dict[tuple[str, int], int] = {}
    for name in wanted:
        at = 0
        for shard in shards:
            begins[name, shard.shard] = at
            at += next((int(np.prod(array.shape)) for array in shard.arrays if array.name == name), 0)
        if at != math.prod(wanted[name]):
            what = f"load: {one.name!r} in {checkpoint.place.name}: {name!r}"
            raise CorruptCheckpoint(f"{what}: expected {math.prod(wanted[name])} numbers, saw {at}")
        arrays[name] = np.empty(at, tensor.dtype if name == "weights" else "float32")
    for read in checkpoint.read((one.name, shard.shard) for shard in shards):
        for name, array in read.arrays.items():
            if name in arrays:
                width = int(np.prod(array.shape[1:]))
                begin = begins[name, read.shard] + read.offset * width
                arrays[name][begin : begin + array.size] = array.reshape(-1)
    state = {name: arrays[name].reshape(shape) for name, shape in shapes.items()}
    counts = np.array([shard.facts.count for shard in shards], np.int64)
    tensor.put(
        arrays["weights"].reshape(tensor.shape),
        state=state or None,
        updates=None if states is None or len(counts) != tensor.shards else counts,
        timeout=timeout,
    )


def _put_table(table: Table, checkpoint: Checkpoint, one: Object, states: list[str] | None, timeout: float) -> None:
    shapes = table.rule._state_shapes((1, table.dim), 1) if states else {}
    for read in checkpoint.read((one.name, shard) for shard in range(one.shards)):
        arrays, n = read.arrays, len(read.arrays["keys"])
        if states is None:
            put_rows(table, arrays["keys"], arrays["weights"], None, None, timeout)
            continue
        state = {name: arrays[name].reshape(n, *shape[1:]) for name, shape in shapes.items()}
        put_rows(table, arrays["keys"], arrays["weights"], state, arrays["updates"].astype(np.int64), timeout)


# -- from arrays -----------------------------------------------------------------------------------------------------


class _Group:
    """What of a file goes to one object."""

    def __init__(self, is_table: bool) -> None:
        self.is_table = is_table
        self.parts: dict[str, str] = {}  # names in the file, by what they are of the object; "": the object itself


def _put_arrays(cluster: "Cluster", arrays: ArraysFile, choice: _Choice, timeout: float) -> list[str]:
    """Everything is looked at before anything is put."""
    here = {_own(name): data for data, name in _here(cluster)}
    groups: dict[str, _Group] = {}
    for name in arrays:
        chosen = [name[:at] for at in range(len(name), 0, -1) if at == len(name) or name[at] == "."]
        if choice.names is not None and not any(prefix in choice.names for prefix in chosen):
            continue
        target = next((prefix for prefix in chosen if choice.here(prefix) in here), None)
        if target is None:
            own = choice.here(name)
            raise NotFound(
                f"load: {arrays.where} has {name!r}, and there is no tensor or table {own!r} here{nearest(own, here)}; "
                "make it first, or choose with names="
            )
        own = choice.here(target)
        group = groups.setdefault(own, _Group(bool(_core.spec_facts(here[own])[1])))
        part = name[len(target) + 1 :]
        if part in group.parts:
            raise InvalidArgument(f"load: {group.parts[part]!r} and {name!r} of {arrays.where} both go to {own!r}")
        group.parts[part] = name
    puts = [
        _rows_of(cluster.table(own), group, arrays)
        if group.is_table
        else _tensor_of(cluster.tensor(own), group, arrays)
        for own, group in groups.items()
    ]
    for put in puts:
        put(timeout)
    return list(groups)


def _tensor_of(tensor: Tensor, group: _Group, arrays: ArraysFile) -> Any:
    """What puts it, once it was checked."""
    what = f"load: tensor {tensor.name!r}"
    shapes = state_shapes(tensor)
    _check_parts(what, tensor, group, arrays, {"", *shapes})
    if "" not in group.parts:
        raise InvalidArgument(f"{what}: {arrays.where} has its state {next(iter(group.parts))!r}, and not its weights")
    for part, name in group.parts.items():
        expected, dtype = (shapes[part], "float32") if part else (tensor.shape, tensor.dtype)
        _check(f"{what}: {name!r} of {arrays.where}", arrays[name], expected, dtype)

    def put(timeout: float) -> None:
        state = {part: arrays[name] for part, name in group.parts.items() if part}
        tensor.put(arrays[group.parts[""]], state=state or None, timeout=timeout)

    return put


def _rows_of(table: Table, group: _Group, arrays: ArraysFile) -> Any:
    what = f"load: table {table.name!r}"
    shapes = table.rule._state_shapes((1, table.dim), 1)
    _check_parts(what, table, group, arrays, {"", "keys", "weights", "updates", "touched", *shapes})
    if "" in group.parts and len(group.parts) > 1:
        raise InvalidArgument(
            f"{what}: {arrays.where} has a matrix {group.parts['']!r}, and parts of a table beside it"
        )
    missing = [] if "" in group.parts else sorted({"keys", "weights"} - set(group.parts))
    if missing:
        raise InvalidArgument(f"{what}: {arrays.where} has no {missing[0]} of it")
    weights = arrays[group.parts.get("", group.parts.get("weights", ""))]
    n = len(weights) if len(weights.shape) else 0
    for part, name in group.parts.items():
        if part in ("", "weights"):
            _check(f"{what}: {name!r} of {arrays.where}", arrays[name], (n, table.dim), "float32")
        elif len(arrays[name]) != n:
            raise InvalidArgument(f"{what}: {name!r} of {arrays.where}: expected {n} rows, saw {len(arrays[name])}")

    def put(timeout: float) -> None:
        get = {part: arrays[name] for part, name in group.parts.items()}
        rows = get.pop("", get.get("weights"))
        for at in range(0, n, _KEYS_AT_ONCE):
            end = min(at + _KEYS_AT_ONCE, n)
            keys = get["keys"][at:end] if "keys" in get else np.arange(at, end)
            state = {part: get[part][at:end].reshape(end - at, *shapes[part][1:]) for part in shapes if part in get}
            updates = get["updates"][at:end] if "updates" in get else None
            if updates is not None:
                updates = np.asarray(updates).astype(np.int64)
            put_rows(table, keys, rows[at:end], state or None, updates, timeout)

    return put


def _check_parts(what: str, target: Tensor | Table, group: _Group, arrays: ArraysFile, known: set[str]) -> None:
    for part, name in group.parts.items():
        if part not in known:
            raise NotFound(
                f"{what}: {arrays.where} has {name!r}, and {target.rule} has no state {part!r}"
                f"{nearest(part, [one for one in known if one])}"
            )


def _check(what: str, array: Any, shape: tuple[int, ...], dtype: str) -> None:
    """Raises for a shape or dtype that does not fit, before anything is put."""
    if tuple(array.shape) != tuple(shape):
        raise SpecMismatch(f"{what}: expected shape {tuple(shape)}, saw {tuple(array.shape)}")
    as_kept(array[:0] if len(shape) else array, (0, *shape[1:]) if len(shape) else shape, dtype, what)
