"""The scheduler's brain: what follows from what."""

import time

import pytest
from brain import CLUSTER, Brain, started
from specs import table_spec, tensor_spec

from windlass.control import messages as m


def ranks(view: m.View) -> list[int]:
    return [peer.index for peer in view.workers]


# -- starting --------------------------------------------------------------------------------------------------------


def test_an_app_starts_when_all_servers_and_all_its_workers_are_there():
    brain = Brain(servers=2)
    brain.join("server", 100)
    brain.workers(2)
    assert not any(isinstance(message, m.View) for message in brain.told[200])
    brain.join("server", 101)
    for worker in (200, 201):
        view = brain.last(worker, m.View)
        assert (view.number, ranks(view), [peer.index for peer in view.servers]) == (1, [0, 1], [0, 1])
    assert brain.last(100, m.View).number == 1  # servers know whom they serve
    assert brain.timers["start:default"] is None


def test_who_is_missing_is_said_again_and_again_and_by_name():
    brain = Brain(servers=3)
    brain.fire("missing")
    assert "still missing: server 0, server 1, server 2, any worker" in brain.logs[-1]
    brain.join("server", 100)
    brain.join("worker", 200, rank=1, world_size=3)
    brain.fire("missing")
    expected = ["server 1", "server 2", "worker 0 of app 'default'", "worker 2 of app 'default'"]
    assert brain.last(200, m.Waiting).missing == expected
    assert brain.logs[-1] == "warning still missing: " + ", ".join(expected)
    assert brain.timers["missing"] == 5.0


def test_a_world_of_thousands_is_not_listed_one_by_one():
    brain = Brain(servers=1)
    brain.servers(1)
    brain.join("worker", 200, rank=0, world_size=10_000)
    assert brain.state.missing()[-1] == "9983 more workers of app 'default'"


def test_at_the_timeout_those_who_wait_learn_who_did_not_come_and_the_cluster_ends():
    brain = Brain(servers=2, start_timeout=7.0)
    brain.servers(1)
    brain.join("worker", 200, rank=0, world_size=2)
    assert brain.timers["start:default"] == 7.0
    brain.fire("start:default")
    refused = brain.last(200, m.Refused)
    assert refused.error == "Timeout"
    assert refused.why == "not all had come within 7 s; missing: server 1, worker 1 of app 'default'"
    assert brain.end is not None
    assert brain.end.failed


def test_one_app_that_cannot_start_does_not_end_another():
    brain = started()
    brain.join("worker", 300, app="other", rank=0, world_size=2)
    brain.fire("start:other")
    assert brain.last(300, m.Refused).error == "Timeout"
    assert brain.end is None
    assert brain.state.apps["default"].started


# -- who is let in ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error", "why"),
    [
        ({"version": 2}, "ProtocolError", "expected version 1 of the control protocol, saw 2"),
        ({"cluster": 5}, "AccessDenied", f"this is cluster {CLUSTER:016x}, not 0000000000000005, which was meant"),
        ({"world_size": 1, "rank": 0}, "InvalidArgument", "app 'default' has 2 workers, not world_size=1"),
        ({"world_size": 3, "rank": 3}, "InvalidArgument", "rank 3 is not in a world of 3 (app 'default')"),
        ({"world_size": 2, "rank": 2}, "InvalidArgument", "rank 2 is not in a world of 2 (app 'default')"),
        ({"world_size": 2, "rank": 1}, "RankTaken", "rank 1 is taken, by worker 1 of app 'default'"),
        ({"world_size": 2}, "RankTaken", "each of the 2 ranks of app 'default' is taken, by worker 0 of app 'default'"),
        ({"world_size": 0}, "InvalidArgument", "world_size must be between 1 and 1048576, not 0"),
        ({"app": "a/b"}, "InvalidArgument", "app must be 1 to 256 bytes of printable text without '/', not 'a/b'"),
        ({"app": ""}, "InvalidArgument", "app must be 1 to 256 bytes"),
    ],
)
def test_a_worker_that_does_not_fit_is_refused_with_the_reason(fields: dict, error: str, why: str):
    brain = started()
    refused = brain.join("worker", 300, **fields)
    assert refused is not None
    assert refused.error == error
    assert why in refused.why
    assert brain.state.apps["default"].world_size == 2


