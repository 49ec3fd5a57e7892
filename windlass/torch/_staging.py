"""Staging: page-locked rows between servers and a device.

    servers --- pull ---> staging --- side stream ---> rows on the device
    servers <--- push --- staging <--- side stream --- gradients on the device

The memory is registered, so that servers on this host use it in place, and grows with the batches.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from windlass.torch._device import Fetch
from windlass.torch._flat import Memory

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster


class Staging:
    """Rows of one table on their way to or from one device. Not thread-safe."""

    def __init__(self, cluster: "Cluster", dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._cluster = cluster
        self._dim = dim
        self._dtype = dtype
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._memory: Memory | None = None
        self._rows = 0
        self._copied: Any = None  # when the device has read the memory

    def to_device(self, n: int, fill: Callable[[Any], None]) -> Any:
        """`n` rows on the device, which `fill` has written to the memory it is given. Does not wait for the copy."""
        memory = self._room(n)
        host = memory.part(0, n * self._dim).view(n, self._dim)
        fill(host)
        memory.settle()
        with torch.cuda.stream(self._stream):
            made = torch.empty((n, self._dim), dtype=self._dtype, device=self._device)
            made.copy_(host, non_blocking=True)
            self._copied = self._stream.record_event()
        present = torch.cuda.current_stream(self._device)
        present.wait_stream(self._stream)
        made.record_stream(present)
        return made

    def to_host(self, pieces: Sequence[Any]) -> Any:
        """Rows of the device, one piece after the other, in page-locked memory: until the next call."""
        n = sum(len(piece) for piece in pieces)
        memory = self._room(n)
        host = memory.part(0, n * self._dim).view(n, self._dim)
        sent = [piece.to(self._dtype) for piece in pieces]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

        def copy() -> Any:
            first = 0
            with torch.cuda.stream(self._stream):
                for piece in sent:
                    host[first : first + len(piece)].copy_(piece, non_blocking=True)
                    first += len(piece)
                return self._stream.record_event()

        Fetch(memory, copy).synchronize()
        return host

    def _room(self, n: int) -> Memory:
        """Memory for `n` rows that no copy uses."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        if self._memory is None or self._rows < n:
            self._rows = n + n // 8 + 64
            with torch.cuda.device(self._device):
                self._memory = Memory(self._cluster, self._rows * self._dim, self._dtype, locked=True)
        return self._memory
