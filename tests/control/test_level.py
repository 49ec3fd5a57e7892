"""Servers that are drained, in the state machine: few shards at a time, nothing is lost, failures are tried again."""

import pytest
from brain import Brain, started
from specs import table_spec

from windlass.control import messages as m

SHARDS = 16  # of a tensor of 1 MiB


def drained(servers: int = 3) -> Brain:
    """Server 1 is being drained."""
    brain = started(servers, 1)
    brain.open(200, size=1 << 20)
    brain.join("operator", 900)
    brain.say(900, m.Drain(1, 1))
    return brain


def answers(brain: Brain, who: int = 900) -> list[m.Answer]:
    return [one for one in brain.told[who] if isinstance(one, m.Answer)]


def carry_out(brain: Brain, error: str = "") -> int:
    """Everything that is ordered by now is done. How many."""
    ordered = [(move, v) for move, v in brain.state.moves.going.items() if v.ordered]
    for move, v in ordered:
        brain.say(brain.state.servers[v.source], m.Moved(move, error))
    return len(ordered)


def test_everything_leaves_two_at_a_time_and_the_server_retires():
    brain = drained()
    had = brain.state.level.drains[1].shards
    assert had > 4
    rounds = 0
    while brain.state.level.drains:
        assert 0 < len(brain.state.moves.going) <= 2
        assert not answers(brain)
        carry_out(brain)
        rounds += 1
    assert rounds >= had / 2
    assert answers(brain)[-1].error == ""
    assert brain.last(101, m.Retire).drained
    assert 1 not in brain.state.objects[1].owners
    assert brain.last(200, m.Gone).index == 1
    assert (brain.state.lost, brain.state.shards_lost, list(brain.state.retired)) == ({}, 0, [1])
    assert brain.state.level.status()["even"]
    brain.say(200, m.Leave())
    assert brain.end is not None
    assert not brain.end.failed


def test_nothing_new_is_placed_on_a_server_that_is_drained():
    brain = drained()
    brain.open(200, "default/new", number=5)
    assert 1 not in brain.state.objects[2].owners
    brain.say(900, m.Move(7, "default/new", 0, 1))
    assert "is being drained" in answers(brain)[-1].why


def test_shards_that_are_alike_go_together():
    brain = started(2, 1)
    brain.open(200, size=1 << 20)
    brain.open(200, "default/d", size=1 << 20, number=2, like="w")
    brain.join("operator", 900)
    brain.say(900, m.Drain(1, 1))
    while brain.state.level.drains:
        assert len({v.shard for v in brain.state.moves.going.values()}) <= 2
        carry_out(brain)
    assert brain.state.objects[1].owners == brain.state.objects[2].owners == [0] * len(brain.state.objects[1].owners)


def test_a_move_that_fails_is_tried_again_in_a_moment():
    brain = drained()
    carry_out(brain, "no room")
    assert not brain.state.moves.going
    assert brain.state.level.status()["drains"][0]["failed"] == "no room"
    brain.fire("level")
    while brain.state.level.drains:
        assert carry_out(brain)
    assert answers(brain)[-1].error == ""


def test_a_target_that_dies_does_not_end_a_drain():
    brain = drained()
    brain.die(102)
    for move, v in list(brain.state.moves.going.items()):
        if v.gone:
            brain.say(101, m.Moved(move, "it stays"))
    brain.fire("level")
    while brain.state.level.drains:
        assert carry_out(brain)
    assert 1 not in brain.state.objects[1].owners


def test_who_comes_back_hears_where_shards_are_before_it_hears_that_their_server_is_gone():
    brain = drained()
    while brain.state.level.drains:
        carry_out(brain)
    brain.told[200].clear()
    brain.come(brain.state.members[200].join)
    kinds = [type(message) for message in brain.told[200]]
    assert m.Gone in kinds
    assert max(i for i, kind in enumerate(kinds) if kind is m.ShardMoved) < kinds.index(m.Gone)


def test_a_server_that_dies_while_it_is_drained_is_lost():
    brain = drained()
    brain.die(101)
    assert answers(brain)[-1].error == "ServerLost"
    assert brain.state.shards_lost > 0


@pytest.mark.parametrize(("server", "why"), [(7, "no such server; expected one of 1"), (0, ""), (1, "the last one")])
def test_who_cannot_be_drained_is_named(server: int, why: str):
    brain = started(2, 1)
    brain.join("operator", 900)
    brain.say(900, m.Drain(1, 0))  # at once: it has nothing
    brain.say(900, m.Drain(2, server))
    answer = answers(brain)[-1]
    assert (answer.error, why in answer.why) == ("" if server == 0 else "InvalidArgument", True)


def test_a_drain_waits_for_a_checkpoint_that_is_being_taken():
    brain = started(2, 1, saves=True)
    brain.open(200)
    brain.join("operator", 900)
    brain.say(200, m.Save(7, 5))
    brain.say(900, m.Drain(1, 1))
    assert not brain.state.moves.going
    save = brain.last(100, m.Capture).save
    for server in (100, 101):
        brain.say(server, m.Armed(save, "disk full"))
    assert brain.state.moves.going


