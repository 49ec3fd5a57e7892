"""Shards as they were at a cut, while they go on being used: what is captured, and what a restore makes of it."""

import pathlib
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import own_rules
import pytest
from helpers import check_python

import windlass as wl
from windlass import _core
from windlass._checkpoint.arrays import parts_of

RULES = [
    wl.Sum(),
    wl.SGD(lr=0.1, momentum=0.9),
    wl.Adam(lr=0.01),
    wl.Adam(lr=0.01, schedule=wl.Schedule(warmup=2, decay="cosine", updates=100, end=0.1)),
    wl.RowAdagrad(lr=0.1),
    wl.FTRL(lr=0.1),
    own_rules.adam(lr=0.1),
]
DIM, ROWS, WIDTH = 3, 400, 300
FUNCTION_SECONDS = 10.0  # after which a function of the user's is given up


class Captured:
    """Everything that a capture gave, by object and shard."""

    def __init__(self, names: Sequence[str] = ("w", "t")) -> None:
        self.names = names
        self.pieces: list[tuple[int, int, int, int, Any]] = []
        self.rows: list[tuple[int, int, int, Any]] = []
        self.shards: list[tuple[Any, ...]] = []

    @property
    def fingerprint(self) -> str:
        names = sum(map(_core.fingerprint_of_name, self.names))
        return f"{(names + sum(shard[6] for shard in self.shards)) % 2**64:016x}"

    def take(self, number: int, taken: tuple[Any, ...]) -> None:
        match taken:
            case ("piece", shard, which, at, data):
                self.pieces.append((number, shard, which, at, data))
            case ("rows", shard, rows, data):
                self.rows.append((number, shard, rows, data))
            case ("shard", shard, *facts):
                self.shards.append((number, shard, *facts[:3], facts[3], facts[4], facts[5]))

    def restore(self, shelf: _core.Shelf) -> None:
        for number, shard, which, at, data in self.pieces:
            shelf.piece(number, shard, which, at, data)
        for number, shard, rows, data in self.rows:
            shelf.rows(number, shard, rows, [*parts_of(shelf, number).rows(data, rows).values()])
        for number, shard, version, count, made, _, fingerprint, _ in self.shards:
            assert shelf.counts(number, shard, version, count, made) == fingerprint


class Trainer:
    """Pushes, erases and puts at random."""

    def __init__(self, cluster: wl.Cluster, rule: wl.Rule, sync: str, seed: int) -> None:
        self.w = cluster.tensor("w", (WIDTH, 50), rule=rule, init=wl.Normal(std=1.0), sync=sync)
        self.t = cluster.table("t", dim=DIM, rule=rule, init=wl.Normal(std=1.0), sync=sync)
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.cluster = cluster

    def keys(self, most: int) -> "np.ndarray[Any, Any]":
        return self.numbers.integers(0, ROWS, self.random.randrange(1, most)).astype(np.uint64)

    def act(self) -> None:
        match self.random.randrange(8):
            case 0:
                self.w.push(self.numbers.normal(size=(WIDTH, 50)).astype(np.float32)).wait()
            case 1:
                at = self.random.randrange(WIDTH - 1)
                self.w[at : at + 2].push(self.numbers.normal(size=(2, 50)).astype(np.float32)).wait()
            case 2:
                self.t.delete(self.keys(20))
            case 3:
                self.t.pull(self.keys(50))  # makes rows
            case 4:
                self.w.put(self.numbers.normal(size=(WIDTH, 50)).astype(np.float32))
            case _:
                keys = self.keys(200)
                self.t.push(keys, self.numbers.normal(size=(len(keys), DIM)).astype(np.float32)).wait()


def capture_of(
    cluster: wl.Cluster, clock: int = 0, parts: int = 1
) -> tuple[_core.Shelf, list[tuple[int, _core.Capture]]]:
    """parts: that read the shards of each object."""
    shelf = _core.Shelf(cluster._engine)
    captures = [
        (number, _core.Capture(shelf, number, clock, part, parts))
        for number, _ in shelf.objects()
        for part in range(parts)
    ]
    for _, one in captures:
        one.arm()
    return shelf, captures


@pytest.mark.embedded("looks at the server inside the process")
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_capture_has_what_was_there_at_the_cut_whatever_happens_after_it(rule: wl.Rule) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    with wl.connect() as cluster:
        trainer = Trainer(cluster, rule, "asp", seed)
        for _ in range(20):
            trainer.act()
        before = cluster.fingerprint()
        shelf, captures = capture_of(cluster, parts=trainer.random.choice([1, 2, 3]))
        captured = Captured()
        while captures:
            if trainer.random.random() < 0.3:
                trainer.act()
            number, one = trainer.random.choice(captures)
            taken = one.next(trainer.random.choice([100, 5_000, 1 << 20]))
            if taken is None:
                captures = [(n, c) for n, c in captures if c is not one]
            else:
                captured.take(number, taken)
        assert captured.fingerprint == before != cluster.fingerprint()
        assert shelf.aside_bytes == 0
        with wl.connect() as other:
            Trainer(other, rule, "asp", seed)
            captured.restore(_core.Shelf(other._engine))
            assert other.fingerprint() == before
            for one in (trainer, Trainer(other, rule, "asp", seed)):  # both go on alike
                assert (one.t.pull(np.arange(5)).shape, one.w.pull().shape) == ((5, DIM), (WIDTH, 50))


