"""The display of `windlass run --progress`: how the apps get on, under the lines that workers print.

On a terminal it is drawn again and again in one place; elsewhere it is a line every few seconds. It asks the scheduler,
and whatever goes wrong with that, or with the drawing, is nobody's trouble but its own.
"""

import contextlib
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from windlass._errors import WindlassError
from windlass.observe.picture import saving
from windlass.observe.progress import WORKERS_SHOWN, Pace, Summary, facts, line, rows

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

LOOK_SECONDS = 0.5  # between two questions on a terminal
ASK_SECONDS = 1.0  # elsewhere
LINE_SECONDS = 5.0  # between two lines there
_BAR_COLUMNS = 30
_AWAY_SECONDS = 1.0  # until somebody who did not answer is asked again
#: Whoever read our output has gone; rich says it with the latter two.
_GONE = (OSError, ValueError, IndexError, SystemExit)
Fetch = Callable[[], str]


class Display:
    """One run's. `fetch` gives the JSON of the scheduler's status, or raises."""

    def __init__(self, fetch: Fetch, console: "Console | None" = None) -> None:
        from rich.console import Console

        self._fetch = fetch
        self._console = Console() if console is None else console
        self._live: Live | None = None
        self._pace = Pace()
        self._drawn = self._console.is_terminal and not self._console.is_dumb_terminal
        self._look_at = 0.0
        self._say_at = time.monotonic() + LINE_SECONDS
        self._broken = False
        self._going: dict[str, Any] | None = None  # the checkpoint that is being taken

    @property
    def due_seconds(self) -> float | None:
        """Until look() has something to do; None: it never will."""
        return None if self._broken else max(0.0, self._look_at - time.monotonic())

    def look(self) -> None:
        """Asks and shows, if it is time to."""
        if self.due_seconds == 0.0:
            self._show(last=False)

    def close(self, *, show: bool = True) -> None:
        """Shows how it came out, unless told otherwise, and leaves the terminal as it was. Idempotent."""
        if show and not self._broken:
            self._show(last=True)
        self._broken = True
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(*_GONE):
                live.stop()

    def _show(self, *, last: bool) -> None:
        summaries = self._ask()
        if not summaries:
            return
        try:
            if self._drawn:
                self._draw(summaries)
            elif last or time.monotonic() >= self._say_at:
                self._say_at = time.monotonic() + LINE_SECONDS
                for summary in summaries:
                    print(line(summary), flush=True)
        except _GONE:
            self._broken = True

    def _ask(self) -> list[Summary]:
        """Nothing where nobody answers: it may not be up yet, or be gone."""
        try:
            status = json.loads(self._fetch())
            summaries = self._pace.add(status)
            self._going = (status.get("checkpoints") or {}).get("going")
            self._look_at = time.monotonic() + (LOOK_SECONDS if self._drawn else ASK_SECONDS)
            return summaries
        except (WindlassError, OSError, ValueError, KeyError, TypeError):
            self._look_at = time.monotonic() + _AWAY_SECONDS
            return []

    def _draw(self, summaries: list[Summary]) -> None:
        from rich.live import Live

        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(picture(summaries, self._going), refresh=True)


def picture(summaries: list[Summary], going: dict[str, Any] | None = None) -> "RenderableType":
    """For a terminal: of each app a line and a table of its workers; and of a checkpoint that is being taken a bar."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = []
    for summary in summaries:
        parts.append(Text(f"{summary.app}, {summary.seconds:.0f} s: {', '.join(facts(summary))}", style="bold"))
        columns, workers = rows(summary)
        table = Table(box=None, pad_edge=False)
        for column in columns:
            table.add_column(Text(column), justify="right")
        for row in workers:
            table.add_row(*map(Text, row))
        parts.append(table)
        if (more := len(summary.workers) - WORKERS_SHOWN) > 0:
            parts.append(Text(f"and {more} more"))
    if going is not None:
        parts.append(save_bar(going))
    return Group(*parts)


def save_bar(going: dict[str, Any]) -> "RenderableType":
    """How much of a checkpoint is written, as a bar and in bytes."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    bar = ProgressBar(total=max(1, going["bytes_all"], going["bytes"]), completed=going["bytes"], width=_BAR_COLUMNS)
    line = Table.grid(padding=(0, 1))
    line.add_row(Text("checkpoint"), bar, Text(saving(going)))
    return line