def test_a_drain_goes_on_when_the_scheduler_has_begun_again():
    brain = drained()
    carry_out(brain)
    other = Brain(3, journal=dict(brain.journal))
    for number in (100, 101, 102, 200):
        other.come(brain.state.members[number].join)
    other.join("operator", 900)
    other.say(900, m.Drain(1, 1))
    while other.state.level.drains:
        assert carry_out(other)
    assert answers(other)[-1].error == ""
    assert other.last(101, m.Retire).drained
    third = Brain(3, journal=dict(other.journal))
    assert list(third.state.retired) == [1]
    assert third.join("server", 177) is None
    assert third.last(177, m.Welcome).index == 3, "its number is used up"


def test_a_server_that_alone_is_told_to_end_is_drained():
    brain = started(3, 1)
    brain.open(200)
    brain.say(101, m.Leaving())
    assert not brain.state.level.drains
    brain.fire("leaving")
    while brain.state.level.drains:
        carry_out(brain)
    assert brain.last(101, m.Retire).drained


def test_servers_that_are_all_told_to_end_are_not_drained():
    brain = started(2, 1)
    brain.open(200)
    for server in (100, 101):
        brain.say(server, m.Leaving())
    brain.fire("leaving")
    assert not brain.state.level.drains
    assert [brain.last(server, m.Retire).drained for server in (100, 101)] == [False, False]


def test_a_server_is_not_drained_while_workers_hold_for_a_last_checkpoint():
    brain = started(3, 1, saves=True)
    brain.open(200)
    brain.say(200, m.Holds(3))
    brain.say(101, m.Leaving())
    brain.fire("leaving")
    assert not brain.last(101, m.Retire).drained


def test_empty_tables_leave_too():
    brain = started(2, 1)
    brain.say(200, m.Open(3, table_spec("default/t", 4)))
    brain.join("operator", 900)
    brain.say(900, m.Drain(1, 0))
    while brain.state.level.drains:
        assert carry_out(brain)
    assert set(brain.state.objects[1].owners) == {1}


def joined(brain: Brain, incarnation: int = 150) -> None:
    assert brain.join("server", incarnation) is None


def test_a_server_beyond_the_expected_ones_gets_the_next_number_and_shards_until_all_are_even():
    brain = started(2, 1)
    brain.open(200, size=1 << 22)
    brain.join("reader", 300)
    joined(brain)
    assert brain.last(150, m.Welcome).index == 2
    assert brain.last(150, m.View).workers == brain.last(100, m.View).workers, "it knows who trains"
    assert [peer.index for peer in brain.last(200, m.Servers).servers] == [0, 1, 2]
    for client in (200, 300):
        assert not brain.state.moves.going, "nothing moves before all can follow"
        brain.say(client, m.KnowsServers(3))
    moves = 0
    while brain.state.level.due:
        done = carry_out(brain)
        assert done, "it goes on"
        moves += done
    status = brain.state.level.status()
    assert (status["even"], status["joins"]) == (True, False)
    assert moves < len(brain.state.objects[1].owners)
    brain.open(200, "default/new", size=1 << 22, number=4)
    assert set(brain.state.objects[2].owners) == {0, 1, 2}


def test_a_number_is_not_given_again():
    brain = started(2, 1)
    joined(brain)
    brain.say(200, m.KnowsServers(3))
    brain.die(150)
    joined(brain, 151)
    assert brain.last(151, m.Welcome).index == 3
    refused = brain.join("server", 152, rank=2)
    assert refused is not None
    assert "numbers are not given again; the next one has number 4" in refused.why
    refused = brain.join("server", 153, rank=9)
    assert refused is not None
    assert "the next one has number 4" in refused.why
    assert brain.join("server", 154, rank=4) is None


def test_a_server_that_comes_early_takes_a_number_that_is_expected():
    brain = Brain(2)
    brain.servers(2)
    joined(brain)
    assert brain.last(150, m.Welcome).index == 2
    brain.workers(1)
    assert [peer.index for peer in brain.last(200, m.View).servers] == [0, 1, 2]
    brain.open(200, size=1 << 22)
    assert set(brain.state.objects[1].owners) == {0, 1, 2}


def test_a_worker_that_joins_meanwhile_is_waited_for():
    brain = started(2, 1)
    brain.open(200, size=1 << 22)
    joined(brain)
    brain.join("worker", 201, rank=1, world_size=2)
    brain.say(200, m.KnowsServers(3))
    assert not brain.state.moves.going
    brain.say(201, m.KnowsServers(3))
    assert brain.state.moves.going


def test_a_join_goes_on_when_the_scheduler_has_begun_again():
    brain = started(2, 1)
    brain.open(200, size=1 << 22)
    joined(brain)
    brain.say(200, m.KnowsServers(3))
    carry_out(brain)
    other = Brain(2, journal=dict(brain.journal))
    for number in (100, 101, 150, 200):
        other.come(brain.state.members[number].join)
    other.say(200, m.KnowsServers(3))
    while other.state.level.due:
        assert carry_out(other)
    assert other.state.level.status()["even"]
    third = Brain(2, journal=dict(other.journal))
    assert sorted(third.state.servers) == [0, 1, 2]
    assert third.state.load_bytes == other.state.load_bytes
