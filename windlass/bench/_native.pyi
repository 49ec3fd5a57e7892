"""
The limits of windlass bench: plain loops, bare programs at the ends of a socket, and a gate by itself.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


def limit_rule(rule: int, numbers: Sequence[float], w: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], state: Sequence[Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]], g: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], row: int, threads: int, repeats: int, looks: bool = False) -> list[float]:
    """
    Seconds of a rule's kernel on plain arrays, `row` numbers to a row; numbers per row are the last of the state. looks: as for reject_nonfinite it looks at every number that it uses.
    """

def limit_rule_rows(rule: int, numbers: Sequence[float], w: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], state: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], heads: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu')], rows: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], g: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], repeats: int, looks: bool = False) -> list[float]:
    """The same on rows of plain arrays, by their numbers."""

def limit_fused_sgd(w: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], g: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], stream: bool, threads: int, repeats: int) -> list[float]: ...

def limit_fused_sgd_of_two(w: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], g0: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], g1: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], out0: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], out1: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], stream: bool, threads: int, repeats: int) -> list[float]: ...

def limit_update_sgd(w: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], g: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], threads: int, repeats: int) -> list[float]: ...

def limit_copy(source: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], to: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], threads: int, repeats: int) -> list[float]: ...

def limit_fused_adam(w: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], m: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], v: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], g: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], stream: bool, threads: int, repeats: int) -> list[float]: ...

def limit_gather(table: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], rows: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], stream: bool, repeats: int) -> list[float]: ...

def limit_row_adagrad(table: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], heads: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu')], rows: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], g: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], repeats: int) -> list[float]: ...

def time_gate(sync: tuple[int, int, float], workers: int, pulls: int, repeats: int) -> tuple[list[float], list[float]]:
    """
    Seconds per pull at a gate, one per repeat: asked once, and with everybody who waits asked again after every close.
    """

def limit_wire_serve(fd: int) -> None:
    """
    The other end of the limits below, in a process of its own, until the socket is closed.
    """

def limit_wire_push(fd: int, g: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], piece_bytes: int, repeats: int) -> list[float]:
    """Seconds of each push; the other end reads so many bytes at once."""

def limit_wire_pull(fd: int, request_bytes: int, out: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], piece_bytes: int, repeats: int) -> list[float]:
    """Seconds of each pull; this end reads so many bytes at once."""

def limit_wire_round_trips(fd: int, bytes: int, repeats: int, spinning: bool, pause: float) -> list[float]:
    """Seconds of each round trip; each comes after a pause in seconds."""

def limit_wire_expect_round_trips(fd: int, bytes: int, repeats: int) -> None:
    """The caller then makes the round trips itself."""
