"""Tensors that are alike lie on the same servers, and move together."""

import contextlib
import random
import threading
import time

import pytest
from brain import Brain, started
from helpers import PATIENCE_S
from specs import table_spec

import windlass as wl
from windlass._net.address import Address, dial
from windlass._net.handshake import SERVER, greet
from windlass._net.move import ARRIVALS_MAX
from windlass.control import messages as m
from windlass.control.moves import TO_ONE_MAX
from windlass.testing import LocalCluster

SIZE = 100_000  # int64: 13 shards


def owners(brain: Brain, name: str) -> list[int]:
    return brain.state.objects[brain.state.by_name[f"default/{name}"]].owners


def orders(brain: Brain, server: int) -> dict[int, m.MoveShard]:
    """What the server was told to move and has not answered for, by object."""
    told = [message for message in brain.told[100 + server] if isinstance(message, m.MoveShard)]
    return {order.object: order for order in told if order.move in brain.state.moves.going}


def a_group() -> Brain:
    """w, d and e on two servers, with others between them, so that placement alone would put them elsewhere."""
    brain = started(servers=2)
    for name, like in [("w", ""), ("a", ""), ("d", "w"), ("b", ""), ("e", "w")]:
        assert not brain.open(200, f"default/{name}", size=300_000, like=like).error
    brain.join("operator", 900)
    return brain


# -- placement ---------------------------------------------------------------------------------------------------------


def test_a_tensor_that_is_like_another_is_where_that_one_is():
    brain = a_group()
    assert owners(brain, "w") == owners(brain, "d") == owners(brain, "e")
    assert len(set(owners(brain, "w"))) == 2
    assert brain.state.load_bytes == {
        server: sum(
            size
            for o in brain.state.objects.values()
            for owner, size in zip(o.owners, o.shard_bytes, strict=True)
            if owner == server
        )
        for server in (0, 1)
    }


def test_it_is_where_that_one_is_by_now():
    brain = a_group()
    shard = owners(brain, "w").index(0)
    brain.say(900, m.Move(1, "default/w", shard, 1))
    for order in list(orders(brain, 0).values()):
        brain.say(100, m.Moved(order.move))
    placed = brain.open(201, "default/f", 300_000, like="w").placed[0]
    assert owners(brain, "f") == owners(brain, "w")
    assert {term for _, _, term in placed.runs} == {1}


@pytest.mark.parametrize(
    ("name", "size", "like", "error", "why"),
    [
        ("default/x", 10, "nobody", "NotFound", "'x': like 'nobody': there is no such tensor"),
        ("default/x", 10, "rows", "NotFound", "there is no such tensor"),
        ("default/x", 300_000, "d", "InvalidArgument", "that one is like 'default/w' itself"),
        ("default/x", 10, "w", "InvalidArgument", r"expected float32(300000,), saw float32(10,)"),
        ("other/x", 300_000, "w", "NotFound", "only app 'other' can make it"),
        ("default/d", 300_000, "a", "SpecMismatch", "like='w'"),
        ("default/d", 300_000, "", "SpecMismatch", "like='w'"),
    ],
)
def test_what_cannot_be_like_another_is_refused(name: str, size: int, like: str, error: str, why: str):
    brain = a_group()
    brain.ask(200, m.Open(9, table_spec("default/rows", 4)))
    before = dict(brain.state.by_name)
    answer = brain.open(200, name, size, like=like)
    assert answer.error == error
    assert why in answer.why
    assert brain.state.by_name == before


def test_nothing_is_placed_on_a_server_that_is_lost():
    brain = a_group()
    brain.die(101)
    answer = brain.open(200, "default/f", 300_000, like="w")
    assert answer.error == "ServerLost"
    assert "was on server 1, which is lost" in answer.why


# -- moves -------------------------------------------------------------------------------------------------------------


def test_shards_that_are_alike_move_together_whichever_is_named():
    for named in ("w", "d", "e"):
        brain = a_group()
        shard = owners(brain, "w").index(0)
        brain.say(900, m.Move(1, f"default/{named}", shard, 1))
        todo = orders(brain, 0)
        assert sorted(todo) == [1, 3, 5]
        assert {order.shard for order in todo.values()} == {shard}
        for order in todo.values():
            assert not [told for told in brain.told[900] if isinstance(told, m.Answer)]  # not before the last
            brain.say(100, m.Moved(order.move))
        assert brain.last(900, m.Answer) == m.Answer(1)
        assert owners(brain, "w")[shard] == owners(brain, "d")[shard] == owners(brain, "e")[shard] == 1
        assert len({told.object for told in brain.told[200] if isinstance(told, m.ShardMoved)}) == 3


