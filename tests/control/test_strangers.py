"""S3 and S4 at the scheduler's port: strangers do not get in, and cost little."""

import contextlib
import dataclasses
import os
import pathlib
import secrets
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass._net.address import Address
from windlass.control import messages as m
from windlass.control.auth import ANSWER_BYTES, make_answer, make_confirm
from windlass.control.websocket import WebSocket
from windlass.testing import LocalCluster
from windlass.testing.cluster import until

MIB = 1 << 20
SPEECH = b"GET /control HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
UPGRADE = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
TLS_SPEECH = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)  # the beginning of a client's hello


@contextlib.contextmanager
def up(**arguments: Any) -> Iterator[LocalCluster]:
    """A scheduler with a server."""
    with LocalCluster(servers=1, **arguments) as made:
        until(lambda: "has come" in made.scheduler.output(), "its server has come", PATIENCE_S)
        yield made


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with up() as made:
        yield made


def rss_bytes(pid: int) -> int:
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def sockets(pid: int) -> int:
    count = 0
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(fd).startswith("socket:")
    return count


def settled(pid: int) -> int:
    """Its sockets, when no more of them are closed."""
    last, since = sockets(pid), time.monotonic()
    while time.monotonic() - since < 0.5:
        time.sleep(0.02)
        if (now := sockets(pid)) != last:
            last, since = now, time.monotonic()
    return last


def knock(cluster: LocalCluster) -> socket.socket:
    address = Address.parse(cluster.address)
    return socket.create_connection((address.host, address.port), timeout=10)


@dataclasses.dataclass
class Cost:
    """What strangers cost a scheduler."""

    grown_bytes: int = 0
    held: int = 0  # sockets at once, after the first second: while many are being accepted there may be more
    left_open: int = 0  # after 6 seconds

    def too_high(self) -> list[str]:
        """The parts of S4 that do not hold."""
        bounds = [
            ("memory", self.grown_bytes <= 8 * MIB),
            ("sockets", self.held <= 256 + 8),
            ("left open", self.left_open == 0),
        ]
        return [what for what, holds in bounds if not holds]


def cost_of_strangers(cluster: LocalCluster, connects: int, slow: int, wordy: int, speech: bytes = SPEECH) -> Cost:
    """S4's check: many who connect and leave, some who speak slowly, and some who say a lot before any proof."""
    pid, cost = cluster.scheduler.pid, Cost()
    at_rest = settled(pid)
    for _ in range(300):  # what the process keeps once and for all
        knock(cluster).close()
    until(lambda: sockets(pid) <= at_rest, "they are closed", PATIENCE_S)
    before = rss_bytes(pid)

    def look() -> None:
        cost.grown_bytes = max(cost.grown_bytes, rss_bytes(pid) - before)

    for _ in range(connects):
        knock(cluster).close()
    until(lambda: sockets(pid) <= at_rest, "they are closed", PATIENCE_S)
    for i in range(wordy):
        say_a_lot(cluster, "/control" if i % 2 else "/heartbeat", look)
    look()
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(knock(cluster)) for _ in range(slow)]
        for stranger in crowd[::2] if speech is SPEECH else []:
            stranger.sendall(SPEECH + UPGRADE)  # and then nothing, where a proof is expected
        begun = time.monotonic()
        said = 0
        while (seconds := time.monotonic() - begun) < 6 and (seconds < 1.5 or sockets(pid) > at_rest):
            for stranger in crowd[1::2]:  # each says a byte now and then
                with contextlib.suppress(OSError):
                    stranger.send(speech[said : said + 1])
            if seconds > 1:
                cost.held = max(cost.held, sockets(pid) - at_rest)
            said += 1
            time.sleep(0.2)
        look()
        cost.left_open = max(0, sockets(pid) - at_rest)
    return cost


def say_a_lot(cluster: LocalCluster, path: str, look: Callable[[], None]) -> int:
    """A message without an end, before any proof; how much of it was taken."""
    ws = WebSocket.open(Address.parse(cluster.address), path, time.monotonic() + PATIENCE_S)
    said = 0
    ws._sock.settimeout(PATIENCE_S)
    with contextlib.suppress(OSError):
        ws.receive(time.monotonic() + PATIENCE_S)
        ws._sock.sendall(b"\x82\xff" + (m.MESSAGE_BYTES_MAX - 1).to_bytes(8, "big") + bytes(4))
        while said < 24 * MIB:
            ws._sock.sendall(bytes(MIB))
            said += MIB
            look()
    ws.end()
    return said


def test_s4_strangers_cost_little_and_are_gone_within_six_seconds(cluster: LocalCluster, accurate: bool):
    connects, slow, wordy = (10_000, 500, 500) if accurate else (2_000, 400, 50)
    cost = cost_of_strangers(cluster, connects, slow, wordy)
    print(f"{connects} connects, {slow} slow ones, {wordy} wordy ones: {cost}")
    assert cost.held > 100
    assert cost.too_high() == []


@pytest.mark.parametrize(
    ("switch", "slow", "wordy", "red"),
    [
        ("STRANGER_SECONDS = 1e9", 20, 0, "left open"),
        ("STRANGERS_MAX = 10**9", 400, 0, "sockets"),
        ("HEAD_BYTES_MAX = PROOF_BYTES_MAX = 10**9", 0, 3, "memory"),
    ],
)
def test_s4_turns_red_when_its_mechanism_is_off(switch: str, slow: int, wordy: int, red: str):
    switch = switch.replace("PROOF", "door.PROOF")
    with up(prelude=f"from windlass.control import door\ndoor.{switch}") as flawed:
        assert red in cost_of_strangers(flawed, 0, slow, wordy).too_high()


