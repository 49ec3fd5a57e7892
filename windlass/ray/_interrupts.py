"""Signals to whoever runs a run: noted while it can be ended in order, else raised at once."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Interrupts:
    """Those of one run. Without caught() there are none, and Python does as ever."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.again = False  #: there was a second one
        self._heard = False

    @property
    def one_more(self) -> bool:
        """Whether a last checkpoint is to be taken."""
        return self.first == signal.SIGTERM

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """SIGINT, SIGTERM and SIGHUP, in the main thread."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, self._note) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.again = self.first is not None
        self.first = self.first or signal.Signals(number)
        if not self._heard:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Somebody looks at them."""
        self._heard = True
        try:
            yield
        finally:
            self._heard = False