def test_a_rank_that_is_taken_may_be_tried_again_until_a_dead_worker_would_have_been_noticed():
    brain = started(failure_timeout=7.0)
    refused = brain.join("worker", 300, rank=1, world_size=2)
    assert (refused.error, refused.retry_seconds) == ("RankTaken", 8.0)
    assert brain.join("worker", 300, app="a/b").retry_seconds == 0.0
    brain.die(201)
    assert brain.join("worker", 300, rank=1, world_size=2) is None


@pytest.mark.parametrize("world_size", [1, 3])
def test_before_an_app_has_started_all_its_workers_say_how_many_they_are(world_size: int):
    brain = Brain()
    brain.join("worker", 200, rank=0, world_size=2)
    refused = brain.join("worker", 300, world_size=world_size)
    assert refused is not None
    assert refused.why == f"app 'default' has 2 workers, not world_size={world_size}"


def test_a_server_whose_number_is_taken_or_not_the_next_one_is_refused():
    brain = started()
    refused = brain.join("server", 301, rank=1)
    assert (refused.error, refused.retry_seconds) == ("RankTaken", 11.0)
    assert "server number 1 is taken, by server 1 (process 101 on h)" in refused.why
    assert "server number 3: the next one has number 2" in brain.join("server", 302, rank=3).why
    assert "server number 3: expected one of 0, 1" in Brain().join("server", 303, rank=3).why
    assert "must say at which address" in Brain().join("server", 1, addresses=[]).why
    waiting = Brain()
    waiting.servers(1)
    assert (
        "listens on tcp://10.0.0.100:1100 already" in waiting.join("server", 9, addresses=["tcp://10.0.0.100:1100"]).why
    )


def test_a_server_gets_the_number_it_wants_and_else_the_first_that_is_free():
    brain = Brain(servers=3)
    assert brain.join("server", 100, rank=1) is None
    assert brain.join("server", 101) is None
    assert brain.join("server", 102) is None
    assert brain.state.servers == {1: 100, 0: 101, 2: 102}


def test_a_rank_that_nobody_asked_for_is_the_first_that_is_free():
    brain = Brain(servers=1)
    brain.servers(1)
    for incarnation in (200, 201, 202):
        assert brain.join("worker", incarnation, world_size=3) is None
    assert ranks(brain.last(202, m.View)) == [0, 1, 2]
    brain.die(201)
    assert brain.join("worker", 203, world_size=3) is None
    assert brain.state.members[203].index == 1


def test_a_connection_that_is_made_again_is_the_same_member_and_catches_up():
    brain = started()
    brain.open(200)
    brain.die(101)
    told = len(brain.told[200])
    assert brain.join("worker", 200, rank=0, world_size=2) is None
    again = brain.told[200][told:]
    assert [type(message) for message in again] == [m.Welcome, m.View, m.Gone]
    assert len(brain.state.members) == 3


def test_another_process_with_the_incarnation_of_a_member_is_refused():
    brain = started()
    refused = brain.join("reader", 200)
    assert refused is not None
    assert refused.why == "another member has this incarnation"


def test_a_member_that_was_given_up_stays_dead():
    brain = started()
    brain.die(201, "no heartbeat for 10 s")
    refused = brain.join("worker", 201, rank=1, world_size=2)
    assert refused is not None
    assert (refused.error, refused.why) == ("Closed", "this process was given up: no heartbeat for 10 s")


# -- views -----------------------------------------------------------------------------------------------------------


def test_every_change_of_the_workers_is_a_view_with_the_next_number():
    brain = started(workers=3)
    brain.die(201)
    assert (brain.last(200, m.View).number, ranks(brain.last(200, m.View))) == (2, [0, 2])
    brain.say(202, m.Leave())
    assert (brain.last(200, m.View).number, ranks(brain.last(200, m.View))) == (3, [0])
    assert brain.join("worker", 300, rank=1, world_size=3) is None
    assert (brain.last(200, m.View).number, ranks(brain.last(300, m.View))) == (4, [0, 1])
    assert brain.last(100, m.View).number == 4


def test_apps_have_views_of_their_own():
    brain = started()
    brain.workers(3, app="other", first=300)
    assert brain.last(300, m.View).number == 1
    brain.die(200)
    assert brain.last(201, m.View).number == 2
    assert brain.last(300, m.View).number == 1


def test_nobody_waits_for_a_reader_and_it_waits_for_servers_alone():
    brain = Brain(servers=2)
    brain.join("reader", 400)
    brain.servers(2)
    assert len(brain.last(400, m.View).servers) == 2
    brain.workers(2)
    view = brain.last(200, m.View)
    assert ranks(view) == [0, 1]
    brain.die(400)
    assert brain.last(200, m.View) is view