@pytest.mark.parametrize("path", ["/control", "/heartbeat"])
def test_s4_before_the_proof_a_message_has_at_most_four_kibibytes(cluster: LocalCluster, path: str):
    for size in (ANSWER_BYTES, 4000, 4097, 16_000, 1 << 20):
        ws = WebSocket.open(Address.parse(cluster.address), path, time.monotonic() + PATIENCE_S)
        ws.receive(time.monotonic() + PATIENCE_S)
        taken = False
        with contextlib.suppress(OSError):
            ws.send(bytes(size))
            taken = ws.receive(time.monotonic() + PATIENCE_S) == b""  # read, and refused
        ws.end()
        assert taken == (size <= 4096)


def test_s4_a_request_without_an_end_is_cut_off(cluster: LocalCluster):
    with knock(cluster) as stranger:
        stranger.sendall(b"GET /control HTTP/1.1\r\n")
        with contextlib.suppress(OSError):
            for i in range(10_000):
                stranger.sendall(f"X-{i}: {'x' * 1000}\r\n".encode())
            pytest.fail("all of it was taken")


def test_s4_strangers_at_a_port_with_tls_are_as_few_and_as_short_lived(certificate: pathlib.Path):
    cert = certificate / "cert.pem"
    with up(tls_cert=cert, tls_ca=cert, tls_key=certificate / "key.pem") as secure:
        cost = cost_of_strangers(secure, 100, 400, 0, TLS_SPEECH)
        print(cost)
        assert 20 < cost.held <= 32 + 8
        assert cost.left_open == 0
        assert cost.grown_bytes <= 32 * MIB  # what TLS itself takes is beyond the 8 MiB of a port without it


def test_s4_members_are_served_while_strangers_come(cluster: LocalCluster):
    with cluster.connect(app="work") as worker:

        def opens() -> float:
            took = []
            for i in range(60):
                begun = time.monotonic()
                worker.tensor(f"w{i % 5}", 10, rule=wl.Sum())
                took.append(time.monotonic() - begun)
            return statistics.quantiles(took, n=20)[-1]

        opens()
        with contextlib.ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(knock(cluster)).send(SPEECH)
            assert opens() < 1.0
        assert len(cluster.members("worker")) == 1


def test_s4_strangers_do_not_fill_the_log(cluster: LocalCluster):
    begun = time.monotonic()
    for _ in range(300):
        ws = WebSocket.open(Address.parse(cluster.address), "/control", time.monotonic() + PATIENCE_S)
        ws.receive(time.monotonic() + PATIENCE_S)
        ws.send(bytes(ANSWER_BYTES))
        assert ws.receive(time.monotonic() + PATIENCE_S) == b""
        ws.end()
    windows = int((time.monotonic() - begun) / 10) + 2
    assert cluster.scheduler.output().count("it does not know the token") <= 20 * windows


def answers(challenge: bytes, right: bytes) -> list[bytes]:
    """What somebody without the token might try."""
    return [
        b"",
        bytes(ANSWER_BYTES),
        secrets.token_bytes(ANSWER_BYTES),
        make_answer(b"", challenge),
        make_answer(b"another", challenge),
        make_answer(b"a token of tests\0", challenge),  # to HMAC as it is the same key
        make_answer(b"a token of tests".ljust(64, b"\0"), challenge),
        challenge + challenge,
        right[:-1],
        right + b"\0",
        right,  # of another connection: a replay
        right[:32] + make_confirm(b"", challenge, right),
    ]


def test_s3_only_those_who_know_the_token_get_in(cluster: LocalCluster):
    address, tried = Address.parse(cluster.address), 0
    first = WebSocket.open(address, "/control", time.monotonic() + 5)
    right = make_answer(cluster.token.encode(), first.receive(time.monotonic() + 5))
    first.send(right)
    assert first.receive(time.monotonic() + 5)
    members = len(cluster.status()["members"])
    for path in ("/control", "/heartbeat"):
        for which in range(len(answers(bytes(32), right))):
            ws = WebSocket.open(address, path, time.monotonic() + 5)
            ws.send(answers(ws.receive(time.monotonic() + 5), right)[which])
            assert ws.receive(time.monotonic() + 5) == b""
            with contextlib.suppress(OSError):
                ws.send(m.encode(m.Join("operator", 5)))
            with pytest.raises(ConnectionError):
                ws.receive(time.monotonic() + 5)
            ws.end()
            tried += 1
    first.end()
    print(f"{tried} tried")
    assert len(cluster.status()["members"]) == members
    assert cluster.token not in cluster.scheduler.output()


@pytest.mark.parametrize(
    "speech", [b"\x16\x03\x01\x02\x00\x01", b"\0" * 100, b"SSH-2.0-x\r\n", b"GET / HTTP/9.9\r\n\r\n"]
)
def test_another_protocol_is_answered_or_closed_at_once(cluster: LocalCluster, speech: bytes):
    with knock(cluster) as stranger:
        stranger.sendall(speech)
        stranger.settimeout(6)
        with contextlib.suppress(ConnectionError):
            while stranger.recv(4096):
                pass
    assert cluster.status()["servers_expected"] == 1
