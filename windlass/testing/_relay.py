"""One connection through a proxy: a thread per direction reads frames and passes them on, spoiled as it is told.

A thread has one buffer. Frames that are left alone stay in it until it is read dry and then leave in one call; a large
frame streams through it. Only a frame that is sent twice or later is copied, once. What is done to a frame is decided
when its header is there, from the header as it came: the true length counts, whatever is done to the bytes.

On Unix sockets a file that came beside a frame (an arena) goes where its frame goes, as often as that does.
"""

import collections
import contextlib
import fcntl
import os
import random
import select
import socket
import struct
import termios
import threading
import time
from collections.abc import Iterator

from windlass._net.handshake import GREETING_BYTES, HELLO_BYTES, WELCOME_BYTES
from windlass.testing.faults import KINDS, Direction, Faults

HANDSHAKE_BYTES: dict[Direction, int] = {"up": HELLO_BYTES, "down": GREETING_BYTES + WELCOME_BYTES}
HEADER_BYTES = 64
FRAME_BYTES_MAX = 1 << 42
BUFFER_BYTES = 128 << 10
HELD_S = 0.02  # a frame held back goes on after so long, though none has overtaken it
SETTLE_S = 1.0  # what a cut waits at most until the peer has what was sent
HELLO = 1
ARENA, ARENA_FRAME_BYTES = 15, 192
FILES_SPACE = socket.CMSG_SPACE(4)


class Control:
    """What a proxy and its connections share."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.flow = threading.Event()  # cleared while the proxy is paused
        self.flow.set()
        self.lock = threading.Lock()
        self.made = collections.Counter(dict.fromkeys(KINDS, 0))
        self.frames: dict[Direction, int] = {"up": 0, "down": 0}

    def count(self, kind: str) -> None:
        with self.lock:
            self.made[kind] += 1


class Connection:
    """A client's socket and the one to the server that belongs to it."""

    def __init__(
        self, control: Control, number: int, client: socket.socket, server: socket.socket, cuts: dict[Direction, int]
    ) -> None:
        self.control, self.number, self.cuts = control, number, cuts
        self.over = threading.Event()
        self.greeted = threading.Event()  # the server's last word in the handshake has been passed on
        self._lock = threading.Lock()
        self._sockets = (client, server)
        self.pumps = (Pump(self, "up", client, server), Pump(self, "down", server, client))
        self._running = len(self.pumps)
        for pump in self.pumps:
            pump.start()

    def cut(self) -> None:
        """Ends both directions at once. Both peers get what was sent so far, then the end."""
        self.over.set()
        self.greeted.set()
        for end in self._sockets:
            with self._lock, contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """A pump has ended. Only the last one closes: the number of a closed socket may be another's at once."""
        self.greeted.set()
        with self._lock:
            self._running -= 1
            if self._running == 0:
                for end in self._sockets:
                    end.close()


class _Cut(Exception):
    """The connection is to be closed."""


