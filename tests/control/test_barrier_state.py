"""Barriers: the class itself, and as the scheduler's state machine uses it."""

import random

import pytest
from brain import Brain, started

from windlass.control import messages as m
from windlass.control.barrier import Barrier

A, B, C = 11, 22, 33


def barrier(*workers: int, waited: tuple[int, ...] = ()) -> Barrier:
    made = Barrier()
    made.follow(dict(enumerate(workers)), waited)
    return made


# -- by itself -------------------------------------------------------------------------------------------------------


def test_it_is_passed_when_all_have_arrived_and_not_before():
    b = barrier(A, B, C)
    for who, missing in ((A, [1, 2]), (C, [1])):
        b.arrive(who, 1)
        assert (b.number, b.missing()) == (1, missing)
    b.arrive(B, 1)
    assert (b.number, b.missing()) == (2, [0, 1, 2])


def test_an_arrival_that_is_repeated_counts_once_and_not_for_the_next_barrier():
    b = barrier(A, B)
    for _ in range(3):
        b.arrive(A, 1)
    assert b.number == 1
    b.arrive(B, 1)
    b.arrive(A, 1)  # a repeat that came late
    b.arrive(B, 2)
    assert (b.number, b.missing()) == (2, [0])


def test_who_is_gone_is_not_missing_and_the_last_one_missing_opens_it_by_leaving():
    b = barrier(A, B, C)
    b.arrive(A, 1)
    b.follow({0: A, 1: B})
    assert (b.number, b.missing()) == (1, [1])
    b.follow({0: A})
    assert b.number == 2


def test_a_lost_worker_is_waited_for_until_its_replacement_has_arrived():
    b = barrier(A, B)
    b.arrive(A, 1)
    b.follow({0: A}, [1])
    assert (b.number, b.missing()) == (1, [1])
    b.follow({0: A, 1: C})
    assert (b.number, b.missing()) == (1, [1])
    b.arrive(C, b.number)
    assert b.number == 2


def test_the_arrival_of_a_worker_that_is_gone_does_not_count_for_its_replacement():
    b = barrier(A, B)
    b.arrive(A, 1)
    b.follow({1: B}, [0])
    b.follow({0: C, 1: B})
    b.arrive(B, 1)
    assert (b.number, b.missing()) == (1, [0])


def test_who_joins_is_waited_for_at_the_current_barrier():
    b = barrier(A, B)
    b.arrive(A, 1)
    b.follow({0: A, 1: B, 2: C})
    b.arrive(B, 1)
    assert (b.number, b.missing()) == (1, [2])
    b.arrive(C, 1)
    assert b.number == 2


def test_nobody_passes_while_all_are_lost():
    b = barrier(A)
    b.follow({}, [0])
    assert (b.number, b.missing()) == (1, [0])
    b.follow({})
    assert b.number == 1


def test_a_count_that_was_lost_begins_where_the_workers_stand():
    b = barrier(A, B)
    b.arrive(A, 5)
    assert (b.number, b.missing()) == (5, [1])
    b.arrive(B, 6)  # so the others have passed 5, too
    assert (b.number, b.missing()) == (6, [0])
    b.arrive(A, 6)
    assert b.number == 7


def test_who_is_missing_is_said_for_people():
    b = barrier(A, B, C, waited=(5,))
    b.arrive(A, 1)
    assert b.complaint() == "1 of 4 workers have arrived; missing: ranks 1, 2, 5"
    b.follow({0: A, 1: B})
    assert b.complaint() == "1 of 2 workers have arrived; missing: rank 1"
    b.follow({rank: 100 + rank for rank in range(40)})
    assert b.complaint().endswith("missing: ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 24 more")