def test_the_cluster_ends_when_the_last_worker_has_left_unless_it_lingers():
    for linger in (False, True):
        brain = started(linger=linger)
        brain.say(200, m.Leave())
        assert brain.end is None
        brain.say(201, m.Leave())
        assert (brain.end is None) == linger
        assert any(isinstance(message, m.Shutdown) for message in brain.told[100]) != linger


def test_an_app_can_train_again_on_servers_that_linger():
    brain = started(linger=True)
    brain.open(200)
    for worker in (200, 201):
        brain.say(worker, m.Leave())
    brain.workers(4, first=500)
    assert (brain.last(500, m.View).number, ranks(brain.last(500, m.View))) == (4, [0, 1, 2, 3])
    assert brain.open(500).placed[0].object == 1  # what is on the servers is still there


def test_a_dead_server_is_told_to_all_clients_and_keeps_its_number():
    brain = started()
    brain.open(200)
    brain.die(101, "no heartbeat for 10 s")
    gone = brain.last(200, m.Gone)
    assert gone.index == 1
    assert gone.why == "server 1 (process 101 on h): no heartbeat for 10 s"
    assert any("shards were on server 1 and are lost" in line for line in brain.logs)
    brain.join("reader", 300)
    assert [peer.index for peer in brain.last(300, m.View).servers] == [0, 1]
    assert brain.last(300, m.Gone).index == 1
    assert "server 1 is lost with what it held" in brain.join("server", 400, rank=1).why
    assert brain.join("server", 401) is None
    assert brain.last(401, m.Welcome).index == 2  # what the lost one held is not with a new one


def test_a_lost_server_ends_a_cluster_whose_processes_somebody_starts_again():
    brain = started(on_server_loss="end")
    brain.die(101)
    assert brain.end is not None
    assert (brain.end.failed, brain.end.again) == (True, True)
    assert "server 1 (process 101 on h) was lost: killed" in brain.end.why
    for member in (100, 200, 201):
        assert brain.last(member, m.Shutdown).unfinished


def test_members_are_told_whether_the_work_was_done():
    done, told, nobody = started(), started(), Brain(servers=2, start_timeout=7.0)
    for worker in (200, 201):
        done.say(worker, m.Leave())
    assert (done.end.failed, done.end.again) == (False, False)
    assert not done.last(100, m.Shutdown).unfinished
    told._note(told.state.stop("the scheduler was told to end"))
    assert (told.end.failed, told.end.again) == (False, True)
    assert told.last(100, m.Shutdown).unfinished
    nobody.servers(2)
    nobody.join("worker", 200, rank=0, world_size=2)
    nobody.fire("start:default")
    assert (nobody.end.failed, nobody.end.again) == (True, False)  # to start all again would not help
    assert nobody.last(100, m.Shutdown).unfinished


def test_workers_that_leave_while_the_cluster_is_told_to_end_are_not_lost():
    brain = started(saves=True)
    brain._note(brain.state.terminate(30.0))
    for worker in (200, 201):
        brain.say(worker, m.Leave(failed=True, why="SIGTERM"))
    brain.fire("end")
    assert brain.end is not None
    assert (brain.end.failed, brain.end.workers_lost, brain.end.again) == (False, False, True)


def test_a_server_that_dies_before_anything_started_can_be_replaced():
    brain = Brain(servers=2)
    brain.servers(2)
    brain.die(100)
    assert brain.join("server", 102) is None
    brain.workers(1)
    assert len(brain.last(200, m.View).servers) == 2


# -- objects ---------------------------------------------------------------------------------------------------------


def test_an_object_is_placed_once_and_opened_by_all():
    brain = started()
    first, second = brain.open(200), brain.open(201)
    assert first.placed == second.placed
    assert [server for _, server, _ in first.placed[0].runs] == [0, 1]
    other = brain.open(200, "default/v")
    assert other.placed[0].object == 2
    assert [p.object for p in brain.ask(201, m.List(9)).placed] == [1, 2]


def test_another_spec_under_the_same_name_is_refused_with_both():
    brain = started()
    brain.open(200)
    answer = brain.open(201, size=5)
    assert answer.error == "SpecMismatch"
    assert "exists with another spec" in answer.why
    assert "there:" in answer.why
    assert "asked:" in answer.why


