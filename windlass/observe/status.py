"""`windlass status`: what the scheduler says of its cluster, for people."""

import http.client
import json
import ssl
import time
from typing import Any

from windlass._errors import AccessDenied, ProtocolError, ServerLost
from windlass._net.address import Address, why
from windlass.control.auth import bearer
from windlass.launch.rundir import Run

_TIMEOUT_SECONDS = 10.0


def fetch(
    address: Address,
    token: bytes,
    tls: ssl.SSLContext | None = None,
    path: str = "/api/v1/status",
    timeout: float = _TIMEOUT_SECONDS,
) -> str:
    """What the scheduler answers to a GET, the JSON of its status."""
    connection = (
        http.client.HTTPConnection(address.host, address.port, timeout=timeout)
        if tls is None
        else http.client.HTTPSConnection(address.host, address.port, timeout=timeout, context=tls)
    )
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {bearer(token)}"})
        answer = connection.getresponse()
        body = answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        text = why(error) if isinstance(error, OSError) else f"it speaks no HTTP ({error!r})"
        raise ServerLost(f"status: the scheduler at {address} cannot be reached: {text}") from error
    finally:
        connection.close()
    if answer.status == 401:
        raise AccessDenied(f"status: the scheduler at {address} has another token")
    if answer.status != 200:
        raise ProtocolError(f"status: {address} answered {answer.status} {answer.reason}")
    return body


def show_runs(runs: list[Run]) -> None:
    """The runs of this user on this machine."""
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "script", "for", "address", box=None)
    for run in runs:
        table.add_row(run.name, run.script, _seconds(max(0.0, time.time() - run.since)), run.address)
    console = Console()
    console.print(table)
    console.print("windlass status --run NAME shows one of them", highlight=False)


def show(text: str, address: str = "") -> None:
    """The same as tables."""
    from rich.console import Console
    from rich.table import Table

    status: dict[str, Any] = json.loads(text)
    console = Console()
    print_ = console.print
    if address:
        print_(f"scheduler at {address}", highlight=False)
    print_(f"cluster {status['cluster']}, {_seconds(status['seconds'])} old, {status['moves']} moves under way")
    if status["missing"]:
        print_(f"[yellow]still missing: {', '.join(status['missing'])}[/yellow]")
    for index, reason in status["servers_lost"].items():
        print_(f"[red]server {index} is lost: {reason}[/red]")

    for app in status["apps"]:
        if app["waited"]:
            ranks = ", ".join(map(str, app["waited"]))
            print_(f"[yellow]app {app['name']!r} waits for a replacement of rank {ranks}[/yellow]")

    def table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
        if rows:
            made = Table(*columns, title=title, title_justify="left")
            for row in rows:
                made.add_row(*map(str, row))
            print_(made)

    members = status["members"]
    table(
        "servers",
        ["server", "address", "process", "shards", "placed", "memory", "sessions", "requests", "in", "out", "heard"],
        [
            [
                x["index"],
                x["address"],
                f"{x['pid']} on {x['host']}",
                x["shards"],
                _bytes(x["placed_bytes"]),
                f"{_bytes(x['memory_bytes'])} of {_bytes(x['memory_bytes_max'])}",
                x["sessions"],
                x["requests"],
                _bytes(x["bytes_in"]),
                _bytes(x["bytes_out"]),
                _heard(x),
            ]
            for x in members
            if x["role"] == "server"
        ],
    )
    table(
        "workers and readers",
        ["role", "app", "rank", "process", "clock", "heard", "reported"],
        [
            [
                x["role"],
                x["app"],
                x["index"],
                f"{x['pid']} on {x['host']}",
                x["clock"],
                _heard(x),
                ", ".join(f"{name} {number(value)}" for name, value in x["values"].items()),
            ]
            for x in members
            if x["role"] in ("worker", "reader")
        ],
    )
    table(
        "apps",
        ["app", "workers", "view", "started", "on loss", "quota"],
        [
            [
                x["name"],
                f"{x['workers']} of {x['world_size']}",
                x["view"],
                "yes" if x["started"] else "no",
                x["on_worker_loss"],
                "" if x["quota_bytes"] is None else _bytes(x["quota_bytes"]),
            ]
            for x in status["apps"]
        ],
    )
    table(
        "consistency",
        ["app", "pulls", "stale", "p99", "waits", "waited", "waited for most", "late"],
        [
            [
                x["name"],
                of["pulls"],
                f"{of['staleness_mean']:.2f}",
                _at_most(of["staleness_p99"], len(of["staleness"]) - 1),
                of["waits"],
                _seconds(of["waited_seconds"]),
                ", ".join(f"rank {one['rank']}: {_seconds(one['seconds'])}" for one in of["waited_for"]),
                of["late"],
            ]
            for x in status["apps"]
            if (of := x["sync"]) is not None
        ],
    )
    table(
        "objects",
        ["name", "what", "shards", "bytes", "servers"],
        [
            [x["name"], x["description"], x["shards"], _bytes(x["bytes"]), ", ".join(map(str, x["servers"]))]
            for x in status["objects"]
        ],
    )
    table(
        "leases",
        ["app", "lease", "epoch", "ranges", "done", "held", "free", "samples done", "duplicates"],
        [
            [
                x["app"],
                x["name"],
                f"{x['epoch']} of {x['epochs']} done",
                *(x[column] for column in ("ranges", "done", "held", "free", "samples_done", "duplicates")),
            ]
            for x in status["leases"]
        ],
    )
    table("timeouts", ["what", "seconds"], [[name, value] for name, value in status["timeouts"].items()])
    table(
        "settings",
        ["name", "value", "from"],
        [[name, x["value"], x["from"]] for name, x in status["settings"].items() if x["from"] != "default"],
    )


def number(value: float | None) -> str:
    """What a worker reported; None: it was not finite."""
    return "nan" if value is None else f"{value:.4g}"


def _at_most(staleness: int, last: int) -> str:
    return f"{staleness} or more" if staleness == last else str(staleness)


def _bytes(n: int) -> str:
    size, units = float(n), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


def _heard(member: dict[str, Any]) -> str:
    """When a member was last heard of; it may be away, and has failure_timeout to come back."""
    away = member["away_seconds"]
    return _seconds(member["heard_seconds"]) if away is None else f"away for {_seconds(away)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
