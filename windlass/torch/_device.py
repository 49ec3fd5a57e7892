"""Devices: a flat whose parameters are on a GPU.

Parameters and gradients lie in flat memory of the device, and mirrors of it on the host are what servers see. The
host's memory is page-locked, so that copies run beside everything else; gradients are copied on a stream of their own.

    device    gradients (p.grad)  --- side stream --->  host  --- push --->  servers
              weights   (p.data)  <-- present stream --  host  <-- pull ----
"""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from windlass import _core

if TYPE_CHECKING:
    from windlass.torch._flat import Memory

_READ_WRITE = 0
_CLOSE_SECONDS = 5.0


class LockedPages:
    """Page-locks a registered array until the tensor that shows it is gone.

    A device reads and writes pages, not addresses. When a server is given up, the worker's arrays get fresh pages under
    the same addresses (csrc/client/arena/arena.h), and the device knows the old ones: the new ones must be locked, and
    what it wrote meanwhile must be written again.

    Thread safety: every method from any thread.
    """

    def __init__(self, engine: _core.Engine, tensor: Any) -> None:
        self._engine = engine
        self._address, self._bytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        self._device = torch.cuda.current_device()
        self._lock = threading.Lock()
        self._seen = engine.renewals()
        self._locked = [False]
        self._register()
        weakref.finalize(tensor, _unregister, self._locked, self._address).atexit = False

    def settle(self) -> int:
        """Makes sure that the device knows the present pages. Equal numbers before and after a copy: it knew them."""
        with self._lock:
            renewals = self._engine.renewals()
            if renewals != self._seen:
                torch.cuda.synchronize(self._device)  # copies from and to the old ones
                _unregister(self._locked, self._address)
                self._register()
                self._seen = renewals
            return renewals

    def _register(self) -> None:
        # Where the driver will not have it, copies are slower and right all the same.
        self._locked[0] = int(torch.cuda.cudart().cudaHostRegister(self._address, self._bytes, _READ_WRITE)) == 0


def _unregister(locked: list[bool], address: int) -> None:
    if locked[0]:
        locked[0] = False
        torch.cuda.cudart().cudaHostUnregister(address)


class Fetch:
    """A copy from a device to registered memory that is under way."""

    def __init__(self, memory: "Memory", copy: Callable[[], Any]) -> None:
        self._memory = memory
        self._copy = copy
        self._begin()

    def _begin(self) -> None:
        self._pages = self._memory.settle()
        self._copied = self._copy()

    def synchronize(self) -> None:
        """Returns when it is there."""
        self._copied.synchronize()
        while self._memory.settle() != self._pages:
            self._begin()
            self._copied.synchronize()


def strides_of(tensor: Any) -> tuple[int, ...]:
    """Its strides, where its numbers fill a piece of memory without gaps in whatever order (channels_last, ...)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return tuple(torch.empty(tensor.shape, device="meta").stride())
        expected *= size
    return tuple(tensor.stride())


class Mirror:
    """Weights and gradient slots on a device, for parameters that begin at given elements.

    Each view is a tensor of its own for torch, so that a change of one does not look like a change of another.
    """

    def __init__(self, n: int, places: list[tuple[int, Any]], dtype: Any, device: Any, slots: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.home = torch.zeros(n, dtype=dtype, device=device)  #: all weights
        self._slots = [torch.zeros(n, dtype=dtype, device=device) for _ in range(slots)]
        self.weights = [_view(self.home, first, param) for first, param in places]
        self.grads = [[_view(slot, first, param) for slot in self._slots] for first, param in places]

    def fetch(self, slot: int, begin: int, end: int, memory: "Memory") -> Fetch:
        """Starts to copy gradients to the host, behind what the present stream computes."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        source, target = self._slots[slot][begin:end], memory.part(begin, end)

        def copy() -> Any:
            with torch.cuda.stream(self._stream):
                target.copy_(source, non_blocking=True)
                return self._stream.record_event()

        return Fetch(memory, copy)

    def collect(self, memory: "Memory") -> None:
        """Copies all weights to the host."""
        pages = None
        while pages != memory.settle():
            pages = memory.settle()
            memory.part(0, len(self.home)).copy_(self.home)


def _view(flat: Any, first: int, param: Any) -> Any:
    empty = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return empty.set_(flat.untyped_storage(), first, param.shape, strides_of(param))


class Sender:
    """A thread that sends what has been copied, so that the backward pass need not wait for copies."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Any, Callable[[], None]] | None] = SimpleQueue()
        self._idle = threading.Condition()
        self._under_way = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="windlass-sender", daemon=True)
        self._thread.start()

    def send(self, copied: Any, send: Callable[[], None]) -> None:
        """Calls `send` when the copy is done, in order."""
        with self._idle:
            self._under_way += 1
        self._queue.put((copied, send))

    def drain(self) -> None:
        """Returns when everything has been sent; raises what went wrong."""
        with self._idle:
            while self._under_way:
                self._idle.wait()
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Ends the thread: an interpreter that ends must not meet it in torch's code."""
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            copied, send = item
            try:
                copied.synchronize()
                send()
            except BaseException as error:  # for whoever drains
                self._error = self._error or error
            with self._idle:
                self._under_way -= 1
                self._idle.notify_all()