@pytest.mark.parametrize("spec", [b"", b"\x00", bytes(100), b"\xff" * 60, tensor_spec("noslash", (5,)) + b"more"])
def test_bytes_that_are_no_spec_are_refused(spec: bytes):
    brain = started()
    assert brain.ask(200, m.Open(1, spec)).error in ("ProtocolError", "InvalidArgument")
    assert not brain.state.objects


def test_an_app_cannot_take_more_than_its_quota():
    brain = started(quotas={"default": 5_000_000})
    assert brain.last(100, m.Quota) == m.Quota("default", 2_500_000)  # its tables, on one of two servers
    assert not brain.open(200, "default/a", 1_000_000).error
    answer = brain.open(200, "default/b", 1_000_000)
    assert answer.error == "ResourceExhausted"
    assert answer.why == "'default/b' needs 4000000 bytes; app 'default' has 4000000 of its 5000000 taken"
    brain.workers(1, "other", 300)
    assert not brain.open(300, "other/b", 1_000_000).error


def test_an_object_that_could_not_be_made_is_forgotten():
    brain = started()
    spec = tensor_spec("default/w", (1000,), "sgd", dtype=0)
    placed = brain.ask(200, m.Open(1, spec)).placed[0]
    load = dict(brain.state.load_bytes)
    brain.ask(200, m.Forget(2, spec, placed.object))
    assert not brain.state.objects
    assert sum(brain.state.load_bytes.values()) == sum(load.values()) - 4000
    assert brain.open(200, size=5).placed[0].object == 2


def test_servers_are_told_of_every_object_before_the_client_and_of_all_when_they_come_back():
    brain = started()
    first = brain.open(200).placed
    for server in (100, 101):
        assert brain.last(server, m.Objects).placed == first
    second = brain.open(201, "default/v").placed
    brain.join("server", 100, rank=0)  # its connection was broken
    assert brain.last(100, m.Objects).placed == [*first, *second]
    assert brain.last(101, m.Objects).placed == second
    brain.ask(200, m.Forget(2, first[0].spec, first[0].object))
    assert brain.last(101, m.Forgotten) == m.Forgotten(first[0].object)
    assert not any(isinstance(message, m.Objects) for message in brain.told[200])


def test_an_app_makes_and_forgets_its_own_objects_and_no_others():
    brain = started()
    brain.workers(1, "other", 300)
    refused = brain.open(300)
    assert (refused.error, refused.why) == (
        "NotFound",
        "'default/w': there is no such object, and only app 'default' can make it",
    )
    (placed,) = brain.open(200).placed
    assert brain.open(300).placed == [placed]
    brain.ask(300, m.Forget(2, placed.spec, placed.object))
    assert placed.object in brain.state.objects


def test_a_reader_opens_what_is_there_and_makes_nothing():
    brain = started()
    brain.join("reader", 400)
    refused = brain.open(400)
    assert (refused.error, refused.why) == ("AccessDenied", "'w' is not there, and a reader makes no objects")
    assert (brain.state.objects, brain.state.by_name) == ({}, {})
    placed = brain.open(200).placed
    assert brain.open(400).placed == placed
    assert brain.ask(400, m.List(2)).placed == placed
    assert brain.open(400, size=7).error == "SpecMismatch"


def test_an_object_that_is_deleted_leaves_its_name_and_its_place_to_others():
    brain = started()
    load = dict(brain.state.load_bytes)
    (placed,) = brain.open(200).placed
    assert brain.ask(200, m.Delete(2, placed.object)) == m.Answer(2)
    for server in (100, 101):
        assert brain.last(server, m.Forgotten) == m.Forgotten(placed.object)
    assert not brain.state.objects
    assert brain.state.load_bytes == load
    assert brain.ask(201, m.Delete(3, placed.object)) == m.Answer(3)  # its answer may have been lost
    assert brain.ask(201, m.Delete(4, placed.object + 1)).error == "NotFound"
    (again,) = brain.open(200, size=7).placed
    assert again.object == placed.object + 1  # a number is used once
    brain.join("server", 100, rank=0)  # it was away: it is told again
    assert brain.last(100, m.Forgotten) == m.Forgotten(placed.object)


def test_an_object_is_deleted_by_its_own_app_alone():
    brain = started()
    brain.workers(1, "other", 300)
    (placed,) = brain.open(200).placed
    refused = brain.ask(300, m.Delete(2, placed.object))
    assert (refused.error, refused.why) == ("AccessDenied", "only app 'default' may delete its objects")
    assert placed.object in brain.state.objects


