"""The proxy between plain sockets: what it passes on, and which faults it makes."""

import hashlib
import itertools
import os
import random
import struct
import threading
import time
import tracemalloc

import pytest
from proxy_link import KINDS, frame, link, read, requests_of, send, small, through

import windlass as wl
from windlass.testing import Faults

# -- what passes -----------------------------------------------------------------------------------------------------


@KINDS
def test_without_faults_everything_passes_bit_exact_in_both_directions(kind: str):
    dice = random.Random(1)
    up, down = ([frame(i, 64 * dice.choice([0, 1, 2, 60, 5000])) for i in range(300)] for _ in range(2))
    with link(kind) as made:
        client, server = made.pair()
        threads = [threading.Thread(target=send, args=x) for x in ((client, up), (server, down))]
        threads.append(threading.Thread(target=lambda: got.append(read(client))))
        got: list[bytes] = []
        for thread in threads:
            thread.start()
        assert read(server) == b"".join(up)
        for thread in threads:
            thread.join()
        assert got == [b"".join(down)]
        assert made.proxy.frames == {"up": 300, "down": 300}
        assert set(made.proxy.counts.values()) == {0}


@pytest.mark.parametrize("fault", [None, "duplicate", "reorder"])
def test_a_frame_of_64_mb_passes_and_is_held_at_most_once(fault: str | None):
    size, piece = 64 << 20, os.urandom(1 << 20)
    header = frame(1, 0)[:8] + struct.pack("<Q", size) + bytes(48)
    with link("tcp", Faults(**({fault: 1.0} if fault else {}))) as made:
        client, server = made.pair()
        sender = threading.Thread(target=send, args=[client, [header] + [piece] * 64])
        tracemalloc.start()
        sender.start()
        digest = hashlib.sha256()
        total = (2 if fault == "duplicate" else 1) * (64 + size)
        while total and (got := server.recv(1 << 16)):
            total -= len(got)
            digest.update(got)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        sender.join()
    expected = hashlib.sha256(header + piece * 64)
    if fault == "duplicate":
        expected.update(header + piece * 64)
    assert (total, digest.digest()) == (0, expected.digest())
    assert peak < (4 << 20) + (size * 1.2 if fault else 0)


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n" * 9, *(frame(9)[:8] + struct.pack("<Q", n) + bytes(300) for n in (65, 1 << 60)), b"W"],
    ids=["no magic", "an odd length", "an absurd length", "a piece of a header"],
)
def test_what_is_not_a_frame_passes_as_bytes(garbage: bytes):
    arrived, proxy = through(Faults(corrupt=1.0, directions="down"), [frame(1), garbage, frame(2)])
    assert arrived == frame(1) + garbage + frame(2)
    assert proxy.frames["up"] == 1


@pytest.mark.parametrize("at", [1, 63, 64, 100])
def test_a_frame_that_its_sender_leaves_unfinished_is_passed_on_as_far_as_it_came(at: int):
    for faults in (Faults(), Faults(reorder=1.0), Faults(delay=1.0)):
        assert through(faults, [frame(1)[:at]])[0] == frame(1)[:at]


# -- faults ----------------------------------------------------------------------------------------------------------


@KINDS
def test_dropped_frames_are_missing_and_nothing_else_is(kind: str):
    arrived, proxy = through(Faults(drop=0.1, seed=3), small(4000), kind)
    got = requests_of(arrived)
    assert got == sorted(set(got))
    assert 4000 - len(got) == proxy.counts["drop"]
    assert 300 < proxy.counts["drop"] < 500


def test_duplicated_frames_come_twice_in_a_row():
    arrived, proxy = through(Faults(duplicate=0.1, seed=3), small(4000))
    got = requests_of(arrived)
    assert got == sorted(got)
    assert set(got) == set(range(1, 4001))
    assert len(got) - 4000 == proxy.counts["duplicate"]
    assert 300 < proxy.counts["duplicate"] < 500


def test_reordered_frames_come_behind_the_next_one():
    at_once = [b"".join(small(7))]
    assert requests_of(through(Faults(reorder=1.0), at_once)[0]) == [2, 1, 4, 3, 6, 5, 7]
    arrived, proxy = through(Faults(reorder=0.1, seed=3), small(4000))
    got = requests_of(arrived)
    assert sorted(got) == list(range(1, 4001))
    late = [i for i, (a, b) in enumerate(itertools.pairwise(got)) if a > b]
    assert all(got[i] == got[i + 1] + 1 for i in late)
    assert proxy.counts["reorder"] / 2 < len(late) <= proxy.counts["reorder"]  # some come in pairs, some time out
    assert 300 < proxy.counts["reorder"] < 500