def test_what_is_opened_while_they_move_goes_along():
    brain = a_group()
    shard = owners(brain, "w").index(0)
    brain.say(900, m.Move(1, "default/w", shard, 1))
    first, *rest = orders(brain, 0).values()
    brain.say(100, m.Moved(first.move))
    for name in ("f", "g"):
        brain.open(200, f"default/{name}", 300_000, like="w")
    for order in rest:
        brain.say(100, m.Moved(order.move))
    late = orders(brain, 0)
    assert len(late) + len([o for o in "fg" if owners(brain, o)[shard] == 1]) == 2
    for order in late.values():
        brain.say(100, m.Moved(order.move))
    assert brain.last(900, m.Answer) == m.Answer(1)
    assert len({tuple(owners(brain, name)) for name in "wdefg"}) == 1


def test_where_one_cannot_move_the_others_come_back():
    brain = a_group()
    shard = owners(brain, "w").index(0)
    brain.say(900, m.Move(1, "default/w", shard, 1))
    one, two, three = orders(brain, 0).values()
    brain.say(100, m.Moved(one.move))
    brain.say(100, m.Moved(two.move, "no memory there"))
    brain.say(100, m.Moved(three.move))
    assert brain.last(900, m.Answer) == m.Answer(1, "ServerLost", "no memory there")
    back = orders(brain, 1)
    assert sorted(back) == [one.object, three.object]
    assert all(order.server == 0 and order.term > one.term for order in back.values())
    brain.say(101, m.Moved(back[one.object].move, "no memory here either"))  # is not tried for ever
    brain.say(101, m.Moved(back[three.object].move))
    assert not brain.state.moves.going
    brain.say(900, m.Move(2, "default/d", shard, 0))  # asked again, only those that are elsewhere move
    assert sorted(orders(brain, 1)) == [one.object]


def a_large_group(alike: int = 20) -> tuple[Brain, int]:
    """Tensors that are alike, one of whose shards is to move from server 0 to 1; and which one."""
    brain = started(servers=2)
    brain.join("operator", 900)
    for i in range(alike):
        assert not brain.open(200, f"default/w{i}", size=300_000, like="w0" if i else "").error
    shard = owners(brain, "w0").index(0)
    brain.say(900, m.Move(1, "default/w3", shard, 1))
    return brain, shard


def test_of_many_that_are_alike_few_move_at_once_and_all_arrive():
    brain, shard = a_large_group()
    moved = 0
    while todo := orders(brain, 0):
        assert len(todo) == min(4, 20 - moved)
        brain.say(100, m.Moved(next(iter(todo.values())).move))
        moved += 1
    assert moved == 20
    assert brain.last(900, m.Answer) == m.Answer(1)
    assert {owners(brain, f"w{i}")[shard] for i in range(20)} == {1}


def test_a_move_that_was_not_ordered_yet_is_told_to_nobody_and_believed_of_nobody():
    brain, _ = a_large_group()
    waiting = [move for move, v in brain.state.moves.going.items() if not v.ordered]
    assert len(waiting) == 16
    brain.say(100, m.Moved(waiting[0]))
    assert waiting[0] in brain.state.moves.going
    before = len(brain.told[100])
    brain.join("server", 100, rank=0)  # it was away
    again = [told for told in brain.told[100][before:] if isinstance(told, m.MoveShard)]
    assert len(again) == 4


@pytest.mark.parametrize("dead", [0, 1])
def test_a_server_that_dies_during_a_move_of_many_ends_all_of_them(dead: int):
    brain, shard = a_large_group()
    todo = orders(brain, 0)
    brain.die(100 + dead)
    for order in todo.values():
        brain.say(100, m.Moved(order.move, "cancelled"))
    assert brain.last(900, m.Answer).error == "ServerLost"
    assert not brain.state.moves.going
    assert {owners(brain, f"w{i}")[shard] for i in range(20)} == {0}


def test_one_move_of_a_shard_at_a_time():
    brain = a_group()
    shard = owners(brain, "w").index(0)
    brain.say(900, m.Move(1, "default/w", shard, 1))
    assert "it is on its way already" in brain.ask(900, m.Move(2, "default/d", shard, 1)).why


@pytest.mark.parametrize("dead", [0, 1])
def test_a_server_that_dies_during_a_move_ends_it(dead: int):
    brain = a_group()
    shard = owners(brain, "w").index(0)
    brain.say(900, m.Move(1, "default/w", shard, 1))
    todo = orders(brain, 0)
    brain.die(100 + dead)
    for order in todo.values():
        brain.say(100, m.Moved(order.move, "cancelled"))
    assert brain.last(900, m.Answer).error == "ServerLost"
    assert not brain.state.moves.going


