"""The witness: integer-valued pushes with the rule Sum. One that is lost or applied twice changes a total.

A Load is several threads of two workers that push whole numbers to tensors and tables, small and bulk requests mixed.
What one thread alone touches is checked at every step, the rest is added up at the end.
"""

import collections
import contextlib
import dataclasses
import random
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import windlass as wl
from windlass.testing import Faults, Proxy, Servers
from windlass.testing._relay import Control, Pump

SHARD = 8192  # int64 elements of the smallest shard
ROW = 8
WIDE = 6 * SHARD // ROW  # rows of the tensor that all push to: 384 KiB, so that a push of the whole is bulk
OWN = 2 * SHARD // ROW  # rows of a tensor that one thread alone pushes to, on both servers
KEYS, DIM = 500, 4
PIPELINE = 24  # pushes that a thread does not wait for
PUSHES = {7: "push", 9: "push_pull", 10: "erase", 16: "step"}
OPERATIONS = (
    *["push rows", "push listed rows", "push own rows", "push keys"] * 4,
    *["push all", "push all own", "push_pull own rows", "push_pull_async", "push_pull keys"] * 2,
    *["push_pull all own", "pull own", "delete", "step"],
)


# -- a network that fails --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Hit:
    """A fault, and the frame it was made on."""

    fault: str
    direction: str
    operation: int
    size: int

    @property
    def bites(self) -> bool:
        """Whether it hit a push or the answer to one, rather than a pull or a question."""
        return self.operation & 0x7F in PUSHES


