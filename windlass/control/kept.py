"""What of the scheduler's state is journaled: as rows, and back. Pure.

    State -- row(), by table and key ---> Keep ---> the journal ---> restore() ---> State

A row is made from the state as it is after an event, so an event that changes something twice is one row. What members
say again when they come back is in none: reports, ledgers, who stands at a barrier, what a worker holds. What follows
from other rows is in none either: loads, names, who is ready.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from windlass.control import messages as m
from windlass.control.leases import BadLease, Ledger
from windlass.control.leases import Saved as SavedLedger
from windlass.control.level import Drain
from windlass.control.model import App, Member, Moving, Object

if TYPE_CHECKING:
    from windlass.control.state import State

Key = tuple[str, str]  # table and key in it


class Unreadable(Exception):
    """A row that is none of ours. The text names it."""


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The root of all rows."""


class Cluster(_Row, frozen=True):
    """What there is one of."""

    cluster: int
    servers: int
    ever_started: bool
    ended: bool
    shards_lost: int
    views_before: int
    next_object: int
    next_move: int
    next_save: int
    given_up: dict[str, str]
    done_without: dict[str, str]
    levels: bool


class _Known(_Row, frozen=True):
    join: m.Join
    index: int
    ready: bool
    since: int
    instead: bool


class _Lost(_Row, frozen=True):
    why: str
    peer: m.Peer


class _Drain(_Row, frozen=True):
    why: str
    shards: int


class _App(_Row, frozen=True):
    world_size: int
    view: int
    size_in_view: int
    started: bool
    first_view: int
    gathered: bool
    on_worker_loss: m.OnWorkerLoss
    clock: int
    save_at: int
    lost: int
    waited: list[int]
    not_replaced: list[int]
    pulls_before: m.PullReport


class _Object(_Row, frozen=True):
    spec: bytes
    runs: list[m.Run]


class _Shard(_Row, frozen=True):
    server: int
    term: int
    last_term: int


class _Move(_Row, frozen=True):
    object: int
    shard: int
    source: int
    target: int
    term: int
    asker: int
    question: int
    gone: str
    ordered: bool


class _Saved(_Row, frozen=True):
    id: str | None
    clock: int
    at: float
    failed: str | None


class Saving(_Row, frozen=True):
    """A checkpoint that was being taken."""

    number: int
    id: str
    app: str
    clock: int
    asker: int
    question: int
    partial: bool


class Resumed(_Row, frozen=True):
    """What became of the checkpoint that the cluster began with."""

    id: str
    app: str
    clock: int
    world_size: int
    created: float
    going: bool
    begun: bool
    taken: bool
    order: int
    next: int
    clock_left: int
    said: list[str]
    unopened: list[int]
    changes: dict[int, int]
    lost: dict[str, str]


class _Table(NamedTuple):
    kind: Any  #: what a row of it is
    keys: "Callable[[State], Iterable[str]]"
    make: "Callable[[State, str], Any]"  #: None: there is no such row
    put: "Callable[[State, str, Any], None]"


def row(state: "State", table: str, key: str) -> bytes | None:
    """As the state is now. None: there is none."""
    made = _TABLES[table].make(state, key)
    return None if made is None else msgspec.json.encode(made)


def rows(state: "State") -> dict[Key, bytes]:
    """All of them."""
    found = {}
    for name, table in _TABLES.items():
        for key in table.keys(state):
            if (made := row(state, name, key)) is not None:
                found[name, key] = made
    return found


def cluster_of(rows: Mapping[Key, bytes]) -> Cluster | None:
    """Which cluster the rows are of. None: there are none. Raises Unreadable."""
    return None if ("cluster", "") not in rows else _decoded("cluster", "", rows["cluster", ""], Cluster)


def resumed_of(rows: Mapping[Key, bytes]) -> Resumed | None:
    """The checkpoint that it began with, if there was one. Raises Unreadable."""
    return None if ("resume", "") not in rows else _decoded("resume", "", rows["resume", ""], Resumed)


def saving_of(rows: Mapping[Key, bytes]) -> Saving | None:
    """The checkpoint that was being taken. Raises Unreadable."""
    return next((_decoded(t, k, value, Saving) for (t, k), value in rows.items() if t == "saving"), None)


def restore(state: "State", rows: Mapping[Key, bytes]) -> None:
    """Into a state that is new. Raises Unreadable."""
    for name, table in _TABLES.items():  # in the order of the tables: later ones refer to earlier ones
        for (of, key), value in sorted(rows.items()):
            if of == name:
                decoded = _decoded(name, key, value, table.kind)
                try:
                    table.put(state, key, decoded)
                except (KeyError, IndexError, ValueError, BadLease) as error:
                    raise Unreadable(f"row {key!r} of table {name} does not fit the others: {error!r}") from error


