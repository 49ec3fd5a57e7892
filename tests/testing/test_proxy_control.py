"""What a test does to a proxy: cut at a byte, pause, refuse, point elsewhere; and what is left of it."""

import contextlib
import gc
import os
import threading
import time

import pytest
from proxy_link import KINDS, TCP, frame, link, read, send, small

import windlass as wl
from windlass._net.address import Address, bound_to, dial, listen
from windlass.testing import Faults, Proxy

# -- cut_at ----------------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("direction", ["up", "down"])
def test_cut_at_cuts_at_exactly_that_byte_and_once(kind: str, direction: str):
    sent = b"".join(small(20))
    with link(kind) as made:
        for byte in [0, 1, 5, 8, 9, 15, 16, 63, 64, 65, 127, 128, 129, 191, 192, 1000, 2559, 2560]:
            made.proxy.cut_at(direction, byte)
            ends = made.pair()
            source, sink = ends if direction == "up" else ends[::-1]
            send(source, [sent])
            assert read(sink) == sent[:byte]
            assert read(source) == b""
        assert made.proxy.counts["cut_at"] == 18
        source, sink = made.pair()
        send(source, [sent])
        assert read(sink) == sent


@KINDS
def test_cut_at_is_exact_while_both_sides_send_more_than_fits(kind: str):
    up = frame(1, 8 << 20)
    for byte in [3_000_000, 3_000_001, 8 << 20]:
        with link(kind) as made:
            made.proxy.cut_at("up", byte)
            client, server = made.pair()
            senders = [threading.Thread(target=send, args=[end, [up]]) for end in (client, server)]
            for sender in senders:
                sender.start()
            time.sleep(0.05)  # the kernel's buffers are full by now
            assert read(server) == up[:byte]
            for sender in senders:
                sender.join()


def test_cut_at_counts_what_has_passed_and_not_what_came():
    with link("tcp", Faults(duplicate=1.0)) as made:
        made.proxy.cut_at("up", 200)
        client, server = made.pair()
        send(client, [frame(1), frame(2)])
        assert read(server) == (frame(1) + frame(1))[:200]


@pytest.mark.parametrize(("direction", "byte"), [("left", 1), ("both", 1), ("up", -1)])
def test_cut_at_nowhere_is_refused(direction: str, byte: int):
    with link() as made, pytest.raises(wl.InvalidArgument):
        made.proxy.cut_at(direction, byte)


# -- pause and refuse ------------------------------------------------------------------------------------------------


@KINDS
def test_paused_not_a_byte_passes_nothing_is_closed_and_nothing_is_lost(kind: str):
    sent = frame(1, 16 << 20)
    with link(kind) as made:
        client, server = made.pair()
        sender = threading.Thread(target=send, args=[client, [sent]])
        sender.start()
        got = read(server, 1 << 20)
        made.proxy.pause()
        server.settimeout(0.1)
        with contextlib.suppress(TimeoutError):  # what the kernel had already, then nothing
            while piece := server.recv(1 << 20):
                got += piece
        with pytest.raises(TimeoutError):
            server.recv(1)
        made.proxy.resume()
        server.settimeout(20)
        assert got + read(server) == sent
        sender.join()


@KINDS
def test_what_is_sent_while_paused_waits_for_the_resume(kind: str):
    sent = frame(1, 1 << 20)
    with link(kind) as made:
        client, server = made.pair()
        made.proxy.pause()
        sender = threading.Thread(target=send, args=[client, [sent]])
        sender.start()
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.recv(1)
        made.proxy.resume()
        server.settimeout(20)
        assert read(server) == sent
        sender.join()


def test_paused_an_end_does_not_pass_either_and_new_connections_wait():
    with link() as made:
        client, server = made.pair()
        made.proxy.pause()
        client.close()
        late = dial(Address.parse(made.proxy.address), time.monotonic() + 5)
        behind, _ = made.listener.accept()
        late.sendall(b"x" * 96)
        for end in (server, behind):
            end.settimeout(0.1)
            with pytest.raises(TimeoutError):
                end.recv(1)
            end.settimeout(5)
        made.proxy.resume()
        assert server.recv(1) == b""
        assert read(behind, 96) == b"x" * 96
        late.close()
        behind.close()


@KINDS
def test_refused_new_connections_are_closed_and_old_ones_go_on(kind: str):
    with link(kind) as made:
        client, server = made.pair()
        made.proxy.refuse()
        for i in range(1, 4):
            with dial(Address.parse(made.proxy.address), time.monotonic() + 5) as refused:
                assert read(refused) == b""
            assert made.proxy.counts["refused"] == i
        client.sendall(frame(1))
        assert read(server, 128) == frame(1)
        made.proxy.accept()
        client, server = made.pair()
        assert made.proxy.connections == 2


# -- the target ------------------------------------------------------------------------------------------------------


def test_a_server_that_is_gone_closes_the_connection_and_a_new_target_helps():
    with listen(TCP, 1) as gone:
        address = str(bound_to(gone))
    with Proxy(address) as proxy, listen(TCP, 1) as listener:
        with dial(Address.parse(proxy.address), time.monotonic() + 5) as client:
            assert read(client) == b""
        proxy.target = str(bound_to(listener))
        with dial(Address.parse(proxy.address), time.monotonic() + 5) as client, listener.accept()[0] as server:
            server.sendall(b"hello")
            assert read(client, 5) == b"hello"
        assert proxy.connections == 1


@pytest.mark.parametrize(("kind", "target"), [("tcp", "unix"), ("unix", "tcp")])
def test_it_can_listen_on_another_kind_than_its_target(kind: str, target: str):
    where = TCP if target == "tcp" else Address("unix", name=f"test-{os.urandom(8).hex()}")
    with listen(where, 1) as listener, Proxy(str(bound_to(listener)), kind=kind) as proxy:
        assert proxy.address.startswith(f"{kind}://")
        with dial(Address.parse(proxy.address), time.monotonic() + 5) as client, listener.accept()[0] as server:
            client.sendall(b"x" * 1000)
            assert read(server, 1000) == b"x" * 1000


# -- what is left ----------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("state", ["idle", "held", "delayed", "paused", "full", "half closed", "ended", "used"])
def test_threads_and_files_are_gone_afterwards(kind: str, state: str):
    gc.collect()  # what earlier tests left goes now, not in between
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    faults = {"held": Faults(reorder=1.0), "delayed": Faults(delay=1.0, delay_ms=(60_000, 60_000))}
    faults["half closed"] = Faults(half_close=1.0)
    with link(kind, faults.get(state)) as made:
        for _ in range(3):
            client, server = made.pair()
            if state == "paused":
                made.proxy.pause()
            if state == "full":
                client.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        client.send(frame(1, 1 << 20))
            elif state != "idle":
                client.sendall(frame(1))
            if state == "ended":
                client.close()
                assert read(server) == frame(1)
            if state == "paused":
                break
        if state == "used":
            assert read(server, 128) == frame(1)
        started = time.monotonic()
        made.proxy.close()
        assert time.monotonic() - started < 2
        made.proxy.close()
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= files


def test_connections_that_have_ended_leave_nothing_while_it_runs():
    with link() as made:
        made.pair()
        gc.collect()
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            for end in made.pair():
                end.close()
        deadline = time.monotonic() + 5
        while threading.active_count() > threads or len(os.listdir("/proc/self/fd")) > files:
            assert time.monotonic() < deadline
            time.sleep(0.005)
