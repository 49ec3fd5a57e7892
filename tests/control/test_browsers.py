"""Web pages do not command a scheduler, whether it has a token or not."""

import contextlib
import http.client
import pathlib
import sys
import time
from collections.abc import Iterator

import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass._net.address import Address
from windlass.control.browsers import complaint
from windlass.control.websocket import WebSocket
from windlass.testing.cluster import Process, until

UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}
#: What a browser adds to the requests of other sites' pages; PORT is the scheduler's.
PAGES = [
    {"Origin": "https://elsewhere.example"},
    {"Origin": "https://elsewhere.example:PORT"},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]
#: Names that a page's site may have given our address.
REBOUND = [
    "elsewhere.example:PORT",
    "elsewhere.example",
    "127.0.0.1.elsewhere.example:PORT",
    "localhost.example",
    "",
    "[",
]
PATHS = ["/control", "/heartbeat", "/api/v1/status", "/metrics", "/healthz"]


#: The same command, with the mechanism switched off.
BELIEVING = """
import sys
from windlass.control import browsers
browsers.complaint = lambda headers, any_name: ""
from windlass._cli import main
main()
"""


@contextlib.contextmanager
def scheduler(
    folder: pathlib.Path, *arguments: str, command: tuple[str, ...] = (sys.executable, "-m", "windlass")
) -> Iterator[Address]:
    """Where it listens, on loopback."""
    file = folder / "address"
    process = Process([*command, "scheduler", "--linger", "--address-file", str(file), *arguments], {})
    try:
        until(lambda: file.exists() or process.process.poll() is not None, "it listens", PATIENCE_S)
        assert file.exists(), process.output()
        yield Address.parse(file.read_text().strip())
    finally:
        process.close()
        file.unlink(missing_ok=True)


def code(address: Address, path: str, headers: dict[str, str]) -> int:
    """What the scheduler answers to a GET; 101 is a WebSocket that is open."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=PATIENCE_S)
    host = f"{address.host}:{address.port}"
    more = UPGRADE if path in ("/control", "/heartbeat") else {}
    try:
        connection.putrequest("GET", path, skip_host=True)
        for name, value in {"Host": host, **more, **headers}.items():
            connection.putheader(name, value.replace("PORT", str(address.port)))
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()


def let_in(address: Address) -> list[tuple[str, dict[str, str]]]:
    """The check: which requests of pages are not refused, and by which path."""
    pages = [*PAGES, *({"Host": name} for name in REBOUND)]
    tried = [(path, page, code(address, path, page)) for path in PATHS for page in pages]
    found = [(path, page) for path, page, answer in tried if answer not in (400, 403)]
    print(f"{len(tried)} requests of pages, {len(found)} let in")
    return found


def test_a_scheduler_that_believes_browsers_is_noticed(tmp_path: pathlib.Path):
    with scheduler(tmp_path, "--no-token", command=(sys.executable, "-c", BELIEVING)) as address:
        assert {path for path, _ in let_in(address)} == set(PATHS)


def test_pages_of_other_sites_reach_nothing(tmp_path: pathlib.Path):
    with scheduler(tmp_path, "--no-token") as address:
        answers = {path: code(address, path, {}) for path in PATHS}
        assert answers == {path: 101 if path in ("/control", "/heartbeat") else 200 for path in PATHS}
        assert let_in(address) == []
        for own in ({"Sec-Fetch-Site": "none"}, {"Origin": "http://127.0.0.1:PORT"}, {"Host": "localhost:PORT"}):
            assert code(address, "/api/v1/status", own) == 200


def test_a_scheduler_with_a_token_goes_by_any_name_and_refuses_pages_all_the_same(tmp_path: pathlib.Path):
    with scheduler(tmp_path) as address:
        assert {code(address, path, page) for path in PATHS for page in PAGES} == {403}
        assert code(address, "/control", {"Host": "scheduler.training.svc:PORT"}) == 101
        assert code(address, "/api/v1/status", {"Host": "scheduler.training.svc:PORT"}) == 401


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_members_reach_a_scheduler_without_a_token_by_every_name_of_loopback(tmp_path: pathlib.Path, host: str):
    listen = "tcp://[::1]:0" if host == "[::1]" else "tcp://127.0.0.1:0"
    with scheduler(tmp_path, "--no-token", "--listen", listen) as address:
        named = Address.parse(f"tcp://{host}:{address.port}")
        ws = WebSocket.open(named, "/control", time.monotonic() + PATIENCE_S)
        assert len(ws.receive(time.monotonic() + PATIENCE_S)) == 32
        ws.end()
        assert code(named, "/api/v1/status", {"Host": f"{host}:PORT"}) == 200


def test_a_member_that_calls_it_by_another_name_learns_what_was_expected(tmp_path: pathlib.Path):
    wrong = complaint({"Host": "node7:4000"}, any_name=False)
    assert wrong == "expected localhost or a loopback address, saw Host: node7:4000"
    assert complaint({"Host": "node7:4000"}, any_name=True) == ""
    with scheduler(tmp_path, "--no-token") as address, pytest.raises(wl.AccessDenied, match="it has another token"):
        wl.connect(str(address), token="another", timeout=PATIENCE_S)
