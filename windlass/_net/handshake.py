"""The first bytes of a connection: both ends prove that they know the token without sending it.

    server -> client   greeting   48 bytes: a nonce
    client -> server   hello      96 bytes: a nonce, the session to join, proof over greeting and hello
    server -> client   welcome    64 bytes: the session, proof over all three; or a refusal, which proves nothing

A welcome over TCP also names the server's side door, an abstract Unix socket for clients on the same host, where memory
can be shared.

Layouts: docs/formats/wire.md. Lengths are exact, every byte is checked, and the first wrong byte ends it. A refusal
carries no proof, so that strangers cannot test guesses of the token.
"""

import asyncio
import hmac
import secrets
import socket
from collections.abc import Callable
from typing import NamedTuple

from windlass._errors import AccessDenied, ProtocolError, ServerLost, Timeout
from windlass._net.address import Address, peer_of, seconds_left, why
from windlass._net.token import key_of

VERSION = 3
GREETING_BYTES, HELLO_BYTES, WELCOME_BYTES = 48, 96, 64
NONCE_BYTES, KEY_BYTES, DOOR_BYTES, PROOF_BYTES = 32, 16, 8, 32
NEW_SESSION = bytes(KEY_BYTES)
NO_DOOR = bytes(DOOR_BYTES)

_MAGIC = b"WINDLASS"
_GREETING_HEAD = _MAGIC + VERSION.to_bytes(2, "little") + bytes(6)
CLIENT, SERVER = 1, 2  # roles of who says hello: a client, or another server that brings a shard
_HELLO_HEADS = {role: _MAGIC + VERSION.to_bytes(2, "little") + bytes([role]) + bytes(5) for role in (CLIENT, SERVER)}
_ROLE_AT = 10
_WELCOME_HEAD = bytes(8)
_REFUSAL = b"\x01" + bytes(WELCOME_BYTES - 1)
_PROVES = {CLIENT: b"windlass client\0", SERVER: b"windlass peer\0"}
_WELCOMES = b"windlass server\0"


class Welcome(NamedTuple):
    """What a server tells a client that is let in."""

    key: bytes  #: of the session
    door: bytes  #: its side door, NO_DOOR where there is none


def side_door(door: bytes) -> Address:
    """Where the side door is."""
    return Address("unix", name=f"windlass-{door.hex()}")


class Guest(NamedTuple):
    """Who was let in by a server."""

    key: bytes  #: of the session
    role: int


class Malformed(Exception):
    """Bytes that are no part of a handshake. The text says what was expected and seen."""


class Silent(Malformed):
    """Not a byte: somebody who looked whether the port is open."""


class Denied(Exception):
    """A handshake in good form whose proof is wrong."""


# -- messages --------------------------------------------------------------------------------------------------------


def make_greeting() -> bytes:
    """The server's first message."""
    return _GREETING_HEAD + secrets.token_bytes(NONCE_BYTES)


def check_greeting(greeting: bytes) -> None:
    """Raises Malformed unless it is a server's greeting; the beginning of one is checked, too."""
    _check_head("greeting", _GREETING_HEAD, greeting)


def make_hello(token: bytes, greeting: bytes, session_key: bytes | None, role: int = CLIENT) -> bytes:
    """The client's answer. Without a session key it asks for a new session."""
    hello = _HELLO_HEADS[role] + secrets.token_bytes(NONCE_BYTES) + (session_key or NEW_SESSION)
    return hello + _proof(token, _PROVES[role], greeting, hello)


def check_hello(token: bytes, greeting: bytes, hello: bytes) -> bytes:
    """The session key that the client presents, all zeros for a new session. Raises Malformed or Denied."""
    _check_length("hello", HELLO_BYTES, hello)
    _check_hello_head(hello)
    body, proof = hello[:-PROOF_BYTES], hello[-PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, _PROVES[_role_of(hello)], greeting, body)):
        raise Denied("the client does not know the token")
    return body[-KEY_BYTES:]


def make_welcome(token: bytes, greeting: bytes, hello: bytes, session_key: bytes, door: bytes = NO_DOOR) -> bytes:
    """The server's last message to a client that is let in."""
    welcome = _WELCOME_HEAD + session_key + door
    return welcome + _proof(token, _WELCOMES, greeting, hello, welcome)


def check_welcome(token: bytes, greeting: bytes, hello: bytes, welcome: bytes) -> Welcome:
    """What it says. Raises Malformed, or Denied when refused or when the server cannot know the token."""
    _check_length("welcome", WELCOME_BYTES, welcome)
    if welcome == _REFUSAL:
        raise Denied("refused: the server has another token, or none, or is another user's")
    body, proof = welcome[:-PROOF_BYTES], welcome[-PROOF_BYTES:]
    key, door = body[8:-DOOR_BYTES], body[-DOOR_BYTES:]
    if body != _WELCOME_HEAD + key + door:
        raise Malformed(f"expected a welcome or a refusal, saw {body[:8]!r}")
    if not hmac.compare_digest(proof, _proof(token, _WELCOMES, greeting, hello, body)):
        raise Denied("the server does not know the token")
    asked = hello[-PROOF_BYTES - KEY_BYTES : -PROOF_BYTES]
    if key == NEW_SESSION or asked not in (NEW_SESSION, key):
        raise Malformed("the server answered with another session than was asked for")
    return Welcome(key, door)


