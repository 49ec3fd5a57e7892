"""Addresses of servers: what is read, what is refused, and connecting to them."""

import os
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass import InvalidArgument, ServerLost, Timeout
from windlass._net.address import Address, bound_to, dial, listen


def soon() -> float:
    return time.monotonic() + 5.0


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("tcp://127.0.0.1:4000", "tcp://127.0.0.1:4000"),
        ("127.0.0.1:4000", "tcp://127.0.0.1:4000"),
        ("[::1]:4000", "tcp://[::1]:4000"),
        ("tcp://[0:0:0:0:0:0:0:1]:04000", "tcp://[::1]:4000"),
        ("[fe80::1%eth0]:1", "tcp://[fe80::1%eth0]:1"),
        ("localhost:0", "tcp://localhost:0"),
        ("Node-7.Example.org:65535", "tcp://node-7.example.org:65535"),
        ("0.0.0.0:1", "tcp://0.0.0.0:1"),
        ("unix://@windlass-1", "unix://@windlass-1"),
        ("unix:@a b/ü", "unix://@a b/ü"),
        ("unix://@" + "x" * 107, "unix://@" + "x" * 107),
    ],
)
def test_an_address_is_read_and_written_in_canonical_form(text: str, canonical: str):
    assert str(Address.parse(text)) == canonical
    assert Address.parse(canonical) == Address.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        *["", ":", ":4000", "*:4000", "localhost", "localhost:", "localhost:x", "localhost:-1", "localhost:65536"],
        *["localhost:٤", "localhost:1e3", "localhost: 1", "127.0.0.1", "127.0.0.256:1", "127.0.0.01:1", "::1:4000"],
        *["[::1]", "[::1:4000", "[127.0.0.1]:1", "[localhost]:1", "a b:1", "-a:1", "a..b:1", "http://a:1", "tcp://"],
        *["0:1", "127.1:1", "0x7f.1:1", "2130706433:1", "example.1:1", "[]:1", "tcp://unix://@a:1", "x" * 64 + ":1"],
        *["unix", "unix:", "unix://", "unix://@", "unix:///tmp/s", "unix://name", "unix://@a\0b", "unix://@a\n"],
        *["unix://@" + "x" * 108, "unix://@" + "ü" * 54, "unix://@\ud800"],
    ],
)
def test_a_wrong_address_is_refused_with_what_was_expected_and_seen(text: str):
    with pytest.raises(InvalidArgument, match=r"expected|must be") as error:
        Address.parse(text)
    assert repr(text) in str(error.value)


@given(
    st.one_of(
        st.builds(lambda ip, port: f"{ip}:{port}", st.ip_addresses(v=4), st.integers(0, 65535)),
        st.builds(lambda ip, port: f"[{ip}]:{port}", st.ip_addresses(v=6), st.integers(0, 65535)),
        st.text().map(lambda name: f"unix:@{name}"),
        st.text(),
    )
)
def test_any_text_is_an_address_that_can_be_read_back_or_is_refused(text: str):
    try:
        address = Address.parse(text)
    except InvalidArgument:
        return
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        *[("127.0.0.1:1", True), ("127.3.2.1:1", True), ("[::1]:1", True), ("localhost:1", True), ("unix:@a", True)],
        *[("0.0.0.0:1", False), ("[::]:1", False), ("10.0.0.1:1", False), ("localhost.example.org:1", False)],
        *[("128.0.0.1:1", False), ("node7:1", False), ("[fe80::1]:1", False), ("[2001:db8::1]:1", False)],
    ],
)
def test_only_loopback_and_unix_count_as_loopback(text: str, loopback: bool):
    assert Address.parse(text).loopback is loopback


@pytest.mark.parametrize(
    "text", ["127.0.0.1:0", "[::1]:0", "localhost:0", pytest.param(f"unix:@windlass-test-{os.getpid()}", id="unix")]
)
def test_who_dials_reaches_who_listens(text: str):
    with listen(Address.parse(text), 8) as listener:
        address = bound_to(listener)
        assert Address.parse(str(address)) == address
        assert address.loopback
        with dial(address, soon()) as client, listener.accept()[0] as server:
            client.sendall(b"hello")
            assert server.recv(5) == b"hello"
            assert client.gettimeout() is None
            if address.kind == "tcp":
                for sock in (client, server):
                    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("text", ["127.0.0.1:0", "unix:@windlass-test-refused"])
def test_an_address_where_nobody_listens_is_a_lost_server_at_once(text: str):
    with listen(Address.parse(text), 1) as listener:
        address = bound_to(listener)
    start = time.monotonic()
    with pytest.raises(ServerLost, match=rf"^connect to {address}: Connection refused$"):
        dial(address, soon())
    assert time.monotonic() - start < 2


def test_a_port_does_not_connect_to_itself(monkeypatch: pytest.MonkeyPatch):
    with listen(Address.parse("127.0.0.1:0"), 1) as listener:
        address = bound_to(listener)
    real = socket.socket.connect

    def connect(sock: socket.socket, target: tuple[str, int]) -> None:  # the port that the kernel happens to choose
        sock.bind(target)
        real(sock, target)

    monkeypatch.setattr(socket.socket, "connect", connect)
    with pytest.raises(ServerLost, match="nobody listens there"):
        dial(address, soon())


def test_a_name_that_nobody_knows_is_a_lost_server(monkeypatch: pytest.MonkeyPatch):
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ServerLost, match=r"^connect to tcp://nowhere:4000: Name or service not known$"):
        dial(Address.parse("nowhere:4000"), soon())


@pytest.mark.parametrize("text", ["127.0.0.1:0", pytest.param(f"unix:@windlass-test-full-{os.getpid()}", id="unix")])
def test_a_server_that_accepts_nobody_is_waited_for_until_the_deadline_only(text: str):
    with listen(Address.parse(text), 0) as listener, dial(bound_to(listener), soon()):
        start = time.monotonic()
        with pytest.raises(Timeout, match=f"^connect to {bound_to(listener)}: "):
            dial(bound_to(listener), start + 0.3)
        assert time.monotonic() - start < 2


def test_a_deadline_that_has_passed_is_a_timeout():
    with listen(Address.parse("127.0.0.1:0"), 1) as listener, pytest.raises(Timeout):
        dial(bound_to(listener), time.monotonic() - 1)


def test_port_zero_cannot_be_dialled():
    with pytest.raises(InvalidArgument, match="port 0 is for listening"):
        dial(Address.parse("127.0.0.1:0"), soon())


@pytest.mark.parametrize("text", ["127.0.0.1:0", pytest.param(f"unix:@windlass-test-twice-{os.getpid()}", id="unix")])
def test_an_address_in_use_is_refused_by_name(text: str):
    with (
        listen(Address.parse(text), 1) as listener,
        pytest.raises(InvalidArgument, match=f"^listen on {bound_to(listener)}: Address already in use$"),
    ):
        listen(bound_to(listener), 1)


@pytest.mark.parametrize(("name", "ip"), [("localhost", "192.0.2.1"), ("localhost", "0.0.0.0"), ("node7", "0.0.0.0")])
@pytest.mark.parametrize("use", [lambda a: listen(a, 1), lambda a: dial(a, soon())], ids=["listen", "dial"])
def test_a_name_leads_nowhere_that_its_text_does_not_say(name: str, ip: str, use, monkeypatch: pytest.MonkeyPatch):
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 4000))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    with pytest.raises(InvalidArgument, match=f"{name} is {ip} here"):
        use(Address.parse(f"{name}:4000"))
