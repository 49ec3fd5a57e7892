"""A scheduler that begins again: its state, made from the rows that were kept, goes on where the other one was."""

import dataclasses

import msgspec
import pytest
from brain import Brain, started

from windlass.control import kept
from windlass.control import messages as m
from windlass.control.events import SaveManifest
from windlass.control.resume import Resume


def again(brain: Brain, written: float | None = None, resume: Resume | None = None, **terms: object) -> Brain:
    """Another scheduler, with the first one's journal."""
    assert kept.rows(brain.state) == brain.journal, "every row that changed was kept"
    terms = {name: getattr(brain.state.terms, name) for name in ("saves", "save_iterations", "linger")} | terms
    return Brain(brain.state.terms.servers, resume, journal=dict(brain.journal), written=written, **terms)


def back(brain: Brain, before: Brain, *members: int, **fields: object) -> None:
    """They come back under their incarnations."""
    for number in members:
        join = before.state.members[number].join if number in before.state.members else None
        assert join is not None
        brain.come(msgspec.structs.replace(join, **fields))


LEASE = m.LeaseTerms(samples=40, batch=2, range=4, epochs=2, shuffle=False, seed=0)


def lease(number: int, **fields: object) -> m.Lease:
    asked = {"epoch": 0, "hungry": False, "want": 2, "complete": 0}
    return m.Lease(number, "data", LEASE, **{**asked, **fields})  # type: ignore[arg-type]


def test_views_objects_and_members_are_as_they_were():
    brain = started(2, 2)
    brain.open(200)
    brain.open(201, "default/d", like="w", number=2)
    brain.open(201, "default/gone", number=3)
    brain.say(201, m.Delete(4, 3))
    brain.join("reader", 300)
    other = again(brain)
    assert other.state.generation == 2
    assert set(other.state.returning) == {100, 101, 200, 201, 300}
    back(other, brain, 100, 200)
    assert other.last(200, m.Welcome).generation == 2
    assert other.last(200, m.View) == brain.last(200, m.View)
    assert other.last(100, m.View) == brain.last(100, m.View)
    assert [one.object for one in other.last(100, m.Objects).placed] == [1, 2]
    assert other.last(100, m.Forgotten).object == 3
    assert other.open(200, number=9).placed == brain.ask(200, m.List(8)).placed[:1]
    made = other.open(200, "default/new", number=10)
    assert made.placed[0].object == 4, "a number is given once"
    assert other.state.load_bytes == {
        i: sum(s for o in other.state.objects.values() for s, w in zip(o.shard_bytes, o.owners, strict=True) if w == i)
        for i in range(2)
    }


def test_the_dead_stay_dead_and_who_left_has_left():
    brain = started(1, 3)
    brain.die(202)
    brain.say(201, m.Leave())
    other = again(brain)
    assert set(other.state.apps["default"].workers) == {0}
    assert other.join("worker", 202, rank=2, world_size=3) is not None
    back(other, brain, 100, 200)
    assert other.join("worker", 250, rank=2, world_size=3) is None
    assert sorted(peer.index for peer in other.last(200, m.View).workers) == [0, 2]
    assert other.last(200, m.View).number == brain.last(200, m.View).number + 1


def test_whoever_does_not_come_back_is_lost_and_waited_for():
    brain = started(1, 2, on_worker_loss="wait")
    other = again(brain)
    back(other, brain, 100, 200)
    other.die(201, "no heartbeat for 10 s")
    assert other.last(200, m.View).waited == [1]
    assert other.join("worker", 251, rank=1, world_size=2, on_worker_loss="wait") is None
    assert other.last(200, m.View).waited == []


def test_nobody_new_joins_an_app_before_its_workers_are_back():
    brain = started(1, 2)
    other = again(brain)
    back(other, brain, 100, 200)
    other.join("worker", 250, world_size=3)
    assert 250 not in other.state.members
    assert other.deferred
    other.join("worker", 260, world_size=1, app="other")
    assert 260 in other.state.members, "another app has nothing to wait for"
    back(other, brain, 201)
    assert other.join("worker", 250, world_size=3) is None
    assert 250 in other.state.members