class Tap(Control):
    """What a proxy's connections share, with eyes on the frames that faults are made on."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(faults)
        self.hits: collections.Counter[Hit] = collections.Counter()

    def copy(self) -> collections.Counter[Hit]:
        with self.lock:
            return self.hits.copy()

    def begin(self) -> None:
        with self.lock:
            self.hits.clear()
            self.made = collections.Counter(dict.fromkeys(self.made, 0))
            self.frames.update(up=0, down=0)

    def count(self, kind: str) -> None:
        super().count(kind)
        pump = threading.current_thread()
        if isinstance(pump, Pump) and kind != "cut_at":
            operation, length = struct.unpack_from("<5xB2xQ", pump._buffer, pump._at)
            with self.lock:
                self.hits[Hit(kind, pump._direction, operation, 64 + length)] += 1


class Network:
    """Servers, each behind a proxy. Faults begin with ``spoil()``."""

    def __init__(self, servers: Servers, proxies: list[Proxy], taps: list[Tap], transport: str) -> None:
        self.servers, self.proxies, self.taps, self.transport = servers, proxies, taps, transport

    @property
    def addresses(self) -> list[str]:
        return [proxy.address for proxy in self.proxies]

    def connect(self, **arguments: Any) -> wl.Cluster:
        return wl.connect(**{"servers": self.addresses, "timeout": 30, "transport": self.transport, **arguments})

    def begin(self) -> None:
        """For the next test: no faults, and none counted."""
        self.spoil(Faults())
        for tap in self.taps:
            tap.begin()

    def spoil(self, faults: Faults) -> None:
        for i, proxy in enumerate(self.proxies):
            proxy.set(dataclasses.replace(faults, seed=faults.seed + i))

    @property
    def dropped(self) -> int:
        return sum(proxy.counts["drop"] for proxy in self.proxies)

    @property
    def hits(self) -> collections.Counter[Hit]:
        """How often each fault was made on frames of each kind, in the order in which they first were."""
        return sum((tap.copy() for tap in self.taps), collections.Counter())

    def report(self, what: str) -> tuple[int, int]:
        """Prints and returns how many faults were made, and how many of them bit."""
        made, bit = collections.Counter(), collections.Counter()
        for hit, times in self.hits.items():
            made[hit.fault] += times
            bit[hit.fault] += times * hit.bites
        kinds = ", ".join(f"{n} {kind} ({bit[kind]} bit)" for kind, n in sorted(made.items()))
        frames = sum(sum(proxy.frames.values()) for proxy in self.proxies)
        print(f"{what}: {made.total()} faults, {bit.total()} bit, in {frames} frames: {kinds or 'none'}")
        return made.total(), bit.total()


@contextlib.contextmanager
def network(kind: str, count: int = 2, *, threads: int = 2, **options: Any) -> Iterator[Network]:
    """kind: "tcp", "unix", or "arena": Unix sockets, and memory that is shared."""
    sockets, transport = ("unix", "arena") if kind == "arena" else (kind, "socket")
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(Servers(count, kind=sockets, threads=threads, **options))
        proxies = [stack.enter_context(Proxy(address)) for address in servers.addresses]
        taps = [Tap(Faults()) for _ in proxies]
        for proxy, tap in zip(proxies, taps, strict=True):
            proxy._control = tap
        yield Network(servers, proxies, taps, transport)


# -- the load --------------------------------------------------------------------------------------------------------


class Hand:
    """One thread of a load. Its ``do_`` methods are the operations."""

    def __init__(self, load: "Load", number: int, cluster: wl.Cluster) -> None:
        self.load, self.number, self.name = load, number, f"hand-{number}"
        self.thread = threading.Thread(target=self.run, name=self.name, daemon=True)
        self.random = random.Random(f"{load.seed} {number}")
        self.cluster = cluster
        self.tensors = load.open(cluster, number)
        self.wide = np.zeros((WIDE, ROW), np.int64)
        self.own = np.zeros((OWN, ROW), np.int64)
        self.keys = np.zeros((KEYS, DIM), np.float32)
        self.pushes = 0
        self.wrong: list[str] = []
        self.futures: collections.deque[wl.types.Future[Any]] = collections.deque()

    def run(self) -> None:
        try:
            while self.load.take():
                getattr(self, "do_" + self.random.choice(self.load.operations).replace(" ", "_"))()
                self.pushes += 1
                while len(self.futures) > PIPELINE:
                    self.futures.popleft().wait()
            while self.futures:
                self.futures.popleft().wait()
        except Exception as error:
            self.wrong.append(f"{self.name} ended after {self.pushes} pushes: {type(error).__name__}: {error}")

    def _expect(self, what: str, seen: np.ndarray, expected: np.ndarray) -> None:
        if not np.array_equal(seen, expected):
            self.wrong.append(f"{self.name}, {what}: {(seen != expected).sum()} of {seen.size} numbers are wrong")

    def _span(self, rows: int) -> slice:
        begin = self.random.randrange(rows)
        return slice(begin, min(rows, begin + self.random.randint(1, 24)))

    def _gradient(self, *shape: int, dtype: type = np.int64) -> np.ndarray:
        return np.full(shape, self.random.randint(1, 3), dtype)

    # What all push to.

    def do_push_rows(self) -> None:
        span = self._span(WIDE)
        grad = self._gradient(span.stop - span.start, ROW)
        self.futures.append(self.tensors.wide[span].push(grad))
        self.wide[span] += grad

    def do_push_listed_rows(self) -> None:
        rows = [self.random.randrange(WIDE) for _ in range(self.random.randint(1, 6))]
        grad = self._gradient(len(rows), ROW)
        self.futures.append(self.tensors.wide[rows].push(grad))
        np.add.at(self.wide, rows, grad)

    def do_push_all(self) -> None:
        grad = self._gradient(WIDE, ROW)
        self.futures.append(self.tensors.wide.push(grad))
        self.wide += grad

    def do_push_pull_async(self) -> None:
        span = self._span(WIDE)
        grad = self._gradient(span.stop - span.start, ROW)
        self.futures.append(self.tensors.wide[span].push_pull_async(grad))
        self.wide[span] += grad

    def do_push_keys(self) -> None:
        keys = [self.random.randrange(KEYS) for _ in range(self.random.randint(1, 40))]
        grads = self._gradient(len(keys), DIM, dtype=np.float32)
        self.futures.append(self.tensors.table.push(keys, grads))
        np.add.at(self.keys, keys, grads)

    def do_push_pull_keys(self) -> None:
        keys = self.random.sample(range(KEYS), 10)
        grads = self._gradient(len(keys), DIM, dtype=np.float32)
        seen = self.tensors.table.push_pull(keys, grads)
        self.keys[keys] += grads
        if not (seen >= self.keys[keys]).all():
            self.wrong.append(f"{self.name}, push_pull of keys: pushes of its own are missing")

    # What this one alone pushes to.

    def do_push_own_rows(self) -> None:
        span = self._span(OWN)
        grad = self._gradient(span.stop - span.start, ROW)
        self.futures.append(self.tensors.own[span].push(grad))
        self.own[span] += grad

    def do_push_all_own(self) -> None:
        grad = self._gradient(OWN, ROW)
        self.futures.append(self.tensors.own.push(grad))
        self.own += grad

    def do_push_pull_own_rows(self) -> None:
        span = self._span(OWN)
        grad = self._gradient(span.stop - span.start, ROW)
        self.own[span] += grad
        self._expect("push_pull of rows", self.tensors.own[span].push_pull(grad), self.own[span])

    def do_push_pull_all_own(self) -> None:
        grad = self._gradient(OWN, ROW)
        self.own += grad
        self._expect("push_pull", self.tensors.own.push_pull(grad), self.own)

    def do_pull_own(self) -> None:
        self._expect("pull", self.tensors.own.pull(), self.own)

    def do_step(self) -> None:
        rows, grad, keys = self._gradient(OWN, ROW), self._gradient(WIDE, ROW), [self.random.randrange(KEYS)]
        with self.cluster.step() as step:
            step.push(self.tensors.own, rows)
            step.push(self.tensors.wide, grad)
            seen = step.push_pull(self.tensors.own, rows)
            step.push(self.tensors.table, keys, np.ones((1, DIM), np.float32))
        self.own += 2 * rows
        self.wide += grad
        self.keys[keys] += 1
        self._expect("step", seen, self.own)

    def do_delete(self) -> None:
        keys = np.arange(self.random.randint(1, 30)) + 1000 * (self.number + 1)
        self.tensors.brief.push(keys[::2], self._gradient(len(keys[::2]), DIM, dtype=np.float32))
        if (deleted := self.tensors.brief.delete(keys)) != len(keys[::2]):
            self.wrong.append(f"{self.name}: delete of {len(keys[::2])} rows counted {deleted}")


@dataclasses.dataclass
class Opened:
    """What a hand works on."""

    wide: wl.Tensor
    own: wl.Tensor
    table: wl.Table
    brief: wl.Table


class Load:
    """`pushes` pushes by `hands` threads of two workers, at least; ``run()`` returns what was wrong."""

    def __init__(
        self,
        network: Network,
        pushes: int,
        *,
        seed: int,
        hands: int = 4,
        operations: tuple[str, ...] = OPERATIONS,
        **connect: Any,
    ) -> None:
        self.network, self.seed, self.operations, self.connect = network, seed, operations, connect
        self._lock = threading.Lock()
        self._left = pushes
        self.clusters = [network.connect(rank=i, world_size=2, **connect) for i in range(2)]
        self.hands = [Hand(self, i, self.clusters[i % 2]) for i in range(hands)]

    def open(self, cluster: wl.Cluster, hand: int) -> Opened:
        return Opened(
            cluster.tensor("wide", (WIDE, ROW), rule=wl.Sum(), dtype=np.int64),
            cluster.tensor(f"own-{hand}", (OWN, ROW), rule=wl.Sum(), dtype=np.int64),
            cluster.table("table", DIM, rule=wl.Sum()),
            cluster.table("brief", DIM, rule=wl.Sum()),
        )

    def take(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0

    def stop(self) -> None:
        with self._lock:
            self._left = 0

    @property
    def pushes(self) -> int:
        return sum(hand.pushes for hand in self.hands)

    def run(self, faults: Faults, seconds: float) -> list[str]:
        """Pushes while the faults are made. What the threads saw, and then a fresh client, that should not be."""
        self.network.spoil(faults)
        deadline = time.monotonic() + seconds
        for hand in self.hands:
            hand.thread.start()
        for hand in self.hands:
            hand.thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [f"{hand.name} is stuck after {hand.pushes} pushes" for hand in self.hands if hand.thread.is_alive()]
        self.network.spoil(Faults())
        return [*stuck, *(text for hand in self.hands for text in hand.wrong), *self._totals()]

    def _totals(self) -> list[str]:
        wrong = []
        with self.network.connect(**self.connect) as reader:  # which has no pushes of its own to wait for
            pairs = []
            for i, hand in enumerate(self.hands):
                opened = self.open(reader, i)
                pairs.append((f"own-{i}", opened.own.pull(), hand.own))
            pairs.append(("wide", opened.wide.pull(), sum(hand.wide for hand in self.hands)))
            keys = sum(hand.keys for hand in self.hands)
            pairs.append(("table", opened.table.pull(np.arange(KEYS), create=False), keys))
            for name, seen, expected in pairs:
                if not np.array_equal(seen, expected):
                    total = f"the total is {int(seen.sum())}, expected {int(expected.sum())}"
                    wrong.append(f"{name}: {(seen != expected).sum()} numbers are wrong; {total}")
            for name, table, rows in [
                ("table", opened.table, int((keys != 0).any(1).sum())),
                ("brief", opened.brief, 0),
            ]:
                if len(table) != rows:
                    wrong.append(f"{name} has {len(table)} rows, expected {rows}")
        return wrong

    def close(self) -> None:
        for cluster in self.clusters:
            cluster.close(timeout=5)
