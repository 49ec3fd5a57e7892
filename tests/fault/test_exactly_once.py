"""Every push is applied once, whatever happens to frames and connections: R8, R9, cuts at every byte.

Each run prints its seed, how many faults it made, and how many of them bit. With the mechanism behind it switched off
(WINDLASS_BREAK), the same load is red.
"""

import contextlib
import dataclasses
import functools
import pathlib
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures

import numpy as np
import pytest
from helpers import PATIENCE_S, check_python, new_app
from witness import Load, Network, network

import windlass as wl
from windlass.testing import Faults

LONG = pytest.mark.timeout(4000)
FAULTS_MIN = 200  # fewer, and a run says nothing
R8 = {"drop": 0.1, "duplicate": 0.1, "reorder": 0.1}
MIB = 1 << 20


@pytest.fixture(scope="module")
def networks() -> Iterator[Callable[[str, int], Network]]:
    """Gives the network of a socket kind with so many servers, which tests share: each takes an app of its own."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda kind, servers: stack.enter_context(network(kind, servers)))


@pytest.fixture(params=["tcp", "unix", "arena"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def net(kind: str, networks: Callable[[str, int], Network]) -> Network:
    shared = networks(kind, 2)
    shared.begin()
    return shared


TCP = pytest.mark.parametrize("kind", ["tcp"])


def some_seed() -> int:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return seed


def check_load(net: Network, what: str, faults: Faults, pushes: int, accurate: bool, **arguments: object) -> None:
    """A load under faults: enough of them were made, and everything is exact."""
    if net.transport == "arena":
        # No kernel doubles or reorders what a Unix socket carries. A request that comes twice could be served a second
        # time after its answer, and write an array that is no longer its own.
        faults = dataclasses.replace(faults, duplicate=0.0, reorder=0.0)
    load = Load(net, pushes, seed=faults.seed, app=new_app(), **arguments)
    started = time.monotonic()
    wrong = load.run(faults, 3600 if accurate else 60)
    made, bit = net.report(f"{what}: {load.pushes} pushes in {time.monotonic() - started:.1f} s")
    assert not wrong, "\n".join(wrong[:20])
    load.close()
    assert load.pushes == pushes
    assert min(made, bit) >= FAULTS_MIN, f"invalid: {made} faults were made and {bit} bit; {FAULTS_MIN} are needed"


def wait_for(what: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_with_arenas_memory_is_shared_through_the_proxy():
    """What the other tests with arenas rest on."""
    with network("arena", count=1) as net, net.connect() as cluster:
        w = cluster.tensor("w", 100_000, rule=wl.Sum())
        for _ in range(3):
            w.push(np.ones(100_000, np.float32)).wait()
        assert "/memfd:windlass" in pathlib.Path(f"/proc/{net.servers.pids[0]}/maps").read_text()
        assert (w.pull() == 3).all()


# -- faults of frames ------------------------------------------------------------------------------------------------


@LONG
def test_r8_dropped_doubled_and_reordered_frames_lose_and_double_no_push(kind: str, net: Network, accurate: bool):
    faults, pushes = Faults(**R8, seed=some_seed()), 1_000_000 if accurate else 2500
    check_load(net, f"R8 {kind}", faults, pushes, accurate, hands=16)


@LONG
def test_r9_no_corrupted_frame_is_accepted(kind: str, net: Network, accurate: bool):
    # On Unix sockets the kernel's copy is trusted and numbers carry no checksum, unless they are asked for.
    faults, pushes = Faults(corrupt=0.1, seed=some_seed()), 1_000_000 if accurate else 2000
    check_load(net, f"R9 {kind}", faults, pushes, accurate, hands=16, checksums=True)


@LONG
@pytest.mark.parametrize(
    ("faults", "pushes"),
    [
        ({"half_close": 0.05}, 1500),
        ({"cut": 0.05}, 1500),
        ({"delay": 0.1, "delay_ms": (1, 5)}, 1500),
        ({**R8, "corrupt": 0.1, "cut": 0.01, "half_close": 0.01, "delay": 0.02}, 500),
        ({**R8, "corrupt": 0.1, "cut": 0.02, "half_close": 0.02, "skip_hello": False}, 300),
    ],
    ids=["half_close", "cut", "delay", "everything", "everything and hello"],
)
def test_connections_that_end_or_are_slow_lose_and_double_no_push(
    kind: str, net: Network, faults: dict, pushes: int, accurate: bool
):
    spoiled, pushes = Faults(**faults, seed=some_seed()), 100 * pushes if accurate else pushes
    check_load(net, f"{'+'.join(faults)} {kind}", spoiled, pushes, accurate, hands=16, checksums=True)


@LONG
def test_large_requests_whose_answers_come_in_many_frames_are_exact(kind: str, net: Network, accurate: bool):
    seed = some_seed()
    source, size = random.Random(seed), 1 << 20  # int64 of 8 MiB, 64 shards
    expected = np.zeros(size, np.int64)
    with net.connect(app=new_app(), checksums=True) as cluster:
        tensor = cluster.tensor("w", (size,), rule=wl.Sum(), dtype=np.int64)
        grad, out, begun = cluster.empty(size, np.int64), cluster.empty(size, np.int64), []
        net.spoil(Faults(**R8, corrupt=0.05, cut=0.03, half_close=0.03, seed=seed))
        for i in range(300 if accurate else 30 if kind == "arena" else 12):  # frames in arenas are few
            first = source.randrange(size)
            last = source.randrange(first, size) + 1
            begun.append(tensor[first:last].push(np.full(last - first, i)))
            expected[first:last] += i
            grad[:] = i
            expected += i
            np.testing.assert_array_equal(tensor.push_pull(grad, out=out), expected)
        for future in begun:
            future.wait()
        np.testing.assert_array_equal(tensor.pull(out=out), expected)
        made, bit = net.report(f"large requests on {kind}: {2 * (i + 1)} pushes")
        net.spoil(Faults())
    assert min(made, bit) >= FAULTS_MIN, f"invalid: {made} faults were made and {bit} bit; {FAULTS_MIN} are needed"


# -- cuts ------------------------------------------------------------------------------------------------------------


def push_once(cluster: wl.Cluster) -> wl.Tensor:
    tensor = cluster.tensor("w", (5,), rule=wl.Sum(), dtype=np.int64)
    tensor.push(np.ones(5, np.int64)).wait()
    return tensor


def sizes_of(net: Network, app: str, direction: str) -> dict[int, int]:
    """The bytes of each frame of hello, enter, open, attach and the push (a step), by operation, in their order."""
    net.spoil(Faults(delay=1.0, delay_ms=(0, 0), skip_hello=False))
    with net.connect(servers=net.addresses[:1], app=app) as cluster:
        push_once(cluster)
        sizes = {hit.operation & 0x7F: hit.size for hit in net.hits if hit.direction == direction}
    net.spoil(Faults())
    assert list(sizes) == [1, 19, 4, 5, 16]
    return sizes


def check_cuts(net: Network, i: int, app: str, direction: str, cuts: Iterable[int], total: int) -> int:
    """Connects, opens and pushes to server i, with the connection cut at each of these bytes."""
    proxy = net.proxies[i]
    for made, byte in enumerate(cuts, 1):
        proxy.cut_at(direction, byte)  # the first connection of a client is its lane for small requests
        with net.connect(servers=[proxy.address], app=app, timeout=10) as cluster:
            np.testing.assert_array_equal(push_once(cluster).pull(), np.full(5, total + made), f"cut at byte {byte}")
            assert proxy.counts["cut_at"] == made, f"invalid: nothing was cut at byte {byte}"
    return proxy.counts["cut_at"]


@LONG
@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_connection_cut_at_any_byte_of_a_push_or_of_its_answer_costs_nothing(
    kind: str, networks: Callable[[str, int], Network], direction: str, accurate: bool
):
    servers = 5  # a cluster each, since a cut waits for the other end's kernel
    net, app = networks(kind, servers), new_app()
    net.begin()
    with futures.ThreadPoolExecutor(servers) as pool:
        sizes = sizes_of(net, app, direction)
        end = sum(sizes.values())
        begin = 0 if accurate else end - sizes[16]  # the long form cuts what comes before it, too
        cuts = [range(begin + i, end + 1, servers) for i in range(servers)]
        made = sum(pool.map(lambda i: check_cuts(net, i, app, direction, cuts[i], int(i == 0)), range(servers)))
        print(f"{made} cuts {direction} on {kind}, at every byte from {begin} to {end}; all bit")
        assert made == end + 1 - begin >= 129


# -- what else a push may meet ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [64, 1 << 16], ids=["small", "bulk"])
def test_a_push_that_timed_out_is_applied_once_though_its_connections_are_cut(net: Network, size: int):
    with net.connect(app=new_app()) as cluster:
        tensor = cluster.tensor("w", (size,), rule=wl.Sum(), dtype=np.int64)
        for i in range(1, 11):
            for proxy in net.proxies:
                proxy.pause()
                proxy.set(Faults(cut=1.0, seed=i))
            with pytest.raises(wl.Timeout, match="the push goes on"):
                tensor.push_pull(np.full(size, 1), timeout=0.01)
            future = tensor.push(np.full(size, 2))
            with pytest.raises(wl.Timeout, match="goes on and can be waited for again"):
                future.wait(timeout=0.01)
            for proxy in net.proxies:
                proxy.resume()
            wait_for(lambda i=i: net.proxies[0].counts["cut"] >= i)
            net.spoil(Faults())
            future.wait()
            np.testing.assert_array_equal(tensor.pull(), np.full(size, 3 * i))
        net.report(f"{size} numbers")


@pytest.mark.parametrize("what", ["push", "push_pull_async"])
@pytest.mark.parametrize("holds", ["tensor", "table"])
def test_of_what_was_cancelled_nothing_is_applied_and_of_the_rest_everything(
    networks: Callable[[str, int], Network], holds: str, what: str
):
    """The socket is full, so that some have left when they are cancelled and most have not."""
    net = networks("tcp", 1)
    net.begin()
    with net.connect(timeout=8, app=new_app()) as cluster:
        thing = (
            cluster.tensor("w", (MIB // 4, 1), rule=wl.Sum())
            if holds == "tensor"
            else cluster.table("w", 1, rule=wl.Sum())
        )
        keys = [] if holds == "tensor" else [np.arange(MIB // 4)]
        grads = [cluster.empty((MIB // 4, 1)) for _ in range(20)]
        net.proxies[0].pause()
        begun = []
        for grad in grads:
            grad[:] = 1
            begun.append(getattr(thing, what)(*keys, grad))
        time.sleep(0.1)
        cancelled = [future.cancel() for future in begun[::2]]
        net.proxies[0].resume()
        for future in begun[1::2]:
            future.wait()
        for future, taken_back in zip(begun[::2], cancelled, strict=True):
            if not taken_back:
                future.wait()
                continue
            with pytest.raises(wl.Cancelled):
                future.wait()
        print(f"{sum(cancelled)} of {len(cancelled)} were taken back")
        assert any(cancelled), "invalid: all had left"
        np.testing.assert_array_equal(thing.pull(*keys), np.full((MIB // 4, 1), len(begun) - sum(cancelled)))


def test_a_push_that_was_lost_ahead_of_more_than_a_server_parks_is_sent_again_soon(
    networks: Callable[[str, int], Network],
):
    """A server parks 64 MiB of pushes that wait for an earlier one, and refuses what comes then."""
    net, size = networks("tcp", 1), 3 << 16  # int64 of 1.5 MiB
    net.begin()
    with net.connect(app=new_app()) as cluster:
        tensor = cluster.tensor("w", (size,), rule=wl.Sum(), dtype=np.int64)
        grads = [cluster.empty(size, np.int64) for _ in range(80)]
        for grad in grads:
            grad[:] = 1
        net.spoil(Faults(drop=1.0, directions="up"))
        begun = [tensor.push(grads[0])]
        wait_for(lambda: net.dropped > 0)
        net.spoil(Faults())
        started, frames = time.monotonic(), net.proxies[0].frames["up"]
        begun += [tensor.push(grad) for grad in grads[1:]]
        for future in begun:
            future.wait(timeout=15)
        frames = net.proxies[0].frames["up"] - frames
        print(f"{len(begun)} pushes took {time.monotonic() - started:.1f} s and {frames} frames")
        np.testing.assert_array_equal(tensor.pull(), np.full(size, len(begun)))
        assert frames < 5 * len(begun)


@TCP
def test_a_push_that_was_lost_is_sent_again_soon_though_others_on_its_lane_are_answered(net: Network):
    with net.connect(app=new_app()) as cluster:
        lost, busy = (cluster.tensor(name, (4,), rule=wl.Sum(), dtype=np.int64) for name in ("lost", "busy"))
        answered, over = [0, 0], threading.Event()

        def pull(i: int) -> None:
            while not over.is_set():
                busy.pull()
                answered[i] += 1

        threads = [threading.Thread(target=pull, args=[i]) for i in range(2)]
        net.spoil(Faults(drop=1.0, directions="up"))
        future = lost.push(np.ones(4, np.int64))
        wait_for(lambda: net.dropped > 0)
        net.spoil(Faults())
        for thread in threads:
            thread.start()
        try:
            future.wait(timeout=3)
        finally:
            over.set()
            for thread in threads:
                thread.join()
            print(f"{sum(answered)} others were answered meanwhile")


@TCP
def test_a_repeated_push_pull_does_not_bring_back_a_row_that_was_deleted_meanwhile(net: Network):
    app = new_app()
    with net.connect(app=app) as cluster, net.connect(app=app) as other:
        table, same = (c.table("t", 4, rule=wl.Sum()) for c in (cluster, other))
        net.spoil(Faults(drop=1.0, directions="down"))
        future = table.push_pull_async([7], np.ones((1, 4), np.float32))
        wait_for(lambda: net.dropped > 0)  # it was applied, and its answer is lost
        net.spoil(Faults())
        assert same.delete([7]) == 1
        assert not future.done(), "invalid: the delete was not in time"
        future.wait()
        assert len(same) == 0


def lose_answers(net: Network) -> threading.Timer:
    """For some milliseconds nothing comes back."""
    net.spoil(Faults(drop=1.0, directions="down"))
    timer = threading.Timer(0.02, net.spoil, [Faults()])
    timer.start()
    return timer


@TCP
def test_a_repeated_delete_has_the_same_count(net: Network):
    with net.connect(app=new_app()) as cluster:
        table = cluster.table("t", 4, rule=wl.Sum())
        for i in range(1, 11):
            table.push(np.arange(100), np.ones((100, 4), np.float32)).wait()
            timer = lose_answers(net)
            assert table.delete(np.arange(150)) == 100
            timer.join()
            assert net.dropped >= i, "invalid: no answer was lost"


def test_a_repeated_push_that_was_refused_is_refused_again_and_used_its_number_up():
    with network("tcp", count=1, memory_bytes_max=3 * MIB) as net, net.connect() as cluster:
        table, tensor = cluster.table("t", 4, rule=wl.Sum()), cluster.tensor("w", (4,), rule=wl.Sum())
        for i in range(1, 11):
            timer = lose_answers(net)
            with pytest.raises(wl.ResourceExhausted, match="push of table 't'"):
                table.push([1], np.ones((1, 4), np.float32)).wait()
            timer.join()
            assert net.dropped >= i, "invalid: no answer was lost"
            np.testing.assert_array_equal(tensor.push_pull(np.ones(4, np.float32)), np.full(4, i))
        assert len(table) == 0


# -- the mechanisms switched off -------------------------------------------------------------------------------------


def run_load(switch: str, operations: tuple[str, ...], **faults: object) -> str:
    """What a short load says that is wrong, in a process of its own with that part of Windlass broken."""
    code = f"""
        import contextlib
        from witness import Load, network
        from windlass import WindlassError
        from windlass.testing import Faults

        with network("tcp") as net:
            load = Load(net, 150, seed=1, hands=4, operations={operations!r}, timeout=10)
            wrong = load.run(Faults(**{faults!r}, seed=1), 40)
            for text in wrong[:2] + wrong[-8:]:
                print("WRONG", text)
            net.report("{switch or "nothing"} is broken")
            with contextlib.suppress(WindlassError):  # with the sequence broken, some may wait in vain
                load.close()
    """
    here = pathlib.Path(__file__).parent
    said = check_python(code, timeout=PATIENCE_S, PYTHONPATH=f"{here}:{here.parent}", WINDLASS_BREAK=switch)
    print(said)
    return said


@pytest.mark.parametrize("switch", ["", "sequence"])
def test_with_the_sequence_ignored_doubled_frames_double_pushes(switch: str):
    said = run_load(switch, ("push rows", "push all", "push keys"), duplicate=0.3, directions="up")
    assert ("WRONG wide: " in said and "WRONG table: " in said) if switch else "WRONG" not in said


def test_with_the_sequence_ignored_lost_answers_double_pushes():
    said = run_load("sequence", ("push rows", "push all", "push keys"), drop=0.2, directions="down")
    assert "WRONG wide: " in said
    assert "WRONG table: " in said


@pytest.mark.parametrize("switch", ["", "checksums"])
def test_with_checksums_ignored_a_server_accepts_corrupted_pushes(switch: str):
    said = run_load(switch, ("push all",), corrupt=0.3, directions="up")
    assert ("WRONG wide: " in said) if switch else "WRONG" not in said


def test_with_checksums_ignored_a_client_accepts_corrupted_answers():
    said = run_load("checksums", ("push_pull all own",), corrupt=0.3, directions="down")
    assert "push_pull: " in said
    assert "numbers are wrong" in said
