"""Views: who is in them since when, who is waited for, and who is told."""

import pytest
from brain import Brain, started

from windlass.control import messages as m
from windlass.control.events import Fired


def since(view: m.View) -> dict[int, int]:
    """By rank."""
    return {peer.index: peer.since for peer in view.workers}


def waiting(workers: int = 3, **terms: object) -> Brain:
    """An app that waits for replacements."""
    return started(workers=workers, on_worker_loss="wait", **terms)


def last(brain: Brain, member: int = 100) -> tuple[int, list[int], list[int]]:
    """The last view that a member, else a server, was told: its number, its ranks, and those waited for."""
    view = brain.last(member, m.View)
    return view.number, sorted(since(view)), view.waited


# -- since when ------------------------------------------------------------------------------------------------------


def test_a_view_says_since_when_each_worker_is_in_it():
    brain = started(workers=3)
    view = brain.last(100, m.View)
    assert (view.started, since(view)) == (1, {0: 1, 1: 1, 2: 1})
    assert all(peer.since == 0 for peer in view.servers)
    brain.die(201)
    brain.die(202)
    assert brain.join("worker", 300, rank=2, world_size=3) is None
    assert (brain.last(100, m.View).started, since(brain.last(100, m.View))) == (1, {0: 1, 2: 4})
    assert brain.join("worker", 301, rank=1, world_size=3) is None
    assert since(brain.last(100, m.View)) == {0: 1, 1: 5, 2: 4}
    assert brain.join("worker", 300, rank=2, world_size=3) is None  # a connection that was made again
    assert since(brain.last(300, m.View)) == {0: 1, 1: 5, 2: 4}


def test_an_app_that_starts_again_says_with_which_view():
    brain = started(linger=True)
    brain.say(200, m.Leave())
    brain.say(201, m.Leave())
    assert last(brain) == (3, [], [])
    brain.workers(2, first=500)
    view = brain.last(100, m.View)
    assert (view.number, view.started, since(view)) == (4, 4, {0: 4, 1: 4})
    brain.die(500)
    assert brain.join("worker", 600, rank=0, world_size=2) is None
    view = brain.last(100, m.View)
    assert (view.number, view.started, since(view)) == (6, 4, {0: 6, 1: 4})


def test_those_who_gather_for_a_start_are_in_no_view():
    brain = started(linger=True)
    brain.join("reader", 400)
    for worker in (200, 201):
        brain.say(worker, m.Leave())
    brain.join("worker", 500, rank=0, world_size=2)
    brain.join("reader", 401)
    assert last(brain, 401) == (3, [], [])


# -- who is told -----------------------------------------------------------------------------------------------------


def test_a_server_whose_connection_was_made_again_is_told_the_views_of_all_apps():
    brain = started(linger=True)
    brain.workers(3, app="other", first=300)
    brain.workers(1, app="done", first=350)
    brain.say(350, m.Leave())
    brain.join("worker", 360, app="gathering", rank=0, world_size=2)
    brain.die(301)
    told = len(brain.told[100])
    assert brain.join("server", 100) is None
    again = {view.app: view for view in brain.told[100][told:] if isinstance(view, m.View)}
    seen = {app: (view.number, sorted(since(view))) for app, view in again.items()}
    assert seen == {"default": (1, [0, 1]), "other": (2, [0, 2]), "done": (2, [])}
    told = len(brain.told[200])
    brain.join("worker", 200, rank=0, world_size=2)
    assert [view.app for view in brain.told[200][told:] if isinstance(view, m.View)] == ["default"]


# -- losses ----------------------------------------------------------------------------------------------------------


def test_an_app_that_continues_waits_for_nobody():
    brain = started(workers=3)
    brain.die(201)
    assert last(brain) == (2, [0, 2], [])
    brain.say(202, m.Leave(failed=True))
    assert last(brain) == (3, [0], [])
    brain.die(200)
    assert brain.end is not None
    assert not brain.end.failed


@pytest.mark.parametrize("how", ["dies", "fails", "breaks the rules"])
def test_an_app_that_waits_has_the_lost_rank_in_its_views_until_somebody_has_come(how: str):
    brain = waiting()
    if how == "dies":
        brain.die(201)
    else:
        brain.say(201, m.Leave(failed=True, why="an error") if how == "fails" else m.Stop(1))
    for member in (100, 101, 200, 202):
        assert last(brain, member) == (2, [0, 2], [1])
    assert brain.logs[-1] == "warning app 'default' waits for a replacement of worker 1"
    assert brain.join("worker", 300, rank=1, world_size=3, on_worker_loss="wait") is None
    for member in (100, 101, 200, 202, 300):
        assert last(brain, member) == (3, [0, 1, 2], [])
    assert since(brain.last(100, m.View)) == {0: 1, 1: 3, 2: 1}
    assert "has come, in place of the one that was lost: 3 of 3" in brain.logs[-1]