def test_any_order_of_arrivals_repeats_and_changes_passes_nobody_too_early():
    """Against a model that remembers for each worker at which barrier it stands."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, b, next_who, passed = random.Random(seed), Barrier(), 1, 0
    workers: dict[int, int] = {}
    waited: set[int] = set()
    stands: dict[int, int] = {}  # a worker, and the barrier it has arrived at last
    for _ in range(20_000):
        before, kind = b.number, rng.randrange(8)
        if kind == 0 and len(workers) < 5:  # it joins, or is a replacement
            rank = min(waited) if waited else min(set(range(6)) - workers.keys())
            workers[rank], next_who = next_who, next_who + 1
            stands[workers[rank]] = b.number - 1
            waited.discard(rank)
            b.follow(workers, waited)
        elif kind == 1 and workers and rng.random() < 0.5:  # it is gone
            rank = rng.choice(sorted(workers))
            del workers[rank]
            if rng.random() < 0.5:
                waited.add(rank)
            b.follow(workers, waited)
        elif workers:
            who = rng.choice(sorted(workers.values()))
            if rng.random() < 0.7:
                stands[who] = b.number  # it stands at the current one, whether it did before or not
            if stands[who]:
                b.arrive(who, stands[who])
        if b.number > before:
            assert b.number == before + 1
            assert workers
            assert not waited
            assert all(stands[who] == before for who in workers.values())
            passed += 1
        else:
            assert not workers or waited or any(stands[who] < before for who in workers.values())
    assert passed > 100


# -- in the scheduler ------------------------------------------------------------------------------------------------


def answers(brain: Brain, member: int) -> list[tuple[int, str]]:
    return [(a.number, a.error) for a in brain.told[member] if isinstance(a, m.Answer)]


def test_all_are_answered_when_the_last_has_arrived():
    brain = started(workers=3)
    assert brain.last(200, m.Welcome).barrier == 1
    for who in (200, 201):
        brain.say(who, m.Arrive(7, 1))
    assert answers(brain, 200) == answers(brain, 201) == []
    brain.say(202, m.Arrive(9, 1))
    assert [answers(brain, who) for who in (200, 201, 202)] == [[(7, "")], [(7, "")], [(9, "")]]


def test_a_question_that_is_asked_again_after_the_barrier_was_passed_is_answered_and_counts_for_nothing():
    brain = started()
    brain.say(200, m.Arrive(7, 1))
    brain.say(201, m.Arrive(7, 1))
    brain.say(201, m.Arrive(8, 2))
    brain.say(200, m.Arrive(7, 1))  # its connection was made again
    assert answers(brain, 200) == [(7, ""), (7, "")]
    assert answers(brain, 201) == [(7, "")]


@pytest.mark.parametrize("how", ["dies", "leaves", "fails"])
def test_without_the_missing_worker_the_others_pass(how: str):
    brain = started(workers=3)
    for who in (200, 201):
        brain.say(who, m.Arrive(7, 1))
    if how == "dies":
        brain.die(202)
    else:
        brain.say(202, m.Leave(how == "fails"))
    assert answers(brain, 200) == answers(brain, 201) == [(7, "")]


def test_in_an_app_that_waits_the_replacement_lets_the_others_pass():
    brain = started(workers=2, on_worker_loss="wait")
    for number in (1, 2):
        for who in (200, 201):
            brain.say(who, m.Arrive(number, number))
    brain.say(200, m.Arrive(3, 3))
    brain.die(201)
    assert brain.join("worker", 300, rank=1, world_size=2, on_worker_loss="wait") is None
    assert brain.last(300, m.Welcome).barrier == 3
    assert len(answers(brain, 200)) == 2
    brain.say(300, m.Arrive(1, 3))
    assert (answers(brain, 200)[-1], answers(brain, 300)) == ((3, ""), [(1, "")])


def test_who_does_not_wait_is_told_who_is_missing_and_has_arrived_all_the_same():
    brain = started(workers=3)
    brain.say(200, m.Arrive(6, 1))
    answer = brain.ask(200, m.Arrive(7, 1, waits=False))
    assert answer.error == "Timeout"
    assert answer.why == "barrier 1 of app 'default': 1 of 3 workers have arrived; missing: ranks 1, 2"
    for who in (201, 202):
        brain.say(who, m.Arrive(7, 1))
    assert answers(brain, 201) == [(7, "")]
    assert answers(brain, 200) == [(7, "Timeout")]  # what it had asked before, it waits for no more
    assert brain.ask(200, m.Arrive(8, 1)) == m.Answer(8)


def test_apps_have_barriers_of_their_own():
    brain = started()
    brain.workers(2, app="other", first=300)
    for who in (200, 300, 301):
        brain.say(who, m.Arrive(1, 1))
    assert (answers(brain, 200), answers(brain, 300)) == ([], [(1, "")])


def test_an_app_that_starts_again_counts_from_one():
    brain = started(linger=True)
    for who in (200, 201):
        brain.say(who, m.Arrive(1, 1))
        brain.say(who, m.Leave())
    brain.workers(2, first=500)
    assert brain.last(501, m.Welcome).barrier == 1


def test_a_scheduler_that_was_started_again_goes_on_where_the_workers_stand():
    brain = Brain(1)
    brain.servers(1)
    brain.join("worker", 200, rank=0, world_size=2)
    brain.say(200, m.Arrive(7, 5))  # before the others have come back
    why = brain.ask(200, m.Arrive(8, 5, waits=False)).why
    assert why == "barrier 5 of app 'default': it has not started; missing: worker 1 of app 'default'"
    brain.say(200, m.Arrive(9, 5))
    brain.join("worker", 201, rank=1, world_size=2)
    assert answers(brain, 200) == [(8, "Timeout")]
    brain.say(201, m.Arrive(1, 5))
    assert answers(brain, 200)[-1] == (9, "")


@pytest.mark.parametrize("role", ["reader", "server", "operator"])
def test_only_workers_arrive(role: str):
    brain = started()
    who = 100 if role == "server" else 400
    if role != "server":
        brain.join(role, who)
    brain.say(who, m.Arrive(1, 1))
    assert brain.last(who, m.Refused).error == "ProtocolError"
