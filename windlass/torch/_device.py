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
from typing import Any

import torch

_READ_WRITE = 0
_CLOSE_SECONDS = 5.0


def lock_pages(tensor: Any) -> bool:
    """Page-locks host memory until the tensor is gone; False where the driver will not have it."""
    runtime = torch.cuda.cudart()
    address = tensor.data_ptr()
    if int(runtime.cudaHostRegister(address, tensor.numel() * tensor.element_size(), _READ_WRITE)) != 0:
        return False
    weakref.finalize(tensor, runtime.cudaHostUnregister, address).atexit = False
    return True


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

    def fetch(self, slot: int, begin: int, end: int, target: Any) -> Any:
        """Starts to copy gradients to the host, behind what the present stream computes."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(self._slots[slot][begin:end], non_blocking=True)
            return self._stream.record_event()


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