def test_who_leaves_in_peace_is_waited_for_by_nobody():
    brain = waiting()
    brain.say(201, m.Leave())
    assert last(brain) == (2, [0, 2], [])
    for worker in (200, 202):
        brain.say(worker, m.Leave())
    assert brain.end is not None
    assert (brain.end.failed, brain.end.why) == (False, "all workers have left")


def test_who_comes_without_a_rank_gets_one_that_is_waited_for_before_one_that_is_free():
    brain = waiting(workers=4)
    brain.say(200, m.Leave())  # rank 0 is free, and nobody waits for it
    brain.die(203)
    brain.die(202)
    assert last(brain)[2] == [2, 3]
    for incarnation, rank, left in ((300, 2, [3]), (301, 3, []), (302, 0, [])):
        assert brain.join("worker", incarnation, world_size=4, on_worker_loss="wait") is None
        assert brain.state.members[incarnation].index == rank
        assert last(brain)[2] == left


def test_a_replacement_that_is_lost_is_waited_for_again():
    brain = waiting()
    brain.die(201)
    brain.join("worker", 300, rank=1, world_size=3, on_worker_loss="wait")
    brain.die(300)
    assert last(brain) == (4, [0, 2], [1])


def test_who_is_lost_before_the_start_makes_no_view():
    brain = Brain()
    brain.servers(2)
    brain.join("worker", 200, rank=0, world_size=2, on_worker_loss="wait")
    brain.die(200)
    assert not brain.state.apps["default"].waited
    assert brain.end is None


def test_workers_of_an_app_agree_on_what_a_loss_means():
    brain = waiting(linger=True)
    brain.die(201)
    refused = brain.join("worker", 300, rank=1, world_size=3)
    assert refused is not None
    assert refused.error == "InvalidArgument"
    expected = "app 'default' has on_worker_loss='wait', not 'continue': its workers must agree"
    assert refused.why == expected
    assert last(brain) == (2, [0, 2], [1])  # and it is still waited for
    brain.workers(2, app="other", first=400, on_worker_loss="continue")
    for worker in (200, 202):
        brain.say(worker, m.Leave())
    brain.fire("replace:default")
    brain.workers(2, first=500, on_worker_loss="continue")  # a new start, a new word
    brain.die(500)
    assert last(brain)[2] == []


# -- all lost --------------------------------------------------------------------------------------------------------


def test_an_app_that_lost_all_its_workers_waits_for_one_of_them():
    brain = waiting(start_timeout=7.0)
    brain.die(200)
    brain.die(202)
    assert "replace:default" not in brain.timers
    brain.die(201)
    assert last(brain) == (4, [], [0, 1, 2])
    assert brain.end is None
    assert brain.timers["replace:default"] == 7.0
    assert brain.join("worker", 300, world_size=3, on_worker_loss="wait") is None
    assert last(brain) == (5, [0], [1, 2])
    assert brain.timers["replace:default"] is None  # there is time for the others again
    view = brain.last(100, m.View)
    assert (view.started, since(view)) == (1, {0: 5})  # nobody starts anew: the servers have what was done
    brain.feed(Fired("replace:default"))  # one that was on its way
    assert last(brain) == (5, [0], [1, 2])


@pytest.mark.parametrize("linger", [False, True])
def test_an_app_whose_lost_workers_nobody_replaces_has_failed(linger: bool):
    brain = waiting(start_timeout=7.0, linger=linger)
    brain.say(202, m.Leave())
    brain.die(200)
    brain.die(201)
    assert brain.end is None
    brain.fire("replace:default")
    why = "app 'default' was lost: nobody came within 7 s in place of workers 0, 1"
    assert f"error {why}" in brain.logs
    assert last(brain) == (5, [], [])
    assert not brain.state.apps["default"].started
    if linger:
        assert brain.end is None
        brain.workers(2, first=500)
        view = brain.last(100, m.View)
        assert (view.number, view.started, view.waited) == (6, 6, [])
    else:
        assert brain.end is not None
        assert (brain.end.failed, brain.end.why) == (True, why)
        assert brain.last(100, m.Shutdown).why == why


def test_the_last_worker_may_leave_while_another_is_waited_for():
    brain = waiting(workers=2)
    brain.die(201)
    brain.say(200, m.Leave())
    assert brain.end is None
    assert last(brain) == (3, [], [1])
    assert brain.join("worker", 300, rank=1, world_size=2, on_worker_loss="wait") is None
    assert last(brain) == (4, [1], [])
    brain.say(300, m.Leave())
    assert brain.end is not None
    assert not brain.end.failed