def test_a_move_of_an_object_that_is_deleted_is_over():
    brain, order = moving()
    brain.ask(200, m.Delete(2, order.object))
    answer = brain.last(900, m.Answer)
    assert (answer.number, answer.error) == (1, "ServerLost")
    assert "'default/w' was deleted" in answer.why
    brain.say(100, m.Moved(order.move))  # it had been carried out all the same
    assert not brain.state.moves.going
    assert sum(brain.state.load_bytes.values()) == 0


# -- moves -----------------------------------------------------------------------------------------------------------


def moving() -> tuple[Brain, m.MoveShard]:
    brain = started()
    brain.open(200)
    brain.join("operator", 900)
    brain.say(900, m.Move(1, "default/w", 0, 1))
    return brain, brain.last(100, m.MoveShard)


def test_a_move_is_ordered_from_the_owner_and_told_to_all_when_it_is_done():
    brain, order = moving()
    assert (order.object, order.shard, order.server, order.term) == (1, 0, 1, 2)
    assert order.address == "tcp://10.0.0.101:1101"
    brain.say(100, m.Moved(order.move))
    assert brain.last(900, m.Answer) == m.Answer(1)
    for member in (100, 101, 200, 201):
        assert brain.last(member, m.ShardMoved) == m.ShardMoved(1, 0, 1, 2)
    assert brain.open(200).placed[0].runs[0] == (0, 1, 2)


def test_the_order_of_a_move_says_what_the_object_is():
    brain, order = moving()
    placed = brain.last(200, m.Answer).placed[0]
    assert (order.object, order.spec, order.runs) == (placed.object, placed.spec, placed.runs)


def test_a_move_of_an_object_that_is_given_up_is_over():
    brain, order = moving()
    brain.say(200, m.Forget(7, order.spec, order.object))
    assert not brain.state.moves.going
    assert "'default/w' could not be made everywhere" in brain.last(900, m.Answer).why
    brain.join("server", 100, rank=0)  # its connection was broken: there is nothing to be ordered again
    brain.say(100, m.Moved(order.move))
    assert not brain.state.objects


def test_a_move_that_fails_leaves_the_shard_and_uses_its_term_up():
    brain, order = moving()
    brain.say(100, m.Moved(order.move, "no memory there"))
    assert brain.last(900, m.Answer).why == "no memory there"
    assert brain.open(200).placed[0].runs[0] == (0, 0, 1)
    brain.say(900, m.Move(2, "default/w", 0, 1))
    assert brain.last(100, m.MoveShard).term == 3


def test_a_move_whose_source_dies_is_over():
    brain, order = moving()
    brain.die(100)
    assert brain.last(900, m.Answer) == m.Answer(order.move, "ServerLost", "server 0 is gone: killed")
    assert not brain.state.moves.going


@pytest.mark.parametrize("left", [False, True])
def test_what_became_of_a_move_whose_target_dies_is_for_its_source_to_say(left: bool):
    brain, order = moving()
    brain.die(101)
    cancel = m.CancelMove(order.move, 1, 0, 1, 2)
    assert brain.told[100][-1] == cancel
    assert not brain.told[900][1:]  # nobody knows yet
    brain.join("server", 100, rank=0)  # its connection was broken: it may not have heard
    assert [told for told in brain.told[100] if isinstance(told, m.MoveShard | m.CancelMove)] == [order, cancel, cancel]
    brain.say(100, m.Moved(order.move, "" if left else "it stays"))
    assert not brain.state.moves.going
    answer = brain.last(900, m.Answer)
    assert (answer.error, answer.why) == ("ServerLost", "server 1 is gone: killed" if left else "it stays")
    assert brain.open(200).placed[0].runs[0] == ((0, 1, 2) if left else (0, 0, 1))
    assert ("error shard 0 of 'default/w' is lost: server 1 is gone: killed" in brain.logs) == left
    assert any(isinstance(told, m.ShardMoved) for told in brain.told[200]) == left


def test_only_the_owner_can_say_that_a_shard_has_moved():
    brain, order = moving()
    brain.say(101, m.Moved(order.move))
    assert brain.state.moves.going