def test_a_move_under_way_is_ordered_again_and_a_term_is_used_once():
    brain = started(2, 1)
    brain.join("operator", 900)
    brain.open(200)
    object_ = brain.state.objects[1]
    shard = object_.owners.index(0)
    brain.say(900, m.Move(1, "default/w", shard, 1))
    order = brain.last(100, m.MoveShard)
    brain.say(100, m.Moved(order.move, "out of room"))
    brain.say(900, m.Move(2, "default/w", shard, 1))
    order = brain.last(100, m.MoveShard)
    other = again(brain)
    back(other, brain, 100, 101, 200)
    repeated = other.last(100, m.MoveShard)
    assert (repeated.move, repeated.term, repeated.server) == (order.move, order.term, 1)
    other.join("operator", 900)
    other.say(900, m.Move(2, "default/w", shard, 1))  # it asks again, and waits
    assert not [x for x in other.told[900] if isinstance(x, m.Answer)]
    other.say(100, m.Moved(order.move))
    assert other.last(900, m.Answer).error == ""
    assert other.last(200, m.ShardMoved) == m.ShardMoved(1, shard, 1, order.term)
    third = again(other)
    assert third.state.objects[1].owners[shard] == 1
    assert third.state.objects[1].terms[shard] == order.term == 3
    back(third, other, 200)
    assert third.last(200, m.ShardMoved).server == 1


def test_a_server_that_is_lost_stays_lost_and_is_told_again():
    brain = started(2, 1)
    brain.open(200)
    brain.die(101)
    other = again(brain)
    back(other, brain, 100, 200)
    assert other.last(200, m.Gone).index == 1
    assert other.state.shards_lost == brain.state.shards_lost > 0
    assert list(other.state.load_bytes) == [0]


def test_workers_tell_where_the_barriers_are_and_what_the_last_one_gave():
    brain = started(1, 2)
    given = m.Numbers("sum", "int64", [1], (3).to_bytes(8, "little"))
    for number in range(1, 6):
        for worker in (200, 201):
            brain.say(worker, m.Arrive(number, number, numbers=given))
    result = brain.last(200, m.Answer).reduced
    assert result is not None
    other = again(brain)
    back(other, brain, 100)
    back(other, brain, 201, barrier=5)  # the answer to the fifth was lost on its way to this one
    other.say(201, m.Arrive(5, 5, numbers=given))
    assert not [x for x in other.told[201] if isinstance(x, m.Answer)]
    back(other, brain, 200, barrier=6, reduced=result)
    assert other.last(201, m.Answer).reduced == result
    assert other.join("worker", 250, world_size=3) is None
    assert other.last(250, m.Welcome).barrier == 6


def test_ledgers_are_what_workers_say_and_what_is_kept_of_those_that_are_gone():
    brain = started(1, 2)
    for number, worker in ((1, 200), (2, 201), (3, 200)):
        brain.say(worker, lease(number, whole=True))
    gone = [(0, 0, 4), (0, 3, 4)]
    stays = [(0, 1, 4), (0, 2, 4)]
    brain.say(200, lease(4, whole=True, done=stays))
    brain.say(201, lease(5, whole=True, done=gone))
    before = brain.state.ledgers["default", "data"].status()
    assert before["done"] == 4
    brain.die(201)
    other = again(brain)
    back(other, brain, 100, 200)
    other.say(200, lease(6, first=2))
    assert other.last(200, m.Answer).leased.again
    other.say(200, lease(7, whole=True, done=stays))
    status = other.state.ledgers["default", "data"].status()
    assert (status["done"], status["samples_done"], status["duplicates"]) == (4, 16, 0)
    third = again(other)
    back(third, other, 100, 200)
    third.say(200, lease(8, whole=True, complete=1))  # the epoch came to its end meanwhile
    status = third.state.ledgers["default", "data"].status()
    assert (status["epoch"], status["samples_done"]) == (1, 40)