def test_a_cluster_ends_as_failed_if_one_of_its_apps_did():
    brain = waiting(workers=1)
    brain.workers(1, app="other", first=400)
    brain.die(200)
    brain.fire("replace:default")
    assert brain.end is None  # the other goes on
    brain.say(400, m.Leave())
    assert brain.end is not None
    assert brain.end.failed
    assert "in place of worker 0" in brain.end.why


def test_an_app_that_was_lost_and_trained_again_has_not_failed():
    brain = waiting(workers=1)
    brain.workers(1, app="other", first=400)
    brain.die(200)
    brain.fire("replace:default")
    brain.workers(1, first=500)
    for worker in (500, 400):
        brain.say(worker, m.Leave())
    assert brain.end is not None
    assert (brain.end.failed, brain.end.why) == (False, "all workers have left")


@pytest.mark.parametrize("on_worker_loss", ["continue", "wait"])
def test_a_worker_whose_loss_was_survived_fails_no_cluster(on_worker_loss: str):
    brain = started(workers=2, on_worker_loss=on_worker_loss)
    brain.die(201)
    if on_worker_loss == "wait":
        assert brain.join("worker", 300, rank=1, world_size=2, on_worker_loss="wait") is None
        brain.say(300, m.Leave())
    brain.say(200, m.Leave())
    assert brain.end is not None
    survived = on_worker_loss == "continue"
    assert (brain.end.failed, brain.end.workers_lost) == (False, survived)
    without = "; app 'default' was done without worker 1, lost and not replaced" if survived else ""
    assert brain.end.why == f"all workers have left{without}"


def test_who_was_lost_before_an_app_trained_again_is_forgotten_with_its_end():
    brain = started(workers=2)
    brain.workers(1, app="other", first=400)
    brain.die(201)
    brain.say(200, m.Leave())
    brain.workers(2, first=500)
    for worker in (500, 501, 400):
        brain.say(worker, m.Leave())
    assert brain.end is not None
    assert (brain.end.failed, brain.end.workers_lost, brain.end.why) == (False, False, "all workers have left")


@pytest.mark.parametrize("had_shards", [False, True])
def test_a_server_whose_loss_cost_nothing_fails_no_cluster(had_shards: bool):
    brain = started(workers=1)
    assert brain.open(200, size=16).placed[0].runs[0][1] == 0
    brain.die(100 if had_shards else 101)
    brain.say(200, m.Leave())
    assert brain.end is not None
    assert brain.end.failed == had_shards
    assert ("1 shards were lost with server 0" in brain.end.why) == had_shards


def test_another_app_does_not_end_while_one_waits():
    brain = waiting(workers=1)
    brain.workers(1, app="other", first=400)
    brain.die(200)
    brain.say(400, m.Leave())
    assert brain.end is None


def test_who_is_waited_for_is_said_again_and_again_and_many_are_counted():
    brain = waiting(workers=20)
    for worker in range(200, 218):
        brain.die(worker)
    brain.logs.clear()
    for _ in range(2):
        brain.fire("missing")
    ranks = ", ".join(map(str, range(16)))
    assert brain.logs == [f"warning app 'default' waits for a replacement of workers {ranks} and 2 more"] * 2


# -- apps that grow --------------------------------------------------------------------------------------------------


def test_a_worker_that_counts_more_workers_makes_the_app_that_large():
    brain = started()
    assert brain.join("worker", 300, rank=2, world_size=4) is None
    view = brain.last(100, m.View)
    assert (view.number, view.started, view.world_size, since(view)) == (2, 1, 4, {0: 1, 1: 1, 2: 2})
    assert brain.last(101, m.View) == view
    told = [brain.last(client, m.View) for client in (200, 201, 300)]
    assert all((other.number, other.world_size, since(other)) == (2, 4, since(view)) for other in told)
    assert {peer.incarnation for other in told for peer in other.workers} == {0}  # servers alone know them
    assert "info app 'default' grows from 2 to 4 workers" in brain.logs
    assert brain.join("worker", 301, world_size=4) is None
    assert last(brain) == (3, [0, 1, 2, 3], [])
    refused = brain.join("worker", 302, world_size=2)
    assert refused is not None
    assert refused.why == "app 'default' has 4 workers, not world_size=2"


def test_who_takes_a_lost_workers_place_need_not_know_that_the_app_has_grown():
    brain = waiting(workers=2)
    assert brain.join("worker", 300, rank=2, world_size=3, on_worker_loss="wait") is None
    brain.die(201)
    for rank in (None, 0, 2):
        assert brain.join("worker", 301, rank=rank, world_size=2, on_worker_loss="wait") is not None
    assert brain.join("worker", 301, rank=1, world_size=2, on_worker_loss="wait") is None
    assert last(brain)[1:] == ([0, 1, 2], [])
    assert brain.last(301, m.View).world_size == 3