def _decoded(table: str, key: str, value: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Unreadable(f"row {key!r} of table {table}: {error}") from error


# -- the tables ------------------------------------------------------------------------------------------------------


def _cluster(state: "State", key: str) -> Cluster:
    return Cluster(
        state.terms.cluster,
        state.terms.servers,
        state.ever_started,
        state.ended,
        state.shards_lost,
        state.views_before,
        state.next_object,
        state.moves.next,
        state.saves.next,
        state.given_up,
        state.done_without,
        state.level.due,
    )


def _put_cluster(state: "State", key: str, row: Cluster) -> None:
    state.ever_started, state.shards_lost, state.views_before = row.ever_started, row.shards_lost, row.views_before
    state.next_object, state.moves.next, state.saves.next = row.next_object, row.next_move, row.next_save
    state.given_up, state.done_without = dict(row.given_up), dict(row.done_without)
    state.level.due = row.levels


def _members(state: "State") -> Iterable[str]:
    return (str(number) for number, member in state.members.items() if member.join.role != "operator")


def _member(state: "State", key: str) -> _Known | None:
    known = state.members.get(int(key))
    if known is None or known.join.role == "operator":
        return None
    return _Known(known.join, known.index, known.ready, known.since, known.instead)


def _put_member(state: "State", key: str, row: _Known) -> None:
    member = Member(row.join, row.index, ready=row.ready, since=row.since, instead=row.instead)
    state.members[int(key)] = member
    if row.join.role == "server":
        state.put_server(member)
    else:
        app = state.apps[row.join.app]
        if row.join.role == "worker":
            app.workers[row.index] = int(key)
        else:
            app.readers[int(key)] = None


def _app(state: "State", key: str) -> _App | None:
    if (app := state.apps.get(key)) is None:
        return None
    return _App(
        app.world_size,
        app.view,
        app.size_in_view,
        app.started,
        app.first_view,
        app.gathered,
        app.on_worker_loss,
        app.clock,
        app.save_at,
        app.lost,
        sorted(app.waited),
        sorted(app.not_replaced),
        app.pulls_before,
    )


def _put_app(state: "State", key: str, row: _App) -> None:
    app = App(key, row.world_size, state.new_barrier())
    app.view, app.size_in_view, app.started, app.first_view = row.view, row.size_in_view, row.started, row.first_view
    app.gathered, app.on_worker_loss, app.clock = row.gathered, row.on_worker_loss, row.clock
    app.save_at, app.lost, app.waited, app.pulls_before = row.save_at, row.lost, set(row.waited), row.pulls_before
    app.not_replaced = set(row.not_replaced)
    state.apps[key] = app


def _left(state: "State") -> Iterable[str]:
    return (f"{rank}/{app.name}" for app in state.apps.values() for rank in app.left)


def _gone(state: "State", key: str) -> m.Report | None:
    rank, _, name = key.partition("/")
    return None if name not in state.apps else state.apps[name].left.get(int(rank))


def _put_gone(state: "State", key: str, row: m.Report) -> None:
    rank, _, name = key.partition("/")
    state.apps[name].left[int(rank)] = row


def _lost(state: "State", key: str) -> _Lost | None:
    index = int(key)
    return None if index not in state.lost else _Lost(state.lost[index], state.lost_peers[index])


def _put_lost(state: "State", key: str, row: _Lost) -> None:
    state.lost[int(key)], state.lost_peers[int(key)] = row.why, row.peer


def _retired(state: "State", key: str) -> _Lost | None:
    index = int(key)
    return None if index not in state.retired else _Lost(state.retired[index], state.lost_peers[index])


def _put_retired(state: "State", key: str, row: _Lost) -> None:
    state.retired[int(key)], state.lost_peers[int(key)] = row.why, row.peer


def _drain(state: "State", key: str) -> _Drain | None:
    drain = state.level.drains.get(int(key))
    return None if drain is None else _Drain(drain.why, drain.shards)


def _put_drain(state: "State", key: str, row: _Drain) -> None:
    state.level.drains[int(key)] = Drain(row.why, [], row.shards)


def _object(state: "State", key: str) -> _Object | None:
    there = state.objects.get(int(key))
    return None if there is None else _Object(there.spec, there.runs)


def _put_object(state: "State", key: str, row: _Object) -> None:
    state.put_object(int(key), row.spec, row.runs)


def _shards(state: "State") -> Iterable[str]:
    return (f"{object}/{shard}" for object, shard in state.moves.last_term)


def _shard(state: "State", key: str) -> _Shard | None:
    number, _, shard = key.partition("/")
    at = int(number), int(shard)
    there = state.objects.get(at[0])
    if there is None or at not in state.moves.last_term:
        return None
    return _Shard(there.owners[at[1]], there.terms[at[1]], state.moves.last_term[at])


def _put_shard(state: "State", key: str, row: _Shard) -> None:
    number, _, shard = key.partition("/")
    at = int(number), int(shard)
    there: Object = state.objects[at[0]]
    there.owners[at[1]], there.terms[at[1]] = row.server, row.term
    state.moves.last_term[at] = row.last_term


def _move(state: "State", key: str) -> _Move | None:
    v = state.moves.going.get(int(key))
    if v is None:
        return None
    return _Move(v.object, v.shard, v.source, v.target, v.term, v.asker, v.question, v.gone, v.ordered)


def _put_move(state: "State", key: str, row: _Move) -> None:
    v = Moving(row.object, row.shard, row.source, row.target, row.term, row.asker, row.question, row.gone, row.ordered)
    state.moves.going[int(key)] = v


def _errands(state: "State") -> Iterable[str]:
    return (f"{asker}/{question}" for asker, question in state.moves.errors)


def _errand(state: "State", key: str) -> str | None:
    asker, _, question = key.partition("/")
    return state.moves.errors.get((int(asker), int(question)))


def _put_errand(state: "State", key: str, row: str) -> None:
    asker, _, question = key.partition("/")
    state.moves.errors[int(asker), int(question)] = row


def _ledger(state: "State", key: str) -> SavedLedger | None:
    app, _, name = key.partition("/")
    ledger = state.ledgers.get((app, name))
    return None if ledger is None else state.kept_ledgers.get((app, name))


def _put_ledger(state: "State", key: str, row: SavedLedger) -> None:
    app, _, name = key.partition("/")
    made: Ledger = state.new_ledger(row.terms)
    state.ledgers[app, name] = made
    state.kept_ledgers[app, name] = row
    made.take(row)


def _of_apps(state: "State") -> Iterable[str]:
    return sorted({*state.saves.last, *state.saves.failed})


def _saved(state: "State", key: str) -> _Saved | None:
    last, failed = state.saves.last.get(key), state.saves.failed.get(key)
    if last is None:
        return None if failed is None else _Saved(None, 0, 0.0, failed)
    return _Saved(last.id, last.clock, last.at, failed)


def _put_saved(state: "State", key: str, row: _Saved) -> None:
    state.saves.put_last(key, row.id, row.clock, row.at, row.failed)


def _saving(state: "State", key: str) -> Saving | None:
    going = state.saves.going
    if going is None or str(going.number) != key:
        return None
    return Saving(going.number, going.id, going.app, going.clock, going.asker, going.question, going.partial)


_TABLES = {
    "cluster": _Table(Cluster, lambda state: [""], _cluster, _put_cluster),
    "dead": _Table(
        str,
        lambda state: map(str, state.dead),
        lambda state, key: state.dead.get(int(key)),
        lambda state, key, row: state.dead.__setitem__(int(key), row),
    ),
    "lost": _Table(_Lost, lambda state: map(str, state.lost), _lost, _put_lost),
    "retired": _Table(_Lost, lambda state: map(str, state.retired), _retired, _put_retired),
    "drains": _Table(_Drain, lambda state: map(str, state.level.drains), _drain, _put_drain),
    "apps": _Table(_App, lambda state: list(state.apps), _app, _put_app),
    "left": _Table(m.Report, _left, _gone, _put_gone),
    "members": _Table(_Known, _members, _member, _put_member),
    "objects": _Table(_Object, lambda state: map(str, state.objects), _object, _put_object),
    "shards": _Table(_Shard, _shards, _shard, _put_shard),
    "moves": _Table(_Move, lambda state: map(str, state.moves.going), _move, _put_move),
    "errands": _Table(str, _errands, _errand, _put_errand),
    "ledgers": _Table(
        SavedLedger, lambda state: (f"{app}/{name}" for app, name in state.ledgers), _ledger, _put_ledger
    ),
    "saves": _Table(_Saved, _of_apps, _saved, _put_saved),
    "saving": _Table(
        Saving,
        lambda state: [] if state.saves.going is None else [str(state.saves.going.number)],
        _saving,
        lambda state, key, row: None,  # saves.end_interrupted() sees to it
    ),
    "resume": _Table(
        Resumed,
        lambda state: [""],
        lambda state, key: state.resuming.row(),
        lambda state, key, row: state.resuming.restore(row),
    ),
}
