"""A status of the scheduler, for people: tables that fit the width they have."""

import json
from typing import TYPE_CHECKING, Any

from windlass.observe.columns import Column, tables

if TYPE_CHECKING:
    from rich.console import RenderableType

_MUCH_BYTES = 64 << 20  # on a server; with less nobody minds that one has more than another


def picture(text: str, address: str, width: int, *, changing: bool = False) -> list["RenderableType"]:
    """What fits this width. changing: only what changes."""
    from rich.text import Text

    status: dict[str, Any] = json.loads(text)
    members = status["members"]
    hosts = sorted({one["host"] for one in members})
    parts: list[RenderableType] = [Text(f"scheduler at {address}")] if address else []
    moves = f", {status['moves']} moves under way" if status["moves"] else ""
    where = f", all on {hosts[0]}" if len(hosts) == 1 else ""
    begun = f", generation {status['generation']} of its scheduler" if status["generation"] > 1 else ""
    parts.append(Text(f"cluster {status['cluster']}, {seconds(status['seconds'])} old{where}{begun}{moves}"))
    parts += [Text(line, style=style) for style, line in _troubles(status)]

    def on(member: dict[str, Any]) -> str:
        return member["host"] if len(hosts) > 1 else ""

    parts += tables(
        "servers",
        [
            *_columns("server#", "address", "pid#", "host", "memory#", "shards#", "heard#"),
            *_columns("placed#", "sessions#", "requests#", "in#", "out#"),
        ],
        [
            [
                x["index"],
                x["address"],
                x["pid"],
                on(x),
                f"{size(x['memory_bytes'])} of {size(x['memory_bytes_max'])}",
                x["shards"],
                _heard(x),
                size(x["placed_bytes"]),
                x["sessions"],
                x["requests"],
                size(x["bytes_in"]),
                size(x["bytes_out"]),
            ]
            for x in members
            if x["role"] == "server"
        ],
        width,
    )
    parts += tables(
        "workers and readers",
        [
            *_columns("role", "app", "rank#", "pid#", "host", "clock#", "pulls#", "heard#"),
            Column("reported", text=True),
        ],
        [
            [
                x["role"],
                x["app"],
                x["index"] if x["role"] == "worker" else "",
                x["pid"],
                on(x),
                x["clock"],
                x["pulls"],
                _heard(x),
                ", ".join(f"{name} {number(value)}" for name, value in x["values"].items()),
            ]
            for x in members
            if x["role"] in ("worker", "reader")
        ],
        width,
        keys=3,
    )
    parts += tables(
        "apps",
        _columns("app", "workers#", "view#", "started", "on loss", "quota#"),
        [
            [
                x["name"],
                f"{x['workers']} of {x['world_size']}",
                x["view"],
                "yes" if x["started"] else "no",
                x["on_worker_loss"],
                "" if x["quota_bytes"] is None else size(x["quota_bytes"]),
            ]
            for x in status["apps"]
        ],
        width,
    )
    parts += tables(
        "pulls",
        [*_columns("app", "pulls#", "waited#", "for#", "staleness#", "p99#", "late#"), Column("waited for", text=True)],
        [
            [
                x["name"],
                of["pulls"],
                of["waits"],
                seconds(of["waited_seconds"]),
                f"{of['staleness_mean']:.2f}",
                _at_most(of["staleness_p99"], len(of["staleness"]) - 1),
                of["late"],
                ", ".join(f"rank {one['rank']} {100 * one['share']:.0f} %" for one in of["waited_for"]),
            ]
            for x in status["apps"]
            if (of := x["sync"]) is not None
        ],
        width,
    )
    parts += tables(
        "objects",
        [*_columns("name", "rows#", "bytes#", "shards#", "servers"), Column("what", text=True)],
        [
            [
                x["name"],
                "" if x["rows"] is None else x["rows"],
                size(x["bytes"]),
                x["shards"],
                ", ".join(map(str, x["servers"])),
                x["description"],
            ]
            for x in status["objects"]
        ],
        width,
    )
    parts += _moving(status, width)
    parts += tables(
        "leases",
        _columns("app", "lease", "epoch", "ranges#", "done#", "held#", "free#", "samples done#", "duplicates#"),
        [
            [
                x["app"],
                x["name"],
                f"{x['epoch']} of {x['epochs']} done",
                *(x[column] for column in ("ranges", "done", "held", "free", "samples_done", "duplicates")),
            ]
            for x in status["leases"]
        ],
        width,
        keys=2,
    )
    parts += _checkpoints(status.get("checkpoints"), width)
    if changing:
        return parts
    timeouts = ", ".join(f"{name} {value:g} s" for name, value in status["timeouts"].items())
    parts += [Text(""), Text("timeouts", style="bold"), Text(timeouts)]
    parts += tables(
        "settings",
        [Column("name"), Column("value", text=True), Column("from", text=True)],
        [[name, x["value"], x["from"]] for name, x in status["settings"].items() if x["from"] != "default"],
        width,
    )
    return parts


