"""What the launcher writes: logs of its children, and lines for people. What cannot be written is lost and counted, and
ends nothing: a full disk is no reason to stop training.
"""

import io
import os
import pathlib
import sys
from typing import IO

from windlass._net.address import why


class LogFile:
    """A file for what a process prints."""

    def __init__(self, path: pathlib.Path, *, append: bool) -> None:
        self._path = path
        self._lost_bytes = 0
        self._file: io.FileIO | None = None
        try:
            self._file = path.open("ab" if append else "wb", buffering=0)
        except OSError as error:
            self._complain(error)

    def write(self, data: bytes) -> None:
        """Never raises; says once, when it begins, that something is lost, and in the file how much it was."""
        if self._lost_bytes:
            note = f"\n--- {self._lost_bytes} bytes could not be written here ---\n".encode()
            if self._put(note) < len(note):
                self._lost_bytes += len(data)
                return
            self._lost_bytes = 0
        self._lost_bytes = len(data) - self._put(data)

    def _put(self, data: bytes) -> int:
        """How much of it was written."""
        if self._file is None:
            return 0
        try:
            return self._file.write(data)
        except OSError as error:
            if not self._lost_bytes:
                self._complain(error)
            return 0

    def _complain(self, error: OSError) -> None:
        show(f"windlass run: log file {self._path} cannot be written: {why(error)}; the run continues", sys.stderr)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def show(text: str, file: IO[str] | None = None) -> None:
    """A line on stdout or another file. Raises BrokenPipeError when the reader of stdout has left, and nothing else."""
    file = sys.stdout if file is None else file
    try:
        print(text, file=file, flush=True)
    except OSError as error:  # a full disk, or a reader that has gone
        _discard(file)
        if isinstance(error, BrokenPipeError) and file is sys.stdout:
            raise


def _discard(file: IO[str]) -> None:
    """Drops what the file still keeps back, at which Python would fail again when the process ends."""
    kept, null = os.dup(file.fileno()), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, file.fileno())
    file.flush()
    os.dup2(kept, file.fileno())
    os.close(null)
    os.close(kept)
