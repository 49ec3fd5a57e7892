"""Checkpoints as the scheduler orders them, for operators, and what it says of them."""

import time

from brain import Brain, started

from windlass.control import messages as m
from windlass.control.api import status_of
from windlass.control.events import Written
from windlass.control.resume import Resume

OPERATOR, SECOND = 900, 901
WORKER = 200


def saving(**terms: object) -> Brain:
    """A cluster that saves, with two operators."""
    brain = started(saves=True, linger=True, **terms)
    brain.open(WORKER)
    for operator in (OPERATOR, SECOND):
        assert brain.join("operator", operator) is None
    return brain


def take(brain: Brain, number: int, clock: int = 5, error: str = "") -> str:
    """The worker asks, servers arm and write; returns the id."""
    brain.say(WORKER, m.Save(number, clock=clock))
    capture = brain.last(100, m.Capture)
    for server in (100, 101):
        brain.say(server, m.Armed(capture.save))
    for server in (100, 101):
        brain.say(server, m.Saved(capture.save, error, "x", 1, 1, 1, 1))
    if not error:
        brain.feed(Written(capture.save, at=1000.0))
    return capture.id


def answers(brain: Brain, operator: int) -> list[m.Answer]:
    return [message for message in brain.told[operator] if isinstance(message, m.Answer)]


def test_an_operator_s_question_is_answered_when_the_checkpoint_is_complete_and_gives_it_its_name():
    brain = saving()
    brain.say(OPERATOR, m.SaveNow(1, "default", "best", wait=True))
    assert brain.last(WORKER, m.SaveDue).asks
    assert answers(brain, OPERATOR) == []
    id = take(brain, 7)
    assert answers(brain, OPERATOR) == [m.Answer(1, saved=id)]
    assert brain.state.saves.last["default"] == (id, 5, 1000.0)


def test_without_waiting_it_is_answered_at_once():
    brain = saving()
    assert brain.ask(OPERATOR, m.SaveNow(1, "default")) == m.Answer(1)


def test_a_question_that_is_asked_again_is_answered_once():
    brain = saving()
    for _ in range(2):
        brain.say(OPERATOR, m.SaveNow(1, "default", wait=True))
    take(brain, 7)
    assert len(answers(brain, OPERATOR)) == 1


def test_of_two_names_each_gets_a_checkpoint():
    brain = saving()
    brain.say(OPERATOR, m.SaveNow(1, "default", "one", wait=True))
    brain.say(SECOND, m.SaveNow(1, "default", "two", wait=True))
    brain.told[WORKER].clear()
    first = take(brain, 7)
    assert (len(answers(brain, OPERATOR)), len(answers(brain, SECOND))) == (1, 0)
    assert brain.last(WORKER, m.SaveDue).asks, "the other is due"
    second = take(brain, 8, clock=6)
    assert answers(brain, SECOND) == [m.Answer(1, saved=second)]
    assert first != second


def test_a_checkpoint_that_is_given_up_is_said_to_whoever_waits():
    brain = saving()
    brain.say(OPERATOR, m.SaveNow(1, "default", "best", wait=True))
    take(brain, 7, error="no space left on device")
    (answer,) = answers(brain, OPERATOR)
    assert (answer.error, answer.why) == ("CheckpointFailed", "no space left on device")


def test_when_the_worker_that_was_to_ask_dies_the_next_is_told():
    brain = saving()
    brain.say(OPERATOR, m.SaveNow(1, "default", wait=True))
    brain.die(WORKER)
    assert brain.last(WORKER + 1, m.SaveDue).asks


def test_what_cannot_be_saved_is_refused_at_once():
    brain = saving()
    assert brain.ask(OPERATOR, m.SaveNow(1, "other", wait=True)).error == "NotFound"
    assert "'default'" in brain.last(OPERATOR, m.Answer).why
    brain.die(100)
    assert brain.ask(OPERATOR, m.SaveNow(2, "default", wait=True)).error == "ServerLost"
    nowhere = started(linger=True)
    nowhere.join("operator", OPERATOR)
    assert "--checkpoint-dir" in nowhere.ask(OPERATOR, m.SaveNow(1, "default", wait=True)).why


def test_the_status_has_the_age_of_the_last_good_one_and_the_bytes_of_the_one_under_way():
    brain = saving()
    take(brain, 7)
    brain.say(WORKER, m.Save(8, clock=6))
    brain.say(100, m.Report(saved_bytes=3))
    brain.say(101, m.Report(saved_bytes=4))
    found = status_of(brain.state, {}, {}, time.time())["checkpoints"]
    assert found["going"]["bytes"] == 7
    assert found["going"]["bytes_all"] == 4 << 20
    assert found["last"]["default"]["clock"] == 5
    assert abs(found["last"]["default"]["age_seconds"] - (time.time() - 1000.0)) < 100


def test_some_objects_alone_are_not_the_last_good_one():
    brain = saving()
    brain.say(WORKER, m.Save(7, clock=5, only=["w"]))
    capture = brain.last(100, m.Capture)
    for server in (100, 101):
        brain.say(server, m.Saved(capture.save, "", "x", 1, 1, 1, 1))
    brain.feed(Written(capture.save, at=1000.0))
    assert brain.state.saves.last == {}


RESUME = Resume("0" * 16, "default", 5, 2, [], {}, created=1000.0)


def test_a_cluster_that_goes_on_says_how_old_its_checkpoint_is():
    assert Brain(resume=RESUME, saves=True).state.saves.last["default"].at == 1000.0


def test_nobody_gives_up_while_servers_load_a_checkpoint():
    brain = Brain(resume=RESUME, saves=True)
    brain.servers()
    brain.workers()
    brain.fire("start:default")
    brain.fire("missing")
    waiting = brain.last(WORKER, m.Waiting)
    assert waiting.loading
    assert waiting.missing == [f"what server {i} loads from its checkpoint" for i in (0, 1)]
    assert not any(isinstance(message, m.Refused) for message in brain.told[WORKER])
    for server in (100, 101):
        brain.say(server, m.Loaded())
    assert brain.last(WORKER, m.View).clock == 5


def test_somebody_gives_up_where_workers_are_missing():
    brain = Brain(resume=RESUME, saves=True)
    brain.servers()
    for server in (100, 101):
        brain.say(server, m.Loaded())
    assert brain.join("worker", WORKER, rank=0, world_size=2) is None
    brain.fire("start:default")
    assert "missing: worker 1" in brain.last(WORKER, m.Refused).why