@pytest.mark.parametrize(
    ("move", "why"),
    [
        (m.Move(2, "default/x", 0, 1), "there is no such object"),
        (m.Move(2, "default/w", 10_000, 1), "it has shards 0 to 63"),
        (m.Move(2, "default/w", 1, 7), "there is no server 7"),
        (m.Move(2, "default/w", 0, 1), "it is on its way already"),
    ],
)
def test_a_move_that_makes_no_sense_is_refused(move: m.Move, why: str):
    brain, _ = moving()
    assert why in brain.ask(900, move).why


# -- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (200, m.Moved(1)),
        (200, m.Move(1, "default/w", 0, 1)),
        (200, m.Stop(1)),
        (100, m.Open(1, b"")),
        (100, m.Stop(1)),
        (400, m.Forget(1, b"", 1)),
        (200, m.Join("worker", 200)),
    ],
)
def test_who_says_what_its_role_does_not_say_is_out(member: int, message: m.Message):
    brain = started()
    brain.join("reader", 400)
    brain.say(member, message)
    refused = brain.last(member, m.Refused)
    assert refused.error == "ProtocolError"
    assert "does not say" in refused.why
    assert member not in brain.state.members


def test_an_operator_can_end_the_cluster():
    brain = started()
    brain.join("operator", 900)
    brain.say(900, m.Stop(1, "enough"))
    assert brain.last(900, m.Answer) == m.Answer(1)
    assert brain.last(200, m.Shutdown).why == "enough"
    assert brain.end is not None


# -- size ------------------------------------------------------------------------------------------------------------


def test_ten_thousand_members_and_a_hundred_thousand_shards_are_no_burden():
    begun = time.monotonic()
    brain = Brain(servers=100)
    brain.servers(100)
    brain.workers(9_900, first=1_000)
    for number in range(400):
        assert not brain.ask(1_000, m.Open(number, table_spec(f"default/t{number}", 64))).error
    assert sum(len(o.owners) for o in brain.state.objects.values()) > 100_000
    brain.die(1_000 + 5_000)
    assert len(brain.last(1_000, m.View).workers) == 9_899
    assert len(brain.state.members) == 9_999
    assert time.monotonic() - begun < 100  # a second or two; a loop over all members per event takes minutes


# -- names of apps that nobody uses ----------------------------------------------------------------------------------


def test_of_an_app_that_has_never_started_nothing_is_kept():
    brain = started()
    for i in range(500):
        brain.join("reader", 1000 + i, app=f"read{i}")
        brain.say(1000 + i, m.Leave())
        brain.join("worker", 2000 + i, app=f"half{i}", world_size=2)
        brain.say(2000 + i, m.Leave())
        assert brain.join("worker", 3000 + i, app=f"wrong{i}", rank=5, world_size=2) is not None
    assert list(brain.state.apps) == ["default"]
    assert all(seconds is None for timer, seconds in brain.timers.items() if timer.startswith("start:"))


def test_before_the_first_start_an_app_whose_workers_left_is_given_up_in_time():
    brain = Brain(servers=1)
    brain.servers(1)
    brain.join("worker", 200, world_size=2)
    brain.say(200, m.Leave())
    brain.fire("start:default")
    assert brain.end is not None
    assert brain.end.failed


def test_of_apps_that_are_done_the_latest_are_kept():
    brain = started(linger=True)
    for i in range(1500):
        brain.workers(1, app=f"app{i}", first=10_000 + i)
        brain.say(10_000 + i, m.Leave())
    assert "default" in brain.state.apps
    assert len(brain.state.apps) == 1 + 1024
    assert "app1499" in brain.state.apps
    assert "app0" not in brain.state.apps


def test_an_app_that_has_objects_is_kept_and_a_name_that_was_freed_goes_on_with_its_views():
    brain = started(linger=True)
    brain.workers(1, app="mine", first=5000)
    brain.open(5000, "mine/w")
    brain.say(5000, m.Leave())
    for i in range(3):
        brain.workers(1, app="thrice", first=6000 + i)
        brain.say(6000 + i, m.Leave())
    before = brain.last(100, m.View)
    assert (before.app, before.number) == ("thrice", 6)
    for i in range(1100):
        brain.workers(1, app=f"app{i}", first=10_000 + i)
        brain.say(10_000 + i, m.Leave())
    assert "mine" in brain.state.apps
    assert "thrice" not in brain.state.apps
    brain.workers(1, app="thrice", first=7000)
    assert brain.last(7000, m.View).number > before.number  # servers ignore lower ones
