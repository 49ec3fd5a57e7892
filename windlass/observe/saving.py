"""`windlass checkpoint save`: asks for a checkpoint, and shows on a terminal how much of it is written."""

import concurrent.futures
import json
import ssl
from typing import Any

from windlass._errors import Timeout, WindlassError
from windlass._net.address import Address
from windlass.observe.operator import Operator
from windlass.observe.picture import saving
from windlass.observe.status import fetch

_LOOK_SECONDS = 0.25


def wait(
    operator: Operator,
    where: Address,
    token: bytes,
    tls: ssl.SSLContext | None,
    app: str,
    tag: str | None,
    timeout: float,
) -> str:
    """The checkpoint's id, once it is complete. Raises CheckpointFailed, Timeout, or the scheduler's refusal."""
    from rich.console import Console

    def save() -> str:
        try:
            return operator.save(app, tag, timeout, wait=True)
        except Timeout:
            raise Timeout(
                f"checkpoint of app {app!r}: not complete within {timeout:g} s; it is cut between two iterations of "
                "the app's lowest rank, so workers must call tick() or step()"
            ) from None

    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        return save()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(save)
        with _progress(console) as progress:
            task = progress.add_task("waits for an iteration to end", total=None)
            while not concurrent.futures.wait([asked], _LOOK_SECONDS).done:
                going = _going(where, token, tls, app)
                if going is not None:
                    total = max(1, going["bytes"], going["bytes_all"])
                    progress.update(task, description=saving(going), completed=going["bytes"], total=total)
        return asked.result()


def _progress(console: Any) -> Any:
    from rich.progress import BarColumn, Progress, TextColumn

    columns = [TextColumn("checkpoint"), BarColumn(), TextColumn("{task.description}", markup=False)]
    return Progress(*columns, console=console, transient=True)


def _going(where: Address, token: bytes, tls: ssl.SSLContext | None, app: str) -> dict[str, Any] | None:
    """What is being taken of an app; None: nothing, or nobody answers."""
    try:
        saves = json.loads(fetch(where, token, tls)).get("checkpoints") or {}
    except (WindlassError, ValueError):
        return None
    going = saves.get("going")
    return going if going and going["app"] == app else None
