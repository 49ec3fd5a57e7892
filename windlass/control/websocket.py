"""A member's end of a WebSocket, over a blocking socket.

Small on purpose. A worker must not import an HTTP library for it, which takes longer than everything else that
connect() does, and a heartbeat is written by a thread that is not Python's, so we must know what a frame looks like
anyway. Only what we need is here: binary messages, no extensions. Frames are masked with zeros, which changes nothing.
"""

import base64
import contextlib
import hashlib
import secrets
import socket
import ssl
import struct
import threading

from windlass._errors import AccessDenied, ProtocolError, ServerLost, Timeout
from windlass._net.address import Address, Attempts, dial, seconds_left, why
from windlass.control.messages import MESSAGE_BYTES_MAX

_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_HEAD_BYTES_MAX = 16384
_BINARY, _CLOSE, _PING, _PONG = 2, 8, 9, 10
_WHOLE = 0x80


def frame(data: bytes, op: int = _BINARY) -> bytes:
    """A whole message as a client sends it."""
    if len(data) < 126:
        head = struct.pack("!BB", _WHOLE | op, 0x80 | len(data))
    elif len(data) < 1 << 16:
        head = struct.pack("!BBH", _WHOLE | op, 0x80 | 126, len(data))
    else:
        head = struct.pack("!BBQ", _WHOLE | op, 0x80 | 127, len(data))
    return head + bytes(4) + data


class ClosedByScheduler(ConnectionResetError):
    """The scheduler has ended the connection on purpose, and has read what was said before."""


class WebSocket:
    """A connection that is open. One thread may receive while others send."""

    def __init__(self, sock: socket.socket, address: Address) -> None:
        self._sock = sock
        self._address = address
        self._ahead = b""
        self._sending = threading.Lock()

    @classmethod
    def open(
        cls,
        address: Address,
        path: str,
        deadline: float,
        tls: ssl.SSLContext | None = None,
        attempts: Attempts | None = None,
    ) -> "WebSocket":
        """Connects. Raises ServerLost, Timeout or ProtocolError."""
        attempts = Attempts() if attempts is None else attempts
        dialed = sock = dial(address, deadline, attempts)
        try:
            sock.settimeout(seconds_left(deadline))
            if tls is not None:
                sock = tls.wrap_socket(sock, server_hostname=address.host)
            made = cls(sock, address)
            made._upgrade(path, deadline)
            sock.settimeout(None)
            return made
        except ssl.SSLCertVerificationError as error:
            sock.close()
            raise AccessDenied(f"the scheduler at {address} is not trusted (tls_ca): {error.verify_message}") from error
        except TimeoutError as error:
            sock.close()
            raise Timeout(f"connect to the scheduler at {address}: no answer within the time allowed") from error
        except OSError as error:
            sock.close()
            raise ServerLost(f"connect to the scheduler at {address}: {why(error)}") from error
        except BaseException:
            sock.close()
            raise
        finally:
            attempts.discard(dialed)

    def _upgrade(self, path: str, deadline: float) -> None:
        key = base64.b64encode(secrets.token_bytes(16))
        host = str(self._address).removeprefix("tcp://")
        self._sock.sendall(
            f"GET {path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key.decode()}\r\n\r\n".encode()
        )
        while b"\r\n\r\n" not in self._ahead:
            if len(self._ahead) > _HEAD_BYTES_MAX:
                raise ProtocolError(f"{self._address} is no scheduler: its answer has no end")
            self._sock.settimeout(seconds_left(deadline))
            try:
                self._more()
            except ConnectionError:
                if self._ahead or isinstance(self._sock, ssl.SSLSocket):
                    raise
                raise ConnectionResetError("it hung up without a word; if it speaks TLS, tls_ca must be set") from None
        head, _, self._ahead = self._ahead.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        fields = {k.strip().lower(): v.strip() for k, _, v in (line.partition(b":") for line in lines[1:])}
        accept = base64.b64encode(hashlib.sha1(key + _MAGIC, usedforsecurity=False).digest())
        if lines[0].split()[1:2] != [b"101"] or fields.get(b"sec-websocket-accept") != accept:
            raise ProtocolError(f"{self._address} is no scheduler: expected a WebSocket, saw {lines[0][:100]!r}")

    def notice_silence(self, seconds: float) -> None:
        """From now on the connection counts as broken when the other end's kernel has said nothing for so long."""
        probe = max(1, int(seconds / 4))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))

    def detach(self) -> int:
        """The socket itself, for somebody else; this is closed then."""
        return self._sock.detach()

    def send(self, data: bytes) -> None:
        """A message. Raises OSError."""
        with self._sending:
            self._sock.sendall(frame(data))

    def receive(self, deadline: float | None = None) -> bytes:
        """The next message. Raises ConnectionError at the end, TimeoutError at the deadline."""
        data = b""
        while True:
            op, whole, part = self._frame(deadline)
            if op == _PING:
                with self._sending:
                    self._sock.sendall(frame(part, _PONG))
            elif op == _CLOSE:
                raise ClosedByScheduler("closed by the scheduler")
            elif op in (0, _BINARY):
                data += part
                if len(data) > MESSAGE_BYTES_MAX:
                    raise ConnectionResetError(f"a message above {MESSAGE_BYTES_MAX} bytes")
                if whole:
                    return data

    def _frame(self, deadline: float | None) -> tuple[int, bool, bytes]:
        first, second = self._take(2, deadline)
        size = second & 0x7F
        if size == 126:
            size = int.from_bytes(self._take(2, deadline), "big")
        elif size == 127:
            size = int.from_bytes(self._take(8, deadline), "big")
        if second & 0x80 or first & 0x70 or size > MESSAGE_BYTES_MAX:
            raise ConnectionResetError("a frame that a scheduler would not send")
        return first & 0x0F, bool(first & _WHOLE), self._take(size, deadline)

    def _take(self, size: int, deadline: float | None) -> bytes:
        while len(self._ahead) < size:
            self._sock.settimeout(None if deadline is None else seconds_left(deadline))
            self._more()
        data, self._ahead = self._ahead[:size], self._ahead[size:]
        return data

    def _more(self) -> None:
        data = self._sock.recv(1 << 18)
        if not data:
            raise ConnectionResetError("the scheduler closed the connection")
        self._ahead += data

    def close(self) -> None:
        """Breaks the connection; also wakes whoever receives. What was sent last may never be read at the other end."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Closes the file. Nobody may be receiving any more."""
        self._sock.close()
