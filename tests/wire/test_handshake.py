"""The handshake: its bytes, its errors, and S3: only holders of the token get in."""

import contextlib
import hashlib
import hmac
import itertools
import pathlib
import random
import secrets
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from helpers import PATIENCE_S
from strangers import door, enter, knock, process, read_to_end

from windlass import AccessDenied, InvalidArgument, ProtocolError, ServerLost, Timeout, WindlassError
from windlass._net import handshake
from windlass._net.address import Address
from windlass._net.handshake import (
    Denied,
    Malformed,
    check_hello,
    check_welcome,
    greet,
    make_greeting,
    make_hello,
    make_welcome,
)
from windlass._net.token import own_token_file, read_token
from windlass._settings import load, token_of

TOKEN = b"correct horse battery staple"
KEY = bytes(range(1, 17))


# -- the bytes -------------------------------------------------------------------------------------------------------


def test_the_messages_are_those_of_the_document(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(secrets, "token_bytes", lambda n: bytes(range(100, 100 + n)))
    nonce, key = bytes(range(100, 132)), hashlib.sha256(TOKEN).digest()
    greeting = b"WINDLASS" + b"\x03\x00" + bytes(6) + nonce
    hello = b"WINDLASS" + b"\x03\x00" + b"\x01" + bytes(5) + nonce + KEY
    hello += hmac.new(key, b"windlass client\0" + greeting + hello, hashlib.sha256).digest()
    welcome = b"\x00" + bytes(7) + KEY + bytes(8)
    welcome += hmac.new(key, b"windlass server\0" + greeting + hello + welcome, hashlib.sha256).digest()
    assert (len(greeting), len(hello), len(welcome)) == (48, 96, 64)
    assert make_greeting() == greeting
    assert make_hello(TOKEN, greeting, KEY) == hello
    assert check_hello(TOKEN, greeting, hello) == KEY
    assert make_welcome(TOKEN, greeting, hello, KEY) == welcome
    assert check_welcome(TOKEN, greeting, hello, welcome) == (KEY, bytes(8))
    brings = b"WINDLASS" + b"\x03\x00" + b"\x02" + bytes(5) + nonce + KEY
    brings += hmac.new(key, b"windlass peer\0" + greeting + brings, hashlib.sha256).digest()
    assert make_hello(TOKEN, greeting, KEY, role=2) == brings
    assert check_hello(TOKEN, greeting, brings) == KEY


@pytest.mark.parametrize("token", [TOKEN, None])
def test_a_client_gets_a_new_session_and_joins_it_again(token: bytes | None):
    unix = Address("unix", name=f"windlass-test-{secrets.token_hex(8)}")
    with door(token, Address.parse("127.0.0.1:0"), unix) as (addresses, host):
        keys = [enter(address, token or b"") for address in addresses]
        assert [enter(address, token or b"", key) for address, key in zip(addresses, keys, strict=True)] == keys
    assert len({*keys, bytes(16)}) == 3
    assert Counter(key for _, key in host.adopted) == dict.fromkeys(keys, 2)
    assert host.adopted[0][0].startswith("tcp://127.0.0.1:")
    assert host.adopted[1][0].startswith(f"{unix} (process ")


def test_a_server_that_brings_a_shard_is_no_client():
    with door(TOKEN) as (addresses, host):
        deadline = time.monotonic() + 5
        with knock(addresses[0]) as sock:
            greet(sock, TOKEN, None, deadline, role=2)
            assert sock.recv(4)[:4] == b"WLSA"  # the stand-in takes no shards
    assert host.adopted == []


# -- S3: only holders of the token get in ----------------------------------------------------------------------------

Attack = Callable[[bytes], bytes]  # from the server's greeting to what is said in place of a hello


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def attacks(seed: int) -> Iterator[tuple[str, Attack]]:
    """Hellos that must not be believed, without end. Where that shows more, the attacker may use the token."""
    rng = random.Random(seed)
    old = make_greeting()
    old_hello = make_hello(TOKEN, old, None)
    old_welcome = make_welcome(TOKEN, old, old_hello, KEY)
    near = [TOKEN[:-1], TOKEN + b"x", TOKEN.upper(), TOKEN[::-1], hashlib.sha256(TOKEN).digest(), TOKEN + b"\n"]
    near += [TOKEN + b"\0", TOKEN.ljust(64, b"\0")]  # the same key to HMAC as it is

    def right(greeting: bytes) -> bytes:
        return make_hello(TOKEN, greeting, rng.choice([None, KEY]))

    def proved(greeting: bytes, body: bytes, role: bytes = b"windlass client\0") -> bytes:
        return body + handshake._proof(TOKEN, role, greeting, body)

    def with_role(hello: bytes, role: int) -> bytes:
        return hello[:10] + bytes([role]) + hello[11:64]

    for i in itertools.count():
        yield "none", lambda g: right(g)[:64] + bytes(32)
        yield "guessed", lambda g: right(g)[:64] + rng.randbytes(32)
        yield "tokenless", lambda g: make_hello(b"", g, None)
        yield "wrong", lambda g: make_hello(rng.randbytes(rng.randrange(1, 64)), g, None)
        yield "near", lambda g, i=i: make_hello(flipped(TOKEN, i % 224) if i % 2 else near[i // 2 % len(near)], g, None)
        yield "replayed", lambda g: old_hello
        yield "replayed proof", lambda g: right(g)[:64] + old_hello[-32:]
        yield "reflected proof", lambda g: right(g)[:64] + old_welcome[-32:]
        yield "reflected greeting", lambda g: g + right(g)[48:]
        yield "server's proof", lambda g: proved(g, right(g)[:64], handshake._WELCOMES)
        yield "peer's proof", lambda g: proved(g, right(g)[:64], b"windlass peer\0")
        yield "client's proof as a peer", lambda g: proved(g, with_role(right(g), 2))
        yield "server's role", lambda g, i=i: proved(g, with_role(right(g), i % 255 + 2 if i % 255 < 254 else 0))
        yield "truncated", lambda g, i=i: right(g)[: i % 96]
        yield "truncated and proved", lambda g, i=i: proved(g, right(g)[: 16 + i % 48])
        yield "over-long", lambda g, i=i: right(g) + bytes(1 + i % 64)
        yield "over-long and proved", lambda g, i=i: proved(g, right(g)[:64] + bytes(1 + i % 64))
        yield "bit-flipped", lambda g, i=i: flipped(right(g), i % 768)
        yield "noise", lambda g: rng.randbytes(96)


ATTACKS = 19


def tried_on_the_function(count: int, seed: int) -> tuple[Counter[str], Counter[str]]:
    """S3's check, in bulk: how many of each attack were tried, and how many of them were accepted."""
    tried: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for kind, attack in itertools.islice(attacks(seed), count):
        greeting = make_greeting()
        tried[kind] += 1
        with contextlib.suppress(Malformed, Denied):
            check_hello(TOKEN, greeting, attack(greeting))
            accepted[kind] += 1
    return tried, accepted


def answer_to(attack: Attack, address: Address) -> bytes:
    """What the server at the address says to it before it hangs up."""
    with knock(address) as sock:
        sock.sendall(attack(sock.recv(48, socket.MSG_WAITALL)))
        with contextlib.suppress(OSError):  # it may have hung up already
            sock.shutdown(socket.SHUT_WR)  # or it would wait for more
        return read_to_end(sock)


def tried_on_the_door(count: int, seed: int) -> tuple[Counter[str], Counter[str]]:
    """S3's check over real sockets; a connection counts as accepted when it is welcomed or handed over."""
    tried: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    with door(TOKEN) as ([address], host):
        for kind, attack in itertools.islice(attacks(seed), count):
            tried[kind] += 1
            handed_over = len(host.adopted)
            answer = answer_to(attack, address)
            assert answer[:1] in (b"", b"\0", b"\1")
            accepted[kind] += answer[:1] == b"\0" or len(host.adopted) > handed_over
        assert enter(address, TOKEN)  # the door still opens, so it was not closed to all
    return tried, +accepted


def test_s3_many_thousand_strangers_are_all_refused(accurate: bool):
    seed = random.randrange(2**32)
    print("seed", seed)
    count = ATTACKS * (10_000 if accurate else 1000)
    tried, accepted = tried_on_the_function(count, seed)
    print(tried)
    assert min(tried.values()) == count // ATTACKS
    assert len(tried) == ATTACKS
    assert accepted.total() == 0, accepted


def test_s3_strangers_at_the_door_are_all_refused(accurate: bool):
    seed = random.randrange(2**32)
    print("seed", seed)
    tried, accepted = tried_on_the_door(ATTACKS * (768 if accurate else 36), seed)
    assert min(tried.values()) >= 36
    assert accepted.total() == 0, accepted


PROOF_OFF = {"none", "guessed", "tokenless", "wrong", "near", "replayed", "replayed proof", "server's proof"}
BROKEN = {
    "any proof is right": (hmac, "compare_digest", lambda a, b: True, PROOF_OFF),
    "nonces repeat": (secrets, "token_bytes", lambda n: b"n" * n, {"replayed", "replayed proof"}),
    "both roles prove alike": (handshake, "_WELCOMES", b"windlass client\0", {"server's proof"}),
    "peers prove like clients": (handshake, "_PROVES", [b"windlass client\0"] * 3, {"client's proof as a peer"}),
    "lengths are not checked": (handshake, "_check_length", lambda *_: None, {"over-long and proved"}),
    "a token is a key as it is": (handshake, "key_of", lambda token: token, {"near"}),
    "heads are not checked": (handshake, "_check_head", lambda *_: None, {"server's role"}),
}


@pytest.mark.parametrize("switch", BROKEN)
def test_s3_turns_red_when_its_mechanism_is_off(switch: str, monkeypatch: pytest.MonkeyPatch):
    where, name, instead, shown_by = BROKEN[switch]
    monkeypatch.setattr(where, name, instead)
    _, accepted = tried_on_the_function(ATTACKS * 20, seed=1)
    assert shown_by <= set(accepted)


def test_s3_turns_red_at_the_door_when_any_proof_is_right(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: True)
    _, accepted = tried_on_the_door(ATTACKS * 20, seed=1)
    assert set(accepted) >= PROOF_OFF


def impostors(token: bytes) -> dict[str, Callable[[bytes, bytes], bytes]]:
    """Welcomes of servers that do not know the token, from greeting and hello."""
    old = make_greeting()
    old_hello = make_hello(token, old, None)
    old_welcome = make_welcome(token, old, old_hello, KEY)
    return {
        "none": lambda g, h: bytes(8) + KEY + bytes(40),
        "tokenless": lambda g, h: make_welcome(b"", g, h, KEY),
        "wrong": lambda g, h: make_welcome(secrets.token_bytes(16), g, h, KEY),
        "replayed": lambda g, h: old_welcome,
        "reflected": lambda g, h: bytes(8) + KEY + bytes(8) + h[-32:],
        "refused": lambda g, h: b"\x01" + bytes(63),
    }


def believed(count: int) -> int:
    """S3's check from the client's side: how many impostors were believed."""
    total = 0
    for _, (_, answer) in zip(range(count), itertools.cycle(impostors(TOKEN).items()), strict=False):
        greeting = make_greeting()
        hello = make_hello(TOKEN, greeting, None)
        with contextlib.suppress(Denied):
            check_welcome(TOKEN, greeting, hello, answer(greeting, hello))
            total += 1
    return total


def test_s3_a_client_believes_no_server_that_does_not_know_the_token():
    assert believed(6000) == 0


def test_s3_turns_red_when_a_client_believes_any_proof(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: True)
    assert believed(6000) == 5000


def test_a_refusal_gives_strangers_nothing_made_with_the_token():
    with door(TOKEN) as ([address], _):
        assert answer_to(lambda greeting: make_hello(b"wrong", greeting, None), address) == b"\x01" + bytes(63)


# -- the token stays where it is -------------------------------------------------------------------------------------


def test_s3_the_token_is_in_no_argument_output_log_or_error(tmp_path: pathlib.Path):
    file = tmp_path / "token"
    file.write_bytes(TOKEN + b"\n")
    loud = "import logging\nlogging.basicConfig(level=logging.DEBUG)"
    for given, env in ((["--token-file", str(file)], {}), ([], {"WINDLASS_TOKEN": TOKEN.decode()})):
        with process(tmp_path, *given, prelude=loud, **env) as server:
            [address] = server.addresses
            for _, attack in itertools.islice(attacks(1), ATTACKS * 2):
                answer_to(attack, address)
            assert enter(address, TOKEN)
            seen = pathlib.Path(f"/proc/{server.pid}/cmdline").read_bytes()
            output, _ = server.popen.communicate(timeout=PATIENCE_S)
            log = server.log.read_bytes()
            assert b"handshake with tcp://127.0.0.1:" in log
            assert b"does not know the token" in log
            assert TOKEN not in seen + output.encode() + log


def test_s3_a_server_that_crashes_shows_no_token(tmp_path: pathlib.Path):
    crash = (
        "from windlass._net import serve\n"
        "def run(self):\n    token = self._token\n    raise RuntimeError('a bug')\n"
        "serve.Doorman.run = run"
    )
    with process(tmp_path, prelude=crash, WINDLASS_TOKEN=TOKEN.decode()) as server:
        server.popen.wait(PATIENCE_S)
        log = server.log.read_text()
    assert "a bug" in log
    assert TOKEN.decode() not in log


# -- what a client is told -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def odd_server(*says: bytes, close: bool = True) -> Iterator[Address]:
    """Says these things, each but the first after it has heard something, and hangs up or stays silent."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as sock:
                for i, word in enumerate(says):
                    if i:
                        sock.recv(4096)
                    sock.sendall(word)
                if not close:
                    read_to_end(sock)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Address.of(listener.getsockname())
        thread.join(5)
    assert not thread.is_alive()


def refusal(address: Address, token: bytes = TOKEN, seconds: float = 5.0) -> WindlassError:
    with pytest.raises(WindlassError) as error:
        enter(address, token, seconds=seconds)
    assert str(error.value).startswith(f"handshake with {address}: ")
    assert TOKEN.decode() not in "".join(traceback.format_exception(error.value))
    return error.value


HEAD = b"WINDLASS\x03\x00" + bytes(6)
GREETING = HEAD + bytes(32)


@pytest.mark.parametrize(
    ("says", "error", "text"),
    [
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], ProtocolError, "expected a Windlass greeting, saw b'SSH-2.0-"),
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100)], ProtocolError, "expected a Windlass greeting"),
        (
            [b"WINDLASS\x01\x00" + bytes(38)],
            ProtocolError,
            "expected version 3 of the wire, saw a greeting of version 1",
        ),
        ([HEAD[:-1] + b"\x01" + bytes(32)], ProtocolError, "expected a Windlass greeting"),
        ([b""], ServerLost, "waited for the greeting, but the server closed the connection after 0 of 48 bytes"),
        ([GREETING[:-1]], ServerLost, "after 47 of 48 bytes"),
        ([GREETING, b""], ServerLost, "waited for the welcome, but the server closed the connection after 0 of 64"),
        ([GREETING, bytes(63)], ServerLost, "after 63 of 64 bytes"),
        ([GREETING, bytes(64)], AccessDenied, "the server does not know the token"),
        ([GREETING, b"\x01" + bytes(63)], AccessDenied, "refused"),
        ([GREETING, b"\x02" + bytes(63)], ProtocolError, "expected a welcome or a refusal"),
        ([GREETING, b"\x01" + bytes(62) + b"\x01"], ProtocolError, "expected a welcome or a refusal"),
    ],
)
def test_a_client_is_told_what_is_wrong_with_a_server(says: list[bytes], error: type[WindlassError], text: str):
    with odd_server(*says) as address:
        seen = refusal(address)
    assert type(seen) is error
    assert text in str(seen)


@pytest.mark.parametrize(
    ("says", "phase", "seconds"),  # with room for what it does say
    [([b""], "greeting", 0.3), ([HEAD], "greeting", 0.3), ([GREETING], "welcome", 3.0)],
)
def test_a_silent_server_is_waited_for_until_the_deadline_only(says: list[bytes], phase: str, seconds: float):
    with odd_server(*says, close=False) as address:
        start = time.monotonic()
        error = refusal(address, seconds=seconds)
    assert isinstance(error, Timeout)
    assert f"no {phase} within the time allowed" in str(error)
    assert time.monotonic() - start < seconds + 2


@pytest.mark.parametrize(("server", "client"), [(TOKEN, b""), (TOKEN, b"another"), (None, TOKEN)])
def test_both_ends_need_the_same_token(server: bytes | None, client: bytes):
    with door(server) as ([address], host):
        assert isinstance(refusal(address, client), AccessDenied)
    assert host.adopted == []


def test_a_server_cannot_put_a_client_into_another_session():
    greeting = make_greeting()
    hello = make_hello(TOKEN, greeting, KEY)
    for key in (bytes(16), KEY[::-1]):
        with pytest.raises(Malformed, match="another session"):
            check_welcome(TOKEN, greeting, hello, make_welcome(TOKEN, greeting, hello, key))


def test_greeting_leaves_the_socket_as_it_was():
    with door(TOKEN) as ([address], _), knock(address) as sock:
        sock.settimeout(17.0)
        greet(sock, TOKEN, None, time.monotonic() + 5)
        assert sock.gettimeout() == 17.0


# -- where tokens come from ------------------------------------------------------------------------------------------


def test_a_token_comes_from_the_flags_file_else_the_environment_else_another_file_else_it_is_the_users_own(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    for name in ("one", "another"):
        (tmp_path / name).write_bytes(f"  in {name} file\r\n".encode())
    monkeypatch.delenv("WINDLASS_TOKEN", raising=False)
    own = token_of(load())
    assert own is not None
    assert own_token_file().read_bytes() == own + b"\n"
    assert token_of(load()) == own
    monkeypatch.setenv("WINDLASS_TOKEN_FILE", str(tmp_path / "one"))
    assert token_of(load()) == b"in one file"
    monkeypatch.setenv("WINDLASS_TOKEN", "in the environment\n")
    assert token_of(load()) == b"in the environment"
    assert token_of(load({"token_file": tmp_path / "another"})) == b"in another file"
    with pytest.raises(InvalidArgument, match=r"no_token \(flag\): expected no token, but one is given, too"):
        token_of(load({"no_token": True}))
    monkeypatch.delenv("WINDLASS_TOKEN")
    monkeypatch.delenv("WINDLASS_TOKEN_FILE")
    assert token_of(load({"no_token": True})) is None


@pytest.mark.parametrize("content", [b"", b" \n", b"\0", b"secret\0secret", b"s" * 5000])
def test_a_token_that_protects_nothing_is_refused_without_showing_it(content: bytes, tmp_path: pathlib.Path):
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(InvalidArgument, match=f"^token file {file}: a token ") as error:
        read_token(file)
    assert "sss" not in str(error.value)
    assert "secret" not in str(error.value)


def test_a_token_file_that_is_not_there_is_named(tmp_path: pathlib.Path):
    with pytest.raises(InvalidArgument, match="no-file: No such file or directory"):
        read_token(tmp_path / "no-file")


def test_an_empty_token_in_the_environment_is_a_mistake(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WINDLASS_TOKEN", "")
    with pytest.raises(InvalidArgument, match="WINDLASS_TOKEN"):
        token_of(load())