@pytest.mark.embedded("looks at the server inside the process")
def test_without_setting_aside_what_changes_a_capture_is_of_no_moment() -> None:
    """The test above turns red when its mechanism is switched off."""
    code = """
import numpy as np, windlass as wl
from test_capture import Captured, capture_of
with wl.connect() as cluster:
    w = cluster.tensor("w", (300, 50), rule=wl.Sum())
    before = cluster.fingerprint()
    _, [(number, one)] = capture_of(cluster)
    w.push(np.ones((300, 50), np.float32)).wait()
    captured = Captured(["w"])
    while (taken := one.next(1 << 20)) is not None:
        captured.take(number, taken)
    print(captured.fingerprint == before)
"""
    here = pathlib.Path(__file__).parent
    path = f"{here}:{here.parent}"
    assert check_python(code, PYTHONPATH=path).split() == ["True"]
    assert check_python(code, PYTHONPATH=path, WINDLASS_BREAK="capture").split() == ["False"]


@pytest.mark.embedded("looks at the server inside the process")
def test_a_capture_that_is_given_up_leaves_nothing_behind() -> None:
    with wl.connect() as cluster:
        trainer = Trainer(cluster, wl.Adam(lr=0.1), "asp", 1)
        for _ in range(20):
            trainer.act()
        shelf, captures = capture_of(cluster)
        with pytest.raises(wl.InvalidArgument, match="another checkpoint is being taken"):
            _core.Capture(shelf, captures[0][0], 0).arm()
        for _ in range(10):
            trainer.act()
        assert shelf.aside_bytes > 0
        captures.clear()
        assert shelf.aside_bytes == 0
        for _ in range(10):
            trainer.act()
        assert shelf.aside_bytes == 0
        capture_of(cluster)


@wl.rule(rows=True)
def slow(w, g):
    """Somebody else runs while it does."""
    running.set()
    time.sleep(0.5)
    w -= g


running = threading.Event()


@pytest.mark.embedded("looks at the server inside the process")
def test_a_capture_can_be_given_up_while_a_function_of_the_users_has_the_shard() -> None:
    """Giving up takes the shard's turn: whoever waits for it must leave the function what it needs to end."""
    with wl.connect(threads=1) as cluster:
        t = cluster.tensor("t", (4,), rule=slow(), sync="asp")
        _, captures = capture_of(cluster)
        running.clear()
        pushing = threading.Thread(target=lambda: t.push(np.ones(4, np.float32)).wait())
        pushing.start()
        assert running.wait(60)
        begun = time.monotonic()
        captures.clear()
        pushing.join(60)
        assert time.monotonic() - begun < FUNCTION_SECONDS
        assert t.pull().tolist() == [-1] * 4


@pytest.mark.embedded("looks at the server inside the process")
def test_under_bsp_a_capture_has_the_updates_before_its_clock_and_none_after_it() -> None:
    def gradient(rank: int, step: int) -> "np.ndarray[Any, Any]":
        return np.random.default_rng(10 * step + rank).normal(size=(WIDTH, 50)).astype(np.float32)

    def train(cluster: wl.Cluster, rank: int, steps: range, told: dict[int, str]) -> None:
        w = cluster.tensor("w", (WIDTH, 50), rule=wl.Adam(lr=0.1), sync="bsp")
        t = cluster.table("t", dim=DIM, rule=wl.Adam(lr=0.1), sync="bsp")
        for step in steps:
            keys = np.random.default_rng(step + rank).integers(0, ROWS, 100).astype(np.uint64)
            t.push(keys, np.full((100, DIM), step + rank, np.float32))
            w.push(gradient(rank, step))
            cluster.tick()
            w.pull()
            t.pull(keys[:1], create=False)
            if rank == 0:
                told[step + 1] = ""

    def run(steps: int, cut: int | None) -> tuple[str, Captured]:
        captured, told = Captured(), dict[int, str]()
        with wl.connect() as cluster:
            zero, one = cluster.worker(0, 2), cluster.worker(1, 2)
            other = threading.Thread(target=train, args=(one, 1, range(steps), {}))
            if cut is None:
                other.start()
                train(zero, 0, range(steps), told)
                other.join()
                return zero.fingerprint(), captured
            other.start()
            train(zero, 0, range(cut), told)
            _, captures = capture_of(zero, cut)
            rest = threading.Thread(target=train, args=(zero, 0, range(cut, steps), told))
            rest.start()
            while captures:
                number, capture = captures.pop(0)
                while (taken := capture.next(1 << 16)) is not None:
                    captured.take(number, taken)
                    if taken == ("wait",):
                        captures.append((number, capture))
                        break
            rest.join()
            other.join()
            assert {shard[4] for shard in captured.shards} == {cut}
            return zero.fingerprint(), captured

    final, captured = run(9, 5)
    assert captured.fingerprint == run(5, None)[0]
    assert final == run(9, None)[0] != captured.fingerprint