def _columns(*names: str) -> list[Column]:
    """Of numbers, where a name ends with #."""
    return [Column(name.removesuffix("#"), number=name.endswith("#")) for name in names]


def _troubles(status: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines and their styles."""
    found = []
    if status["missing"]:
        found.append(("yellow", f"still missing: {', '.join(status['missing'])}"))
    if status["returning"]:
        found.append(("yellow", f"not back yet since the scheduler began again: {', '.join(status['returning'])}"))
    for index, reason in status["servers_lost"].items():
        found.append(("red", f"server {index} is lost: {reason}"))
    level = status["level"]
    if not level["even"] and level["mean_bytes"] > _MUCH_BYTES:
        mean = size(level["mean_bytes"])
        found.append(("", f"servers are uneven: one is {100 * level['furthest']:.0f} % off the mean, {mean}"))
    for app in status["apps"]:
        if app["waited"]:
            ranks = ", ".join(map(str, app["waited"]))
            found.append(("yellow", f"app {app['name']!r} waits for a replacement of rank {ranks}"))
    resumed = (status.get("checkpoints") or {}).get("resumed") or {}
    found += [("yellow", f"checkpoint {resumed['id']}: {line}") for line in resumed.get("said", [])]
    return found


def _moving(status: dict[str, Any], width: int) -> list["RenderableType"]:
    """Servers that are drained, and shards on their way."""
    level = status["level"]
    drains = [
        [
            x["server"],
            f"{x['shards'] - x['shards_left']} of {x['shards']}",
            size(x["bytes_left"]),
            x["why"],
            x["failed"],
        ]
        for x in level["drains"]
    ]
    columns = [*_columns("server#", "shards moved#", "left#"), Column("why", text=True), Column("failed", text=True)]
    parts = tables("drains", columns, drains, width)
    rows = [
        [x["name"], x["shard"], x["from"], x["to"], "under way" if x["ordered"] else "waits for room"]
        for x in status["moving"]
    ]
    return parts + tables("moves", _columns("name", "shard#", "from#", "to#", "state"), rows, width)


def _checkpoints(found: dict[str, Any] | None, width: int) -> list["RenderableType"]:
    """The newest good one of each app, what is being taken, and why there is no newer one."""
    if found is None:
        return []
    going = found["going"]
    apps = sorted({*found["last"], *found["failed"], *([going["app"]] if going else [])})
    rows = []
    for app in apps:
        last = found["last"].get(app)
        under_way = saving(going) if going and going["app"] == app else ""
        known = ["none", "", ""] if last is None else [last["id"], last["clock"], seconds(last["age_seconds"])]
        rows.append([app, *known, under_way, found["failed"].get(app, "")])
    more = [Column("under way", text=True), Column("the next one failed", text=True)]
    return tables("checkpoints", [*_columns("app", "last good one", "clock#", "age#"), *more], rows, width)


def saving(going: dict[str, Any]) -> str:
    """A checkpoint that is being taken. How much it is in all is known about."""
    return f"clock {going['clock']}: {size(going['bytes'])} of about {size(max(going['bytes'], going['bytes_all']))}"


def number(value: float | None) -> str:
    """What a worker reported; None: it was not finite."""
    return "nan" if value is None else f"{value:.4g}"


def _at_most(staleness: int, last: int) -> str:
    return f"{staleness} or more" if staleness == last else str(staleness)


def size(n: int) -> str:
    """For people."""
    value, units = float(n), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def _heard(member: dict[str, Any]) -> str:
    """When a member was last heard of; it may be away, and has failure_timeout to come back."""
    away = member["away_seconds"]
    return seconds(member["heard_seconds"]) if away is None else f"away for {seconds(away)}"


def seconds(length: float) -> str:
    """For people."""
    return f"{length:.1f} s" if length < 120 else f"{length / 60:.0f} min"