def test_an_app_grows_for_nobody_who_is_refused():
    brain = waiting(workers=2)
    for fields in ({"rank": 1}, {"rank": 3}, {"rank": 2, "on_worker_loss": "continue"}):
        assert brain.join("worker", 300, world_size=3, **{"on_worker_loss": "wait", **fields}) is not None
    assert last(brain) == (1, [0, 1], [])
    assert brain.last(100, m.View).world_size == 2
    assert brain.state.apps["default"].world_size == 2


def test_a_view_says_who_came_in_place_of_a_lost_worker_and_not_beside_the_others():
    brain = waiting(workers=2)
    brain.die(201)
    assert brain.join("worker", 300, world_size=3, on_worker_loss="wait") is None  # the rank that is waited for
    assert brain.join("worker", 301, world_size=3, on_worker_loss="wait") is None
    assert [(peer.index, peer.instead) for peer in brain.last(100, m.View).workers] == [
        (0, False),
        (1, True),
        (2, False),
    ]


def test_a_view_says_the_same_when_workers_gather_for_a_start_of_another_size():
    brain = started(linger=True)
    for worker in (200, 201):
        brain.say(worker, m.Leave())
    view = brain.last(100, m.View)
    brain.join("worker", 300, rank=0, world_size=3)
    assert brain.join("server", 100) is None  # a connection that was made again
    assert brain.last(100, m.View) == view


# -- tasks of an engine ----------------------------------------------------------------------------------------------


def with_tasks(count: int = 2, **terms: object) -> Brain:
    """A cluster of so many worker tasks, all of which have come."""
    brain = Brain(servers=1, tasks=count, **terms)
    brain.servers(1)
    for rank in range(count):
        assert brain.join("operator", 700 + rank, rank=rank, tasks=count) is None
    return brain


def test_a_cluster_of_tasks_stays_when_its_workers_have_left_and_ends_with_the_last_task():
    brain = with_tasks()
    brain.workers(2)
    for worker in (200, 201):
        brain.say(worker, m.Leave())
    brain.say(700, m.Leave())
    assert brain.end is None  # the other script may connect again
    brain.say(701, m.Leave())
    assert brain.end is not None
    assert (brain.end.failed, brain.end.why) == (False, "all workers have left")


def test_tasks_that_are_over_though_a_worker_is_there_still_do_not_end_its_cluster():
    brain = with_tasks()
    brain.workers(2)
    for task in (700, 701):
        brain.die(task)
    assert brain.end is None
    brain.say(200, m.Leave())
    brain.say(201, m.Leave())
    assert brain.end is not None
    assert not brain.end.failed


def test_nobody_is_waited_for_whose_task_has_ended():
    brain = with_tasks()
    brain.workers(2, on_worker_loss="wait")
    brain.die(200)
    assert brain.end is None  # its task may start it again
    brain.die(700)
    assert brain.end is not None
    assert brain.end.failed
    assert brain.end.why == "app 'default' was lost: nobody can come in place of worker 0, the task has ended"


def test_an_app_that_gathers_ends_when_the_task_of_one_that_is_missing_has_ended():
    brain = with_tasks()
    assert brain.join("worker", 200, rank=0, world_size=2) is None
    brain.say(701, m.Leave())
    assert brain.end is not None
    assert brain.end.failed
    assert "nobody can come in place of worker 1" in brain.end.why


def test_tasks_that_are_over_before_a_worker_came_end_the_cluster():
    brain = with_tasks()
    for task in (700, 701):
        brain.say(task, m.Leave())
    assert brain.end is not None


def test_a_cluster_of_tasks_that_lingers_outlives_them():
    brain = with_tasks(linger=True)
    for task in (700, 701):
        brain.say(task, m.Leave())
    assert brain.end is None


def test_a_task_that_expects_another_number_of_workers_is_refused():
    refused = with_tasks().join("operator", 800, rank=2, tasks=3)
    assert refused is not None
    assert refused.error == "InvalidArgument"
    assert "expects 3 workers, the first one 2: all tasks must have the same --servers" in refused.why


def test_a_task_that_gives_up_fails_the_cluster():
    brain = with_tasks()
    brain.workers(2)
    brain.say(700, m.Stop(1, "worker 0 ended with exit code 1", failed=True))
    assert brain.end is not None
    assert (brain.end.failed, brain.end.why) == (True, "worker 0 ended with exit code 1")