def test_in_any_history_shards_that_are_alike_end_up_together():
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    for _ in range(100):
        brain = started(servers=3)
        brain.join("operator", 900)
        names = ["w"]
        brain.open(200, "default/w", 300_000)
        for number in range(1, 60):
            match source.randrange(4):
                case 0 if len(names) < 6:
                    names.append(f"d{number}")
                    assert not brain.open(200, f"default/{names[-1]}", 300_000, like="w").error
                case 1:
                    shards = len(owners(brain, "w"))
                    name, shard = source.choice(names), source.randrange(shards)
                    brain.say(900, m.Move(number, f"default/{name}", shard, source.randrange(3)))
                case _ if brain.state.moves.going:
                    move, v = source.choice(list(brain.state.moves.going.items()))
                    fails = v.asker and source.random() < 0.2
                    brain.say(100 + v.source, m.Moved(move, "no memory" if fails else ""))
        while brain.state.moves.going:
            move, v = next(iter(brain.state.moves.going.items()))
            brain.say(100 + v.source, m.Moved(move))
        assert len({tuple(owners(brain, name)) for name in names}) == 1
        assert not brain.state.moves.errors


# -- with servers ------------------------------------------------------------------------------------------------------


def test_vector_operations_go_on_while_shards_move():
    """Each is done once on every shard, though the two halves of a shard do not arrive at the same moment."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    with LocalCluster(servers=3) as cluster, cluster.connect() as worker, cluster.operator() as operator:
        y = worker.tensor("y", SIZE, rule=wl.Sum(), dtype="int64")
        x = worker.tensor("x", like=y, init=wl.Constant(1))
        shards, done = y.shards, threading.Event()

        def move() -> None:
            for _ in range(60):
                operator.move(
                    source.choice(["default/x", "default/y"]), source.randrange(shards), source.randrange(3), 30
                )
            done.set()

        thread = threading.Thread(target=move)
        thread.start()
        total = rounds = 0
        while not done.is_set():
            rounds += 1
            y.axpy(rounds, x, timeout=30)
            total += rounds
            assert y.dot(x, timeout=30) == total * SIZE
        thread.join()
        assert set(y.pull().tolist()) == {total}
        z = worker.tensor("z", like=x)
        z.copy_from(y)
        assert [z._core.owner(i)[0] for i in range(shards)] == [y._core.owner(i)[0] for i in range(shards)]
        print(f"{rounds} rounds")


def test_a_tensor_is_opened_like_one_whose_shards_are_on_their_way():
    with LocalCluster(servers=2) as cluster, cluster.connect() as worker, cluster.operator() as operator:
        w = worker.tensor("w", SIZE, rule=wl.Sum(), dtype="int64", init=wl.Constant(2))
        stop = threading.Event()

        def move() -> None:
            source = random.Random(1)
            while not stop.is_set():
                operator.move("default/w", source.randrange(w.shards), source.randrange(2), 30)

        thread = threading.Thread(target=move)
        thread.start()
        try:
            tensors = []
            for i in range(10):
                tensors.append(worker.tensor(f"d{i}", like=w))
                tensors[-1].copy_from(w)
                assert tensors[-1].dot(w) == 4 * SIZE
        finally:
            stop.set()
            thread.join()
        for t in tensors:
            assert t.dot(tensors[0]) == 4 * SIZE


def test_more_tensors_that_are_alike_than_a_server_takes_at_once_move_together():
    with (
        LocalCluster(servers=2, failure_timeout=60.0) as cluster,
        cluster.connect() as worker,
        cluster.operator() as operator,
        contextlib.ExitStack() as stack,
    ):
        first = worker.tensor("w0", 1000, rule=wl.Sum())
        alike = [first, *(worker.tensor(f"w{i}", like=first, init=wl.Constant(i)) for i in range(1, 40))]
        home = first._core.owner(0)[0]
        target = cluster.members("server")[1 - home]
        for _ in range(ARRIVALS_MAX - TO_ONE_MAX):  # what is left is just enough
            deadline = time.monotonic() + PATIENCE_S
            sock = stack.enter_context(dial(Address.parse(target["address"]), deadline))
            greet(sock, cluster.token.encode(), None, deadline, role=SERVER)
        process = next(process for process in cluster.servers if process.pid == target["pid"])
        process.stop()
        timer = threading.Timer(1.0, process.cont)  # all that set off by then arrive at once
        timer.start()
        operator.move("default/w0", 0, 1 - home, timeout=PATIENCE_S)
        timer.join()
        assert [float(w.pull()[0]) for w in alike] == list(range(40))
        assert {w._core.owner(0)[0] for w in alike} == {1 - home}


def test_an_anchor_is_deleted_after_those_that_are_like_it():
    brain = started()
    numbers = {
        name: brain.open(200, f"default/{name}", size=300_000, like=like).placed[0].object
        for name, like in [("w", ""), ("d", "w"), ("b", ""), ("e", "w")]
    }
    refused = brain.ask(200, m.Delete(2, numbers["w"]))
    assert refused.error == "InvalidArgument"
    assert refused.why.endswith("they must be deleted first: 'd', 'e'")
    for name in "dew":
        assert not brain.ask(200, m.Delete(3, numbers[name])).error
    assert [o.name for o in brain.state.objects.values()] == ["default/b"]