@pytest.mark.parametrize("written", [None, 1234.5])
def test_a_checkpoint_under_way_counts_if_its_manifest_is_there(written: float | None):
    brain = started(2, 1, saves=True)
    brain.open(200)
    answer = m.Save(7, 5)
    brain.say(200, answer)
    capture = brain.last(100, m.Capture)
    for server in (100, 101):
        brain.say(server, m.Armed(capture.save))
    assert brain.last(200, m.Answer).saved == capture.id
    for server in (100, 101):
        brain.say(server, m.Saved(capture.save, name=f"{server}.json"))
    assert any(isinstance(action, SaveManifest) for action in brain.actions)
    other = again(brain, written)
    assert other.state.saves.going is None
    back(other, brain, 100, 101, 200)
    over = other.last(100, m.CaptureOver)
    assert (over.save, over.complete) == (capture.save, written is not None)
    assert other.last(200, m.SaveOver).error == ("" if written else "CheckpointFailed")
    status = other.state.saves.status()
    assert ("default" in status["last"], "default" in status["failed"]) == (written is not None, written is None)
    other.say(200, m.Save(8, 6))
    assert other.last(100, m.Capture).save == capture.save + 1
    assert other.last(100, m.Capture).id != capture.id


def test_who_waits_for_a_checkpoint_to_be_armed_asks_again_and_gets_another():
    brain = started(1, 1, saves=True)
    brain.open(200)
    brain.say(200, m.Save(7, 5))
    first = brain.last(100, m.Capture)
    other = again(brain)
    back(other, brain, 100, 200)
    assert not [x for x in other.told[200] if isinstance(x, m.SaveOver)]
    other.say(200, m.Save(7, 5))
    second = other.last(100, m.Capture)
    assert (second.clock, second.save) == (first.clock, first.save + 1)
    other.say(100, m.Armed(second.save))
    assert other.last(200, m.Answer).saved == second.id


def resume() -> Resume:
    brain = started(1, 1)
    brain.open(200)
    return Resume("c0ffee", "default", 7, 1, [brain.state.objects[1].spec], {}, {0: b"mine"})


def test_a_checkpoint_that_servers_load_is_ordered_again_and_the_app_begins_at_its_clock():
    which = resume()
    brain = Brain(2, which, saves=True)
    brain.servers(2)
    brain.say(100, m.Loaded())
    other = again(brain, resume=which)
    back(other, brain, 100, 101)
    load = other.last(100, m.Load)
    assert (load.id, load.load, [one.object for one in load.objects]) == ("c0ffee", 0, [1])
    for server in (100, 101):
        other.say(server, m.Loaded())
    other.workers(1)
    assert other.last(200, m.View).clock == 7
    assert other.last(200, m.Welcome).extra == b"mine"
    third = again(other)  # the checkpoint itself is not there any more, and nobody needs it
    back(third, other, 100, 101, 200)
    assert third.last(200, m.View).clock == 7
    assert third.state.saves.status()["resumed"]["id"] == "c0ffee"
    with pytest.raises(kept.Unreadable, match="c0ffee"):
        again(brain, resume=None)


def test_an_app_that_gathers_goes_on_gathering():
    brain = Brain(1)
    brain.servers(1)
    assert brain.join("worker", 200, rank=0, world_size=2) is None
    other = again(brain)
    assert other.timers["start:default"] is not None
    back(other, brain, 100, 200)
    assert other.join("worker", 201, rank=1, world_size=2) is None
    assert other.last(201, m.View).number == 1


def test_a_cluster_that_has_ended_says_so_in_its_journal():
    brain = started(1, 1)
    brain.say(200, m.Leave())
    assert brain.end is not None
    cluster = kept.cluster_of(brain.journal)
    assert cluster is not None
    assert cluster.ended


@pytest.mark.parametrize("table", ["cluster", "members", "objects", "apps"])
def test_a_row_that_makes_no_sense_is_named(table: str):
    brain = started(1, 1)
    brain.open(200)
    at = next(key for key in brain.journal if key[0] == table)
    brain.journal[at] = b'{"what": 1}'
    with pytest.raises(kept.Unreadable, match=f"table {table}"):
        Brain(1, journal=brain.journal)


def test_a_state_without_a_journal_keeps_nothing():
    brain = Brain(1, keeps=False)
    brain.servers(1)
    assert brain.journal == {}
    assert dataclasses.is_dataclass(brain.state.terms)
