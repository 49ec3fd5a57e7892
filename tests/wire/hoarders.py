"""For processes of their own: clients that ask for much and read nothing, and their server's memory meanwhile."""

import contextlib
import json
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np
import raw
from crew import together

import windlass as wl
from windlass.testing import Servers

MIB = 1 << 20
MODEL_BYTES, SHARDS = 16 * MIB, 64  # of 256 KiB
TICK = 18
APP = "raw"


class Watch:
    """The largest memory of a server while it is watched."""

    def __init__(self, servers: Servers, caps_bytes: int) -> None:
        self.caps_bytes, self.bytes_max = caps_bytes, 0
        self._servers, self._over = servers, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.wait(0.01):
            self.bytes_max = max(self.bytes_max, self._servers.rss_bytes(0))

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()


@contextlib.contextmanager
def one_server(kind: str, memory: int = 32 * MIB, staging: int = 32 * MIB) -> Iterator[tuple[Servers, Watch]]:
    """A server with caps, and its memory."""
    with (
        Servers(1, kind=kind, threads=2, memory_bytes_max=memory, staging_bytes_max=staging) as servers,
        Watch(servers, memory + staging) as watch,
    ):
        yield servers, watch


def report(watch: Watch, **seen: object) -> None:
    print(json.dumps({"rss_bytes": watch.bytes_max, "caps_bytes": watch.caps_bytes, **seen}))


def pull_many_times(client: raw.RawClient, shard: int, times: int) -> bytes:
    """A frame that asks for one shard so many times over, in one answer."""
    elements = MODEL_BYTES // 4 // SHARDS
    items = struct.pack("<QQ", shard * elements, elements) * times
    return client.frame(raw.PULL, [raw.Part(shard=shard, items=items, count=times)], object=1, dtype_in=0, dtype_out=0)


def pull_of_all(client: raw.RawClient, clock: int, dtype: int) -> bytes:
    """A frame that asks for the whole model."""
    parts = [raw.Part(shard=shard, clock=clock, flags=raw.WHOLE) for shard in range(SHARDS)]
    return client.frame(raw.PULL, parts, object=1, dtype_in=0, dtype_out=dtype)


def send_until_full(client: raw.RawClient, frames: list[bytes]) -> int:
    """Sends what the server takes, and returns how many whole frames that were."""
    client.sock.settimeout(0.5)
    for i, frame in enumerate(frames):
        try:
            client.sock.sendall(frame)
        except TimeoutError:
            return i
    return len(frames)


def at_a_gate(kind: str, pulls: int) -> None:
    """Rank 1 is an iteration ahead and asks for the model over and over; then rank 0 opens the gate."""
    with (
        one_server(kind) as (servers, watch),
        servers.connect(app=APP, rank=0, world_size=2, transport="socket") as cluster,
    ):
        w = cluster.tensor("w", MODEL_BYTES // 4, rule=wl.Sum(), sync=wl.SSP(0))
        with raw.RawClient(servers.addresses[0], app=APP, rank=1, world_size=2) as ahead:
            (ticked,) = ahead.ask(TICK, [raw.Part(clock=1)])
            assert ticked.status == 0, ticked
            taken = send_until_full(ahead, [pull_of_all(ahead, 1, 0) for _ in range(pulls)])
            before = watch.bytes_max
            w.push(np.ones(MODEL_BYTES // 4, np.float32)).wait()
            cluster.tick()
            time.sleep(0.5)
            ahead.sock.settimeout(30)
            answered = 0
            while answered < 2 * SHARDS:  # who reads gets answers
                answered += len(ahead.read())
            assert (w.pull() == 1).all()
            report(watch, taken=taken, at_gate_bytes=before, answered=answered)


def without_reading(kind: str, clients: int, times: int) -> None:
    """Readers ask for much, in answers of so many times 256 KiB, and read nothing; a worker trains on."""
    with (
        one_server(kind) as (servers, watch),
        servers.connect(app=APP, transport="socket", timeout=60) as cluster,
        contextlib.ExitStack() as stack,
    ):
        w = cluster.tensor("w", MODEL_BYTES // 4, rule=wl.Sum())
        taken = 0
        for i in range(clients):
            reader = stack.enter_context(raw.RawClient(servers.addresses[0], app=APP, rank=0, world_size=0))
            taken += send_until_full(reader, [pull_many_times(reader, i % SHARDS, times) for _ in range(20)])
        for _ in range(5):
            got = w.push_pull(np.ones(MODEL_BYTES // 4, np.float32))
        assert (got == 5).all()
        report(watch, taken=taken)


def honest_bsp(kind: str, workers: int, iterations: int) -> None:
    """Workers of one process that read as fast as they can. Their model is larger than what may be under way."""
    grad = np.ones(64 * MIB // 4, np.float32)

    def work(worker: wl.Cluster) -> float:
        w = worker.tensor("w", grad.size, rule=wl.Sum(), sync=wl.BSP())
        for _ in range(iterations):
            got = w.push_pull(grad)
        return float(got[-1])

    with (
        one_server(kind, 128 * MIB, 64 * MIB) as (servers, watch),
        servers.connect(transport="socket", timeout=120) as cluster,
    ):
        results = together(cluster, workers, work)
        assert results == [float(workers * iterations)] * workers, results
        report(watch)
