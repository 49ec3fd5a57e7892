"""Processes that the launcher of a run, or a task of an engine, has started, and the loop that listens to them."""

import contextlib
import selectors
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from windlass.launch.child import Child


class Children:
    """What they print is passed on, and how they end is a subclass's to handle: `_ended()`."""

    def __init__(self, verbose: bool) -> None:
        self._verbose = verbose
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._interrupted: signal.Signals | None = None

    @contextlib.contextmanager
    def signals(
        self, caught: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ) -> Iterator[None]:
        """These wake the loop. In the main thread only."""
        before = [signal.signal(number, self._note) for number in caught]
        fd = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(fd)
            for number, handler in zip(caught, before, strict=True):
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = self._interrupted or signal.Signals(number)

    def _add(self, child: Child) -> None:
        """From now on the loop listens to it."""
        self._children.append(child)
        self._selector.register(child.output, selectors.EVENT_READ, child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    def _ended(self, child: Child) -> None:
        """It has ended, and all that it printed was passed on but for what is held back."""
        raise NotImplementedError

    def _running(self, role: str = "") -> list[Child]:
        return [child for child in self._children if child.code is None and role in ("", child.role)]

    def _turn(self, timeout: float | None) -> None:
        """Handles what has happened, waiting for something to."""
        # A server's end before that of the workers that notice it, so that the cause is known before its consequences.
        ready = [key for key, _ in self._selector.select(timeout)]
        for key in sorted(ready, key=lambda key: key.data is not None and key.data.role == "worker"):
            child: Child | None = key.data
            if child is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            elif key.fileobj is child.output:
                if not child.read(self._verbose):
                    self._selector.unregister(child.output)
            else:
                self._selector.unregister(child.pidfd)
                child.reap()
                while child.output in self._selector.get_map() and child.read(self._verbose) and child.has_output():
                    pass
                self._ended(child)
        for child in self._running():
            child.pass_on_late()

    def _wait_for(self, role: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._running(role) and (left := deadline - time.monotonic()) > 0:
            self._turn(left)

    def _until_ended(self, role: str, seconds: float) -> None:
        self._wait_for(role, seconds)
        for child in self._running(role):
            child.signal(signal.SIGKILL)
        while self._running(role):
            self._turn(1.0)

    def _close(self) -> None:
        """Closes files."""
        for child in self._children:
            child.close()
        self._selector.close()
        self._wake.close()
        self._woken.close()