def _proof(token: bytes, role: bytes, *messages: bytes) -> bytes:
    return hmac.digest(key_of(token), role + b"".join(messages), "sha256")


def _check_hello_head(hello: bytes) -> None:
    """As below, for either role."""
    _check_head("hello", _HELLO_HEADS[_role_of(hello)], hello)


def _role_of(hello: bytes) -> int:
    """SERVER if the hello says so; any other hello is a client's."""
    return SERVER if hello[_ROLE_AT : _ROLE_AT + 1] == bytes([SERVER]) else CLIENT


def _check_length(what: str, expected: int, seen: bytes) -> None:
    if len(seen) != expected:
        raise Malformed(f"expected a {what} of {expected} bytes, saw {len(seen)}")


def _check_head(what: str, head: bytes, message: bytes) -> None:
    """Checks the bytes that have come so far, so that nobody waits for a stranger of another protocol."""
    seen = message[: len(head)]
    if head.startswith(seen):
        return
    if seen.startswith(_MAGIC) and len(seen) == len(head) and seen[8:10] != head[8:10]:
        version = int.from_bytes(seen[8:10], "little")
        raise Malformed(f"expected version {VERSION} of the wire, saw a {what} of version {version}")
    raise Malformed(f"expected a Windlass {what}, saw {seen!r}")


# -- the client's end ------------------------------------------------------------------------------------------------


def greet(
    sock: socket.socket, token: bytes, session_key: bytes | None, deadline: float, *, role: int = CLIENT
) -> Welcome:
    """Shakes hands over a blocking socket and returns what the server said. The socket stays the caller's.

    token: empty where there is none. session_key: of the session to join (None: a new one). deadline: a time of
    ``time.monotonic()``. role: CLIENT, or SERVER for a server that brings a shard.
    """
    what, phase, timeout = f"handshake with {peer_of(sock)}", "greeting", sock.gettimeout()
    try:
        greeting = _read(sock, GREETING_BYTES, deadline, check_greeting)
        phase = "welcome"
        hello = make_hello(token, greeting, session_key, role)
        sock.settimeout(seconds_left(deadline))
        sock.sendall(hello)
        return check_welcome(token, greeting, hello, _read(sock, WELCOME_BYTES, deadline))
    except Malformed as error:
        raise ProtocolError(f"{what}: {error}") from error
    except Denied as error:
        raise AccessDenied(f"{what}: {error}") from error
    except TimeoutError as error:
        raise Timeout(f"{what}: no {phase} within the time allowed") from error
    except OSError as error:
        raise ServerLost(f"{what}: waited for the {phase}, but {why(error)}") from error
    finally:
        sock.settimeout(timeout)


def _read(sock: socket.socket, size: int, deadline: float, check: Callable[[bytes], None] | None = None) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(seconds_left(deadline))
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionError(f"the server closed the connection after {len(data)} of {size} bytes")
        data += more
        if check is not None:
            check(data)
    return data


# -- the server's end ------------------------------------------------------------------------------------------------


async def receive(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, token: bytes, *, admit: bool = True, door: bytes = NO_DOOR
) -> Guest:
    """Shakes hands over a non-blocking socket and returns who was let in. Raises Malformed, Denied or OSError.

    admit: False refuses whoever it is, however good the proof. door: what the client is told of a side door. How long
    it takes is for the caller to limit.
    """
    greeting = make_greeting()
    hello = b""
    try:
        await loop.sock_sendall(sock, greeting)
        while len(hello) < HELLO_BYTES:
            # Asks for one byte too many: a client may send nothing more before the welcome.
            more = await loop.sock_recv(sock, HELLO_BYTES + 1 - len(hello))
            if not more:
                raise ConnectionError(f"the client closed the connection after {len(hello)} of {HELLO_BYTES} bytes")
            hello += more
            _check_hello_head(hello)
    except OSError as error:  # a probe that hangs up at once resets the connection, for it has not read the greeting
        raise (Malformed if hello else Silent)(why(error)) from error
    try:
        key = check_hello(token, greeting, hello)
        if not admit:
            raise Denied("the client is another user's")
    except Denied:
        await loop.sock_sendall(sock, _REFUSAL)
        raise
    if key == NEW_SESSION:
        key = secrets.token_bytes(KEY_BYTES)
    await loop.sock_sendall(sock, make_welcome(token, greeting, hello, key, door))
    return Guest(key, _role_of(hello))
