"""S3 and S4 at the scheduler's port: strangers do not get in, and cost little."""

import contextlib
import os
import pathlib
import secrets
import socket
import statistics
import time
from collections.abc import Iterator

import pytest

import windlass as wl
from windlass._address import Address
from windlass.control import messages as m
from windlass.control.auth import ANSWER_BYTES, make_answer, make_confirm
from windlass.control.websocket import WebSocket
from windlass.testing import LocalCluster
from windlass.testing.cluster import until

SPEECH = b"GET /control HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(servers=1) as made:
        until(lambda: "has come" in made.scheduler.output(), "its server has come", 20)
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


def test_s4_strangers_cost_little_and_are_gone_within_six_seconds(cluster: LocalCluster, accurate: bool):
    connects, slow = (10_000, 500) if accurate else (2_000, 400)
    pid = cluster.scheduler.pid
    at_rest = settled(pid)
    for _ in range(300):  # what the process keeps once and for all
        knock(cluster).close()
    until(lambda: sockets(pid) <= at_rest, "they are closed", 6)
    before = rss_bytes(pid)
    for _ in range(connects):
        knock(cluster).close()
    until(lambda: sockets(pid) <= at_rest, "they are closed", 6)
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(knock(cluster)) for _ in range(slow)]
        begun = time.monotonic()
        said = 0
        held = 0  # after the first second: while many are being accepted there may be more for a moment
        while time.monotonic() - begun < 5.5 and (held == 0 or sockets(pid) > at_rest):
            for stranger in crowd:  # each says a byte now and then
                with contextlib.suppress(OSError):
                    stranger.send(SPEECH[said : said + 1])
            if time.monotonic() - begun > 1:
                held = max(held, sockets(pid) - at_rest)
            said += 1
            time.sleep(0.2)
        until(lambda: sockets(pid) <= at_rest, "all are closed", 6 - (time.monotonic() - begun))
    grown = rss_bytes(pid) - before
    print(f"{connects} connects, {slow} slow ones: {held} held at once, {grown / 2**20:.1f} MiB")
    assert held > 100
    assert held <= 256 + 8
    assert grown <= 8 << 20


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


def answers(challenge: bytes, right: bytes) -> list[bytes]:
    """What somebody without the token might try."""
    return [
        b"",
        bytes(ANSWER_BYTES),
        secrets.token_bytes(ANSWER_BYTES),
        make_answer(b"", challenge),
        make_answer(b"another", challenge),
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
