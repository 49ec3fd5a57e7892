"""What an app ends with: its figure beside that of a reference, for people and for the table of `make apps`."""

import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import rich.progress as bars

Report = Callable[[int, float], None]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One figure, and where there is one that of a reference on the same data."""

    app: str
    data: str
    what: str  #: the figure: "RMSE", "AUC"
    ours: float
    seconds: float
    reference: float | None = None
    of: str = ""  #: whose the reference is
    of_seconds: float = 0.0
    most: float = math.inf  #: ours may be at most so many times the reference
    least: float = 0.0  #: or at least
    also: bool = True  #: whatever else must hold

    def beside(
        self, reference: Callable[[], float], of: str, *, most: float = math.inf, least: float = 0.0
    ) -> "Outcome":
        """The same with the figure of a reference, which is computed now; where it is not installed, with its name."""
        clock = Clock()
        try:
            found = reference()
        except ImportError as error:
            return dataclasses.replace(self, of=f"{of} ({error})")
        return dataclasses.replace(self, reference=found, of=of, of_seconds=clock.seconds, most=most, least=least)

    @property
    def reached(self) -> bool:
        """Whether it is as good as it should be."""
        if self.reference is None:
            return True
        return self.also and self.least * self.reference <= self.ours <= self.most * self.reference

    def show(self) -> None:
        """In a line or two."""
        print(f"{self.data}: {self.what} {self.ours:.6g} in {self.seconds:.2f} s", flush=True)
        if self.reference is not None:
            ratio = self.ours / self.reference
            said = "as good as it should be" if self.reached else "NOT as good as it should be"
            print(f"{self.of}: {self.what} {self.reference:.6g} in {self.of_seconds:.2f} s; ratio {ratio:.4f}, {said}")
        elif self.of:
            print(f"no reference: {self.of}")

    def end(self, save_to: Path | None) -> None:
        """Shows it, and saves it as JSON if that is wanted."""
        self.show()
        if save_to is not None:
            save_to.write_text(json.dumps(dataclasses.asdict(self)))


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begin


@contextlib.contextmanager
def progress(steps: int, step: str, what: str, *, quiet: bool = False) -> Iterator[Report]:
    """Yields a function that shows a step's figure: a bar on a terminal, about ten lines elsewhere."""
    if quiet:
        yield lambda number, value: None
        return
    if not sys.stdout.isatty():
        every = math.ceil(steps / 10)

        def line(number: int, value: float) -> None:
            if number == 1 or number % every == 0 or number == steps:
                print(f"{step} {number}/{steps}  {what} {value:.6g}", flush=True)

        yield line
        return
    columns = (step, bars.MofNCompleteColumn(), bars.BarColumn(), what + " {task.fields[value]:.6g}")
    with bars.Progress(*columns, bars.TimeRemainingColumn(elapsed_when_finished=True)) as shown:
        task = shown.add_task("", total=steps, value=math.nan)
        yield lambda number, value: shown.update(task, completed=number, value=value)
