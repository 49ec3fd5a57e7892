"""Shards move between servers while clients push and pull, and every push is applied once.

Each run prints its seed. With the mechanism switched off (WINDLASS_BREAK=move), the same load is red.
"""

import contextlib
import pathlib
import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from helpers import PATIENCE_S, check_python, new_app, numbers, rng
from moving import TOKEN, Cutter, Moving, Server
from witness import Load

import windlass as wl
from windlass._net.address import Address, dial
from windlass._net.handshake import SERVER, greet
from windlass._net.move import ARRIVALS_MAX, send_shard
from windlass.testing import Faults, Servers

LONG = pytest.mark.timeout(4000)


def some_seed() -> int:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return seed


@pytest.fixture(params=["tcp", "unix", "arena"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def shards_of(load: Load) -> list[tuple[int, int]]:
    """What a load works on: all shards of its tensors, and as many of its tables."""
    shards = []
    for hand in load.hands:
        opened = hand.tensors
        shards += [(opened.own._core.object, i) for i in range(opened.own._core.shards)]
    shards += [(opened.wide._core.object, i) for i in range(opened.wide._core.shards)]
    for table in (opened.table, opened.brief):
        shards += [(table._core.object, i) for i in range(0, 256, 16)]
    return sorted(set(shards))


def check_moves(moving: Moving, seed: int, moves: int, seconds: float = 60, **arguments: object) -> int:
    """A load while shards are moved about: nothing is lost, nothing doubled. Returns how many pushes there were."""
    load = Load(moving, 10**9, seed=seed, app=new_app(), **arguments)
    wrong: list[str] = []
    thread = threading.Thread(target=lambda: wrong.extend(load.run(Faults(), seconds)))
    thread.start()
    try:
        moving.shuffle(shards_of(load), random.Random(seed), moves)
    finally:
        load.stop()
        thread.join()
    assert not wrong, "\n".join(wrong[:20])
    load.close()
    return load.pushes


@LONG
def test_the_witness_is_exact_while_three_servers_exchange_shards(kind: str, accurate: bool):
    seed, moves = some_seed(), 5000 if accurate else 150
    with Moving(kind) as moving:
        pushes = check_moves(moving, seed, moves, 3600 if accurate else 60, hands=6)
        print(f"{moving.moves} moves on {kind} under {pushes} pushes")
        assert moving.moves == moves
        assert pushes >= moves


def one_shard(cluster: wl.Cluster, name: str = "w") -> wl.Tensor:
    """A tensor that is one shard, on the first server."""
    tensor = cluster.tensor(name, (10,), rule=wl.Sum(), dtype=np.int64)
    tensor.push(np.ones(10, np.int64)).wait()
    return tensor


def keys_of(shard: int, n: int) -> np.ndarray:
    """Keys that belong to one shard of a table: those whose hash begins with it (csrc/base/hash.h)."""
    x = rng(shard).integers(0, 1 << 56, n, np.uint64) + np.uint64(shard << 56)
    for _ in range(2):
        x = (x ^ (x >> np.uint64(32))) * np.uint64(0xCFEE444D8B59A89B)
    return x ^ (x >> np.uint64(32))


def eventually(what: Callable[[], object], seconds: float = 10.0) -> None:
    """Tries again until it raises nothing."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            what()
            return
        except wl.WindlassError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)


# -- quiet moves -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule", [wl.Adam(lr=0.1), wl.RowAdagrad(lr=0.1), wl.Sum()], ids=lambda rule: type(rule).__name__
)
def test_a_quiet_move_changes_no_bit(kind: str, rule: wl.Rule):
    with Moving(kind) as moving, moving.connect() as cluster:
        w = cluster.tensor("w", (4000, 25), rule=rule, init=wl.Normal(std=0.1))
        t = cluster.table("t", 16, rule=rule, init=wl.Normal(std=0.1))
        for seed in range(3):
            w.push(numbers(4000, 25, seed=seed)).wait()
            t.push(np.arange(5000), numbers(5000, 16, seed=seed)).wait()
        t.delete(np.arange(0, 5000, 7))
        prints = w.fingerprint(), t.fingerprint(), len(t)
        version = w.pull_newer()
        for core in (w._core, t._core):
            for shard in range(getattr(core, "shards", 256)):
                moving.move(core.object, shard, (moving.owner(core.object, shard) + 1) % 3)
        assert (w.fingerprint(), t.fingerprint(), len(t)) == prints
        assert not w.pull_newer(version.version).changed


def test_a_move_that_was_made_is_not_made_again_and_one_without_sense_is_refused():
    with Moving("tcp", 2) as moving, moving.connect() as cluster:
        tensor = one_shard(cluster)
        assert moving.move(1, 0, 1) == 2
        again = {"to": moving.servers[1].address, "token": TOKEN, "server": 1, "deadline": time.monotonic() + 5}
        send_shard(moving.servers[0].host, 1, 0, term=2, **again)
        with pytest.raises(wl.StaleMap, match="server number 1 since term 2"):
            send_shard(moving.servers[0].host, 1, 0, term=3, **again)
        with pytest.raises(wl.NotFound):
            send_shard(moving.servers[0].host, 9, 0, term=3, **again)
        with pytest.raises(wl.AccessDenied):
            send_shard(
                moving.servers[1].host,
                1,
                0,
                term=3,
                to=moving.servers[0].address,
                token=b"wrong",
                server=0,
                deadline=time.monotonic() + 5,
            )
        assert (tensor.pull() == 1).all()
        moving.move(1, 0, 0)
        assert (tensor.pull() == 1).all()


def test_a_move_that_is_cancelled_before_its_end_leaves_the_shard_where_it_was():
    with Moving("tcp", 2) as moving, moving.connect() as cluster:
        tensor = one_shard(cluster)
        to = {"to": moving.servers[1].address, "token": TOKEN, "server": 1, "deadline": time.monotonic() + 5}
        cancelled = threading.Event()
        cancelled.set()
        with pytest.raises(wl.ServerLost, match=r"move of object 1, shard 0 to .* was given up meanwhile"):
            send_shard(moving.servers[0].host, 1, 0, term=2, **to, cancelled=cancelled)
        assert moving.owner(1, 0) == 0
        assert (tensor.pull() == 1).all()
        send_shard(moving.servers[0].host, 1, 0, term=3, **to, cancelled=threading.Event())
        assert moving.owner(1, 0) == 1


# -- what goes wrong -------------------------------------------------------------------------------------------------


@LONG
@pytest.mark.parametrize("table", [False, True], ids=["tensor", "table"])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_connection_cut_at_any_byte_of_a_transfer_leaves_the_shard_where_it_was(
    direction: str, table: bool, accurate: bool
):
    with Moving("tcp", 2) as moving, moving.connect() as cluster:
        tensor = one_shard(cluster)
        rows, keys = cluster.table("t", 2, rule=wl.Sum()), keys_of(0, 5)
        rows.push(keys, np.ones((5, 2), np.float32)).wait()
        object = rows._core.object if table else tensor._core.object
        home = moving.owner(object, 0)
        away = moving.servers[1 - home].address
        with Cutter(away, direction, 1 << 62) as cutter:
            moving.move(object, 0, 1 - home, address=cutter.address)
            total = cutter.passed[direction]
        moving.move(object, 0, home)
        assert total > 120
        pushes, cut = 1, 0
        for byte in range(0, total, 1 if accurate else 5):
            with Cutter(away, direction, byte) as cutter:
                with pytest.raises(wl.WindlassError):
                    moving.move(object, 0, 1 - home, address=cutter.address)
                cut += 1
            assert moving.owner(object, 0) == home
            tensor.push(np.ones(10, np.int64)).wait()
            rows.push(keys, np.ones((5, 2), np.float32)).wait()
            pushes += 1
            assert (tensor.pull() == pushes).all()
            assert (rows.pull(keys) == pushes).all()
        print(f"{cut} cuts {direction} within {total} bytes")
        eventually(lambda: moving.move(object, 0, 1 - home))  # the target lets go of a copy once it sees the end
        tensor.push(np.ones(10, np.int64)).wait()
        assert (tensor.pull() == pushes + 1).all()
        assert (rows.pull(keys) == pushes).all()


def test_a_target_that_does_not_answer_is_not_waited_for_and_what_came_meanwhile_is_applied():
    with Moving("tcp", 2) as moving, moving.connect() as cluster:
        tensor = one_shard(cluster)
        with Cutter(moving.servers[1].address, "down", 112, hangs=True) as cutter:  # it was let in, and no more
            ended: list[wl.WindlassError] = []

            def move() -> None:
                try:
                    moving.move(1, 0, 1, seconds=1.5, address=cutter.address)
                except wl.WindlassError as error:
                    ended.append(error)

            mover, begun = threading.Thread(target=move), time.monotonic()
            mover.start()
            time.sleep(0.5)
            futures = [tensor.push(np.ones(10, np.int64)) for _ in range(20)]
            assert not futures[0].done()  # the shard is frozen
            for future in futures:
                future.wait()
            assert time.monotonic() - begun < 5
            mover.join()
            assert [type(error) for error in ended] == [wl.Timeout]
        assert (tensor.pull() == 21).all()
        assert tensor._core.owner(0) == (0, 1)


def test_a_target_that_dies_in_the_middle_leaves_the_shard_where_it_was():
    seed = some_seed()
    source = random.Random(seed)
    for _ in range(4):
        with Moving("tcp", 1) as moving, Servers(1, token=TOKEN.decode()) as servers:
            addresses = [*moving.addresses, *servers.addresses]
            with moving.connect(servers=addresses, failure_timeout=1.0) as cluster:
                rows, keys = cluster.table("t", 64, rule=wl.Sum()), keys_of(0, 40_000)
                for _ in range(2):
                    rows.push(keys, np.ones((len(keys), 64), np.float32)).wait()
                begun = threading.Event()

                def kill(servers: Servers = servers, begun: threading.Event = begun) -> None:
                    begun.wait(5)
                    time.sleep(source.uniform(0, 0.03))
                    servers.kill(0)

                killer = threading.Thread(target=kill)
                killer.start()
                try:
                    begun.set()
                    moving.move(1, 0, 1, address=Address.parse(servers.addresses[0]))
                    killer.join()
                    continue  # it was quicker
                except (wl.ServerLost, wl.Timeout) as error:
                    print(error)
                killer.join()
                rows.push(keys[:100], np.ones((100, 64), np.float32)).wait()
                assert (rows.pull(keys[:100]) == 3).all()
                assert (rows.pull(keys[100:]) == 2).all()


def test_a_shard_that_does_not_fit_stays_where_it_was():
    with Moving("tcp", 1) as moving:
        moving.servers.append(Server("tcp", memory_bytes_max=1_100_000))
        with moving.connect() as cluster:
            w = cluster.tensor("w", (1 << 17,), rule=wl.Adam(lr=0.1))  # 8 shards of 64 KiB, thrice: 4 on each
            w.push(np.ones(1 << 17, np.float32)).wait()
            before = w.fingerprint()
            here = [i for i in range(8) if moving.owner(1, i) == 0]
            moving.move(1, here[0], 1)
            with pytest.raises(wl.ResourceExhausted, match="memory_bytes_max=1100000"):
                moving.move(1, here[1], 1)
            assert w.fingerprint() == before
            assert [moving.owner(1, shard) for shard in here[:2]] == [1, 0]
            w.push(np.ones(1 << 17, np.float32)).wait()


def test_only_so_many_shards_arrive_at_once():
    with Moving("tcp", 2) as moving, moving.connect() as cluster:
        one_shard(cluster)
        address, deadline = moving.servers[1].address, time.monotonic() + 10
        with contextlib.ExitStack() as stack:
            for _ in range(ARRIVALS_MAX):
                sock = stack.enter_context(dial(address, deadline))
                greet(sock, TOKEN, None, deadline, role=SERVER)
            time.sleep(0.5)  # until the door has passed all of them on
            with pytest.raises(wl.ResourceExhausted, match="at most 8 shards"):
                moving.move(1, 0, 1)
        eventually(lambda: moving.move(1, 0, 1))


def test_surplus_connections_of_servers_do_not_hold_the_door():
    with Moving("tcp", 1) as moving, contextlib.ExitStack() as stack:
        address, deadline = moving.servers[0].address, time.monotonic() + PATIENCE_S
        surplus = []
        for _ in range(3 * ARRIVALS_MAX):  # of whom none reads or says anything
            sock = stack.enter_context(dial(address, deadline))
            greet(sock, TOKEN, None, deadline, role=SERVER)
            surplus.append(sock)
            begun = time.monotonic()
            with dial(address, deadline) as client:
                greet(client, TOKEN, None, deadline)
            assert time.monotonic() - begun < 0.9, f"{len(surplus)} servers hold the door"
        surplus[-1].settimeout(PATIENCE_S)
        assert b"at most 8 shards arrive at once" in surplus[-1].recv(4096)


def test_when_the_source_dies_after_the_move_clients_that_are_told_go_on(kind: str):
    with Moving(kind, 2) as moving, moving.connect(failure_timeout=20.0) as cluster:
        tensor = one_shard(cluster)
        other = cluster.worker(0, 1)
        with other:
            again = other.tensor("w", (10,), rule=wl.Sum(), dtype=np.int64)
            term = moving.move(1, 0, 1)
            moving.servers[0].close()
            futures = [tensor.push(np.ones(10, np.int64)) for _ in range(10)]
            time.sleep(0.2)
            assert not futures[0].done()  # it waits for the server that is gone
            for each in (cluster, other):
                each._dialer._links.moved(1, 0, 1, term)
            for future in futures:
                future.wait(timeout=5)
            assert (tensor.pull() == 11).all()
            again.push(np.ones(10, np.int64)).wait(timeout=5)
            assert (again.pull() == 12).all()


# -- how long it takes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["tensor", "table"])
def test_a_push_is_held_up_by_a_move_for_a_moment_only(what: str, accurate: bool):
    """A small push on a shard that moves to and fro: 4 MiB of a tensor, or 200,000 rows of 64."""
    moves = 30 if accurate else 6
    with Moving("tcp", 2) as moving, moving.connect() as cluster:
        if what == "tensor":
            w = cluster.tensor("w", (1 << 26,), rule=wl.Sum())
            object, shard = w._core.object, 3
            assert w._core.shards == 64
            some, grad = w[(shard << 20) + 5 : (shard << 20) + 15], np.ones(10, np.float32)

            def push() -> None:
                some.push(grad).wait()

        else:
            t, keys = cluster.table("t", 64, rule=wl.Sum()), keys_of(0, 200_000)
            object, shard = t._core.object, 0
            for at in range(0, len(keys), 10_000):
                t.push(keys[at : at + 10_000], np.ones((10_000, 64), np.float32)).wait()
            ones = np.ones((10, 64), np.float32)

            def push() -> None:
                t.push(keys[np.random.randint(0, len(keys), 10)], ones).wait()

        took: list[float] = []
        stop = threading.Event()

        def load() -> None:
            while not stop.is_set():
                begun = time.perf_counter()
                push()
                took.append(time.perf_counter() - begun)

        thread = threading.Thread(target=load)
        thread.start()
        begun = time.perf_counter()
        for _ in range(moves):
            moving.move(object, shard, 1 - moving.owner(object, shard))
        each = (time.perf_counter() - begun) / moves
        stop.set()
        thread.join()
        p50, p99, most = (np.quantile(took, q) * 1e3 for q in (0.5, 0.99, 1.0))
        print(f"{what}: {moves} moves of {each * 1e3:.1f} ms; {len(took)} pushes: {p50:.2f} {p99:.2f} {most:.2f} ms")
        assert most < 2000  # on a quiet machine it is a hundredth of that


# -- the mechanism switched off --------------------------------------------------------------------------------------


@pytest.mark.parametrize("switch", ["", "move"])
def test_without_its_records_a_shard_that_moves_loses_pushes(switch: str):
    code = """
        import contextlib, random, threading
        from moving import Moving
        from test_move import shards_of
        from windlass import WindlassError
        from windlass.testing import Faults
        from witness import Load

        with Moving("tcp") as moving:
            load = Load(moving, 10**9, seed=1, hands=4, timeout=3)
            wrong = []
            thread = threading.Thread(target=lambda: wrong.extend(load.run(Faults(), 20)))
            thread.start()
            moving.shuffle(shards_of(load), random.Random(1), 60)
            load.stop()
            thread.join()
            for text in wrong[:5]:
                print("WRONG", text)
            with contextlib.suppress(WindlassError):
                load.close()
            print("moves", moving.moves)
    """
    here = pathlib.Path(__file__).parent
    said = check_python(code, timeout=PATIENCE_S, PYTHONPATH=f"{here}:{here.parent}", WINDLASS_BREAK=switch)
    print(said)
    assert "moves 60" in said
    assert ("WRONG" in said) == bool(switch)