def test_a_frame_held_back_goes_on_soon_though_none_follows():
    with link("tcp", Faults(reorder=1.0)) as made:
        client, server = made.pair()
        for i in range(1, 4):
            client.sendall(frame(i))
            assert read(server, 128) == frame(i)


def test_corrupted_frames_have_one_to_three_bits_flipped_and_keep_their_length():
    frames = [frame(i, 0) for i in range(1, 2001)]
    arrived, proxy = through(Faults(corrupt=0.5, seed=3), frames)
    assert len(arrived) == sum(map(len, frames))
    flipped, lengths = [], 0
    for i, sent in enumerate(frames):
        difference = int.from_bytes(sent, "little") ^ int.from_bytes(arrived[64 * i : 64 * i + 64], "little")
        flipped.append(difference.bit_count())
        lengths += bool(difference >> 64 & (1 << 64) - 1)
    assert set(flipped) == {0, 1, 2, 3}
    assert len(flipped) - flipped.count(0) == proxy.counts["corrupt"]
    assert lengths > 50


def test_corruption_reaches_every_part_of_a_large_frame():
    sent = frame(1, 1 << 20)
    places = set()
    for seed in range(20):
        arrived, _ = through(Faults(corrupt=1.0, seed=seed), [sent])
        places |= {8 * i // len(sent) for i in range(len(sent)) if sent[i] != arrived[i]}
    assert len(places) >= 7


def test_half_closed_the_one_direction_ends_and_the_other_goes_on():
    with link("tcp", Faults(half_close=1.0, directions="up")) as made:
        client, server = made.pair()
        client.sendall(frame(1) + frame(2))
        assert read(server) == frame(1)
        client.sendall(frame(3))  # which nobody hears
        server.sendall(frame(4) + frame(5))
        assert read(client, 256) == frame(4) + frame(5)
        assert made.proxy.counts["half_close"] == 1


@KINDS
def test_cut_within_a_frame_both_sides_see_the_end(kind: str):
    lengths = set()
    for seed in range(20):
        with link(kind, Faults(cut=1.0, seed=seed, directions="up")) as made:
            client, server = made.pair()
            send(client, [frame(1), frame(2)])
            arrived = read(server)
            assert (frame(1) + frame(2)).startswith(arrived)
            assert read(client) == b""
            assert made.proxy.counts["cut"] == 1
        lengths.add(len(arrived))
    assert max(lengths) < 128
    assert len(lengths) > 10


def test_delayed_frames_come_later_and_in_order():
    started = time.monotonic()
    arrived, proxy = through(Faults(delay=1.0, delay_ms=(20, 30)), small(10))
    assert time.monotonic() - started >= 0.2
    assert requests_of(arrived) == list(range(1, 11))
    assert proxy.counts["delay"] == 10


def test_faults_keep_to_their_direction_and_spare_hello_unless_told():
    hellos = [frame(1, operation=1), frame(2, operation=0x81)]
    assert requests_of(through(Faults(drop=1.0, directions="up"), small(9), direction="down")[0]) == [*range(1, 10)]
    assert through(Faults(drop=1.0, directions="down"), small(9), direction="down")[0] == b""
    assert through(Faults(drop=1.0), [*hellos, *small(9)])[0] == b"".join(hellos)
    assert through(Faults(drop=1.0, skip_hello=False), [*hellos, *small(9)])[0] == b""


def test_equal_seeds_make_equal_faults_and_others_make_others():
    def run(seed: int, direction: str = "up", connection: int = 0) -> bytes:
        with link("tcp", Faults(drop=0.1, duplicate=0.1, corrupt=0.1, seed=seed)) as made:
            for _ in range(connection):
                made.pair()
            source, sink = made.pair()[:: 1 if direction == "up" else -1]
            send(source, small(200))
            return read(sink)

    runs = [run(1), run(2), run(1, "down"), run(1, connection=1)]
    assert runs == [run(1), run(2), run(1, "down"), run(1, connection=1)]
    assert len(set(runs)) == 4


def test_faults_can_be_changed_while_it_runs():
    with link("tcp", Faults(drop=1.0)) as made:
        client, server = made.pair()
        client.sendall(frame(1))
        while made.proxy.counts["drop"] == 0:
            time.sleep(0.001)
        made.proxy.set(Faults())
        client.sendall(frame(2))
        assert read(server, 128) == frame(2)


@pytest.mark.parametrize(
    "wrong", [{"drop": 1.1}, {"cut": -1}, {"drop": 0.6, "cut": 0.6}, {"delay_ms": (3, 1)}, {"directions": "left"}]
)
def test_faults_that_cannot_be_are_refused(wrong: dict):
    with pytest.raises(wl.InvalidArgument):
        Faults(**wrong)