class Pump(threading.Thread):
    """One direction of a connection.

    The buffer: [sent, at) has been looked at and is to be passed on, [at, end) has been read but not looked at.
    """

    def __init__(
        self, connection: Connection, direction: Direction, source: socket.socket, sink: socket.socket
    ) -> None:
        super().__init__(name=f"windlass-proxy-{connection.number}-{direction}", daemon=True)
        self.sending = threading.Lock()  # whoever has it knows that nothing is being sent
        self._connection, self._control, self._direction = connection, connection.control, direction
        self._source, self._sink = source, sink
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(source, select.POLLIN)
        self._writable.register(sink, select.POLLOUT)
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._sent = self._at = self._end = 0
        self._left: int | None = None  # bytes until cut_at
        self._held = bytearray()
        self._held_until = 0.0
        self._read = 0  # bytes so far
        # Files, each with a place in the stream that it came at or behind: the kernel joins what was sent before it.
        self._files: collections.deque[tuple[int, int]] = collections.deque()
        self._file: int | None = None  # of the frame at hand
        self._held_file: int | None = None
        self._passing: int | None = None  # what goes beside the next byte
        self._faults: Faults | None = None
        self._random = random.Random()

    def run(self) -> None:
        try:
            with contextlib.suppress(EOFError):
                self._relay()
            self._at = self._end  # the beginning of a header, perhaps
            self._flush()
            self._release()
            self._control.flow.wait()
            self._sink.shutdown(socket.SHUT_WR)
        except (OSError, _Cut):
            self._connection.cut()
        finally:
            for file in (*(file for _, file in self._files), self._file, self._held_file):
                if file is not None:
                    os.close(file)
            self._connection.leave()

    # -- the stream --------------------------------------------------------------------------------------------------

    def _relay(self) -> None:
        self._pass(HANDSHAKE_BYTES[self._direction])
        self._flush()
        if self._direction == "down":
            self._connection.greeted.set()
        self._left = self._connection.cuts.get(self._direction)
        if self._left == 0:
            self._connection.greeted.wait()
            self._send(b"")
        while (size := self._frame()) is not None:
            self._handle(size)
        self._release()
        while True:  # not a frame: just bytes, from here on
            self._at = self._end
            self._fill()

    def _frame(self) -> int | None:
        """Waits for a header. The bytes of its frame, or None where it cannot be one."""
        while self._end - self._at < HEADER_BYTES:
            self._flush()
            if self._held and not self._readable.poll(1000 * max(0.0, self._held_until - time.monotonic())):
                self._release()  # only here, between two frames
            self._fill()
        magic, length = struct.unpack_from("<4s4xQ", self._buffer, self._at)
        if magic != b"WLF1" or length % HEADER_BYTES or length > FRAME_BYTES_MAX:
            return None
        return HEADER_BYTES + int(length)

    def _fill(self) -> None:
        """Reads more. What is decided is passed on before; what is not is less than a header."""
        self._flush()
        rest = self._end - self._at
        self._buffer[:rest] = self._buffer[self._at : self._end]
        self._sent, self._at, self._end = 0, 0, rest
        if (got := self._receive(self._buffer[rest:])) == 0:
            raise EOFError
        self._end += got
        self._read += got

    def _receive(self, into: memoryview) -> int:
        if self._source.family != socket.AF_UNIX:
            return self._source.recv_into(into)
        got, beside, _, _ = self._source.recvmsg_into([into], FILES_SPACE)
        for _, _, files in beside:
            self._files.append((self._read, int.from_bytes(files[:4], "little")))
        return got

    def _pass(self, size: int) -> None:
        """Lets the next bytes go on as they are."""
        while size > self._end - self._at:
            size -= self._end - self._at
            self._at = self._end
            self._fill()
        self._at += size

    def _pieces(self, size: int) -> Iterator[memoryview]:
        """Takes the next bytes out of the stream."""
        self._flush()
        while size:
            if self._at == self._end:
                self._fill()
            piece = self._buffer[self._at : min(self._end, self._at + size)]
            self._sent = self._at = self._at + len(piece)
            size -= len(piece)
            yield piece

    def _flush(self) -> None:
        if self._sent < self._at:
            self._send(self._buffer[self._sent : self._at])
            self._sent = self._at

    def _send(self, data: memoryview | bytes) -> None:
        last = self._left is not None and len(data) >= self._left
        data = data[: self._left] if last else data
        if self._left is not None:
            self._left -= len(data)
        while data:
            self._control.flow.wait()
            with self.sending, contextlib.suppress(BlockingIOError):
                if self._control.flow.is_set():
                    data = data[self._send_some(data) :]
            if data:
                self._writable.poll()
        if last:
            self._cut("cut_at")

    def _send_some(self, data: memoryview | bytes) -> int:
        if self._passing is None:
            return self._sink.send(data, socket.MSG_DONTWAIT)
        beside = (socket.SOL_SOCKET, socket.SCM_RIGHTS, self._passing.to_bytes(4, "little"))
        sent = self._sink.sendmsg([data], [beside], socket.MSG_DONTWAIT)
        self._passing = None
        return sent

    def _release(self) -> None:
        """Passes on the frame that was held back."""
        if self._held:
            self._flush()
            held, self._held = self._held, bytearray()
            self._passing = self._held_file
            self._send(memoryview(held))
            if self._held_file is not None:
                os.close(self._held_file)
                self._held_file = None

    # -- faults ------------------------------------------------------------------------------------------------------

    def _handle(self, size: int) -> None:
        """One frame, whose header is in the buffer."""
        if not self._has_file(size):
            return self._treat(size)
        self._flush()
        self._file = self._passing = self._files.popleft()[1]
        self._treat(size)
        self._flush()
        if self._file is not None:
            os.close(self._file)
        self._file = self._passing = None

    def _has_file(self, size: int) -> bool:
        """Whether a file came beside the frame: it brings an arena, and was read since a file came."""
        if not self._files or self._buffer[self._at + 5] & 0x7F != ARENA:
            return False
        while self._end - self._at < min(size, ARENA_FRAME_BYTES):
            self._fill()
        begins = self._read - (self._end - self._at)
        return begins >= self._files[0][0] and any(self._buffer[self._at + 136 : self._at + 144])  # how large it is

    def _treat(self, size: int) -> None:
        control, faults = self._control, self._control.faults
        with control.lock:
            control.frames[self._direction] += 1
        if faults is not self._faults:
            self._faults = faults
            self._random = random.Random(f"{faults.seed} {self._connection.number} {self._direction}")
        hello = self._buffer[self._at + 5] & 0x7F == HELLO
        if faults.directions not in ("both", self._direction) or (hello and faults.skip_hello):
            delayed, fault = False, None
        else:
            delayed, fault = faults.draw(self._random)
        if delayed:
            control.count("delay")
            self._flush()
            self._connection.over.wait(self._random.uniform(*faults.delay_ms) / 1000)
        if fault is None:
            self._pass(size)
        else:
            held = bool(self._held)
            control.count(fault)
            getattr(self, f"_{fault}_frame")(size)
            if fault == "drop" or (fault == "reorder" and not held):
                return
        self._release()

    def _drop_frame(self, size: int) -> None:
        for _ in self._pieces(size):
            pass

    def _duplicate_frame(self, size: int) -> None:
        copy = bytearray()
        for piece in self._pieces(size):
            copy += piece
            self._send(piece)
        self._passing = self._file
        self._send(memoryview(copy))

    def _reorder_frame(self, size: int) -> None:
        if self._held:  # two neighbours change places, which serves both
            return self._pass(size)
        for piece in self._pieces(size):
            self._held += piece
        self._held_file, self._file, self._passing = self._file, None, None
        self._held_until = time.monotonic() + HELD_S

    def _corrupt_frame(self, size: int) -> None:
        bits = self._random.sample(range(8 * size), self._random.randint(1, 3))
        start = 0
        for piece in self._pieces(size):
            for bit in bits:
                if 0 <= bit // 8 - start < len(piece):
                    piece[bit // 8 - start] ^= 1 << bit % 8
            start += len(piece)
            self._send(piece)

    def _half_close_frame(self, size: int) -> None:
        self._pass(size)
        self._release()
        self._flush()
        self._sink.shutdown(socket.SHUT_WR)
        while True:  # the sender does not notice
            self._sent = self._at = self._end
            self._fill()

    def _cut_frame(self, size: int) -> None:
        self._pass(self._random.randrange(size))
        self._flush()
        self._cut()

    def _cut(self, kind: str | None = None) -> None:
        if kind:
            self._control.count(kind)
        end = time.monotonic() + SETTLE_S
        while self._queued() and time.monotonic() < end:
            self._connection.over.wait(0.001)
        raise _Cut

    def _queued(self) -> int:
        """Bytes that the peer's kernel has not got yet, and that a reset would take back."""
        if self._sink.family == socket.AF_UNIX:
            return 0
        return int(struct.unpack("i", fcntl.ioctl(self._sink, termios.TIOCOUTQ, bytes(4)))[0])
