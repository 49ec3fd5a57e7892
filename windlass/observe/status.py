"""`windlass status`: what the scheduler says of its cluster, for people."""

import contextlib
import http.client
import ssl
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from windlass._errors import AccessDenied, ProtocolError, ServerLost
from windlass._net.address import Address, why
from windlass.control.auth import bearer
from windlass.launch.rundir import Run
from windlass.observe.columns import Column, tables
from windlass.observe.picture import picture, seconds

if TYPE_CHECKING:
    from rich.console import Console

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
        raise ServerLost(
            f"status: the scheduler at {address} cannot be reached: {text}; while it is away no checkpoints are taken"
        ) from error
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

    columns = [Column("name"), Column("for", number=True), Column("address"), Column("script", text=True)]
    rows = [(run.name, seconds(max(0.0, time.time() - run.since)), run.address, run.script) for run in runs]
    console = Console()
    for part in tables("runs", columns, rows, console.width):
        console.print(part)
    console.print("\nwindlass status --run NAME shows one of them", highlight=False)


def show(text: str, address: str = "", console: "Console | None" = None) -> None:
    """The same for people."""
    from rich.console import Console

    console = Console() if console is None else console
    for part in picture(text, address, console.width):
        console.print(part)


def watch(fetch_: Callable[[], str], address: str, console: "Console | None" = None, pause: float = 1.0) -> None:
    """Shows it again every second, on a terminal in one place, until Ctrl-C or until the cluster has ended."""
    from rich.console import Console, Group
    from rich.live import Live

    console = Console() if console is None else console
    text = fetch_()
    in_place = console.is_terminal and not console.is_dumb_terminal
    with contextlib.suppress(KeyboardInterrupt):
        try:
            with contextlib.ExitStack() as stack:
                live = None
                if in_place:
                    live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
                while True:
                    parts = picture(text, address, console.width, changing=True)
                    if live is None:
                        for part in parts:
                            console.print(part)
                    else:
                        live.update(Group(*parts), refresh=True)
                    time.sleep(pause)
                    text = fetch_()
        except ServerLost:
            if in_place:
                show(text, address, console)
            console.print("\nthe cluster has ended", highlight=False)
