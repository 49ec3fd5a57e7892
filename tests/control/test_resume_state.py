"""What the scheduler does for objects of a checkpoint that are opened otherwise, for static splits, and at SIGTERM."""

from brain import Brain, started
from specs import tensor_spec

from windlass.control import messages as m
from windlass.control.events import Written
from windlass.control.resume import Resume, Resuming

SIZE = (1 << 20,)
OLD = tensor_spec("default/w", SIZE, "sgd", dtype=0)
NEW = tensor_spec("default/w", SIZE, "sum", dtype=0)


def place(epoch: int, batches: int) -> m.SplitPlace:
    return m.SplitPlace(samples=100, batch=5, epochs=9, shuffle=True, seed=0, epoch=epoch, batches=batches)


def resumed(world_size: int = 2, places: dict[int, dict[str, m.SplitPlace]] | None = None) -> Brain:
    """Servers have loaded, and two workers have begun."""
    brain = Brain(2, saves=True)
    resume = Resume("00" * 8, "default", 7, world_size, [OLD], {}, {}, places or {})
    brain.state.resuming = Resuming(brain.state, resume)
    brain.servers(2)
    brain.workers(2)
    for server in (100, 101):
        assert brain.last(server, m.Load).load == 0
        brain.say(server, m.Loaded())
    assert brain.last(200, m.View).clock == 7
    return brain


def answers(brain: Brain, worker: int) -> list[m.Answer]:
    return [message for message in brain.told[worker] if isinstance(message, m.Answer)]


def test_an_open_with_another_rule_is_answered_when_all_servers_have_loaded_it_again() -> None:
    brain = resumed()
    brain.say(200, m.Open(1, NEW))
    brain.say(201, m.Open(1, NEW))
    order = brain.last(101, m.Load)
    assert (order.load, order.clock, [one.spec for one in order.objects]) == (1, 7, [NEW])
    assert isinstance(brain.last(100, m.Forgotten), m.Forgotten)
    brain.say(100, m.Loaded(said=["it has another rule"], load=1))
    assert answers(brain, 200) == answers(brain, 201) == []
    assert brain.ask(200, m.Save(2, clock=7)).why.endswith("an object is being loaded; try again")
    brain.say(101, m.Loaded(said=["it has another rule"], load=1))
    for worker in (200, 201):
        assert answers(brain, worker)[-1].placed[0].spec == NEW
    assert brain.state.resuming.said == ["it has another rule"]
    assert brain.ask(200, m.Open(3, OLD)).error == "SpecMismatch"  # it is in use


def test_what_was_opened_as_it_was_and_what_differs_in_shape_is_refused() -> None:
    brain = resumed()
    other = tensor_spec("default/w", (5,), "sum", dtype=0)
    assert brain.ask(200, m.Open(1, other)).error == "SpecMismatch"
    assert brain.ask(200, m.Open(2, OLD)).error == ""
    assert brain.ask(201, m.Open(3, NEW)).error == "SpecMismatch"


def test_numbers_that_cannot_be_loaded_again_are_never_begun_anew() -> None:
    brain = resumed()
    brain.say(200, m.Open(1, NEW))
    brain.say(100, m.Loaded("the file is damaged", load=1))
    answer = brain.last(200, m.Answer)
    assert answer.error == "CheckpointFailed"
    assert "'w' cannot be loaded with another rule or policy: the file is damaged" in answer.why
    for spec in (OLD, NEW):
        assert brain.ask(201, m.Open(2, spec)).error == "CheckpointFailed"


def test_a_server_that_dies_meanwhile_ends_the_wait() -> None:
    brain = resumed()
    brain.say(200, m.Open(1, NEW))
    brain.die(101)
    assert brain.last(200, m.Answer).error == "CheckpointFailed"


def test_ranks_get_their_own_places_or_the_beginning_of_the_earliest_epoch() -> None:
    places = {0: {"data": place(2, 3)}, 1: {"data": place(1, 9)}}
    brain = resumed(2, places)
    assert brain.last(200, m.Welcome).places == places[0]
    assert brain.last(201, m.Welcome).places == places[1]
    assert brain.last(200, m.Welcome).places_why == ""
    brain = resumed(3, places)
    for worker in (200, 201):
        assert brain.last(worker, m.Welcome).places == {"data": place(1, 0)}
        assert "is of 3 workers, and now there are 2" in brain.last(worker, m.Welcome).places_why
    assert any("static splits begin their epochs again" in line for line in brain.state.resuming.said)


def saving() -> Brain:
    brain = started(saves=True, linger=True)
    brain.open(200)
    return brain


def write(brain: Brain) -> m.Capture:
    """Servers do what they are ordered to."""
    capture = brain.last(100, m.Capture)
    for server in (100, 101):
        brain.say(server, m.Armed(capture.save))
    for server in (100, 101):
        brain.say(server, m.Saved(capture.save, "", "x", 1, 1, 1, 1))
    return capture


def test_places_are_asked_for_before_the_cut_and_awaited_before_the_manifest() -> None:
    brain = saving()
    for worker in (200, 201):
        brain.say(worker, m.HasSplit())
    brain.say(200, m.Save(1, clock=4))
    due = brain.last(201, m.SplitsDue)
    assert due.clock == 4
    brain.say(200, m.Splits(due.save, {"data": place(0, 4)}))
    assert not any(isinstance(message, m.Capture) for message in brain.told[100])
    brain.say(201, m.Splits(due.save, later=True))  # it is behind, as it may be under BSP
    write(brain)
    going = brain.state.saves.going
    assert going is not None
    assert not going.writing
    brain.say(201, m.Splits(due.save, {"data": place(0, 4)}))
    assert going.writing
    assert going.places == {0: {"data": place(0, 4)}, 1: {"data": place(0, 4)}}


def test_a_worker_that_does_not_say_where_it_is_holds_up_no_checkpoint() -> None:
    for silent in (True, False):
        brain = saving()
        brain.say(201, m.HasSplit())
        brain.say(200, m.Save(1, clock=4))
        brain.fire("save") if silent else brain.die(201)
        write(brain)
        going = brain.state.saves.going
        assert going is not None
        assert going.writing


def test_the_cut_of_workers_that_hold_is_at_their_lowest_clock_and_they_end_when_it_is_armed() -> None:
    brain = saving()
    brain.say(201, m.Holds(6, b"[1]"))
    assert brain.state.saves.going is None  # the other may hold, too
    brain.say(200, m.Holds(5, b"[0]"))
    capture = brain.last(100, m.Capture)
    assert capture.clock == 5
    assert not any(isinstance(message, m.HoldOver) for message in brain.told[200])
    for server in (100, 101):
        brain.say(server, m.Armed(capture.save))
    for worker in (200, 201):
        assert brain.last(worker, m.HoldOver) == m.HoldOver()
    going = brain.state.saves.going
    assert going is not None
    assert going.extra == {0: b"[0]"}  # what rank 1 keeps is of a later clock


def test_one_worker_that_holds_is_enough_and_one_that_holds_lower_has_it_cut_again() -> None:
    brain = saving()
    brain.say(201, m.Holds(6))
    brain.fire("hold:default")
    assert brain.last(100, m.Capture).clock == 6
    brain.say(200, m.Holds(5))
    assert brain.last(100, m.Capture).clock == 5
    assert brain.last(100, m.CaptureOver).complete is False
    for worker in (200, 201):
        assert not any(isinstance(message, m.HoldOver) for message in brain.told[worker])


def test_workers_are_released_where_no_checkpoint_can_be_taken() -> None:
    brain = started(saves=False)
    brain.say(200, m.Holds(5))
    assert brain.last(200, m.HoldOver) == m.HoldOver()
    brain = saving()
    for worker in (200, 201):
        brain.say(worker, m.Holds(5))
    brain.say(100, m.Armed(brain.last(100, m.Capture).save, "a shard is beyond the cut"))
    assert brain.last(200, m.HoldOver) == m.HoldOver()


def test_a_scheduler_that_is_told_to_end_takes_a_checkpoint_of_each_app_first() -> None:
    brain = saving()
    brain.workers(1, app="other", first=300)
    brain._note(brain.state.terminate(30.0))
    assert brain.end is None
    assert brain.timers["end"] == 30.0
    for app, worker in (("default", 200), ("other", 300)):
        assert brain.last(worker, m.SaveDue).asks
        brain.say(worker, m.Save(9, clock=1))
        capture = write(brain)
        assert capture.app == app
        brain.feed(Written(capture.save, at=1000.0))
    assert brain.timers["end"] == 0.0
    brain.fire("end")
    assert brain.end is not None
    assert not brain.end.failed
    brain = saving()
    for _ in range(2):
        brain._note(brain.state.terminate(30.0))
    assert brain.end is not None  # a second signal


def test_if_a_server_finds_damage_all_load_the_next_older_one_and_workers_are_told() -> None:
    brain = Brain(2, saves=True)
    older = Resume("22" * 8, "default", 4, 2, [OLD], {}, {0: b"4"})
    resume = Resume("77" * 8, "default", 7, 2, [OLD], {}, {0: b"7"}, older=[older])
    brain.state.resuming = Resuming(brain.state, resume)
    brain.servers(2)
    brain.workers(2)
    brain.say(100, m.Loaded("block 3 is damaged"))
    assert [(load.id, load.load) for load in brain.told[100] if isinstance(load, m.Load)] == [
        ("77" * 8, 0),
        ("22" * 8, 1),
    ]
    brain.say(101, m.Loaded())  # of the first one
    brain.say(100, m.Loaded(load=1))
    assert not any(isinstance(message, m.View) for message in brain.told[200])
    brain.say(101, m.Loaded(load=1))
    assert brain.last(200, m.View).clock == 4
    welcome = brain.last(200, m.Welcome)
    assert (welcome.resumed, welcome.resumed_clock, welcome.extra) == ("22" * 8, 4, b"4")
    assert "warning checkpoint 7777777777777777 is passed over: block 3 is damaged" in brain.logs
    assert brain.ask(200, m.Open(1, OLD)).error == ""


def test_without_an_older_one_damage_ends_the_cluster() -> None:
    brain = Brain(1, saves=True)
    brain.state.resuming = Resuming(brain.state, Resume("77" * 8, "default", 7, 1, [OLD], {}))
    brain.servers(1)
    brain.say(100, m.Loaded("block 3 is damaged"))
    assert brain.end is not None
    assert brain.end.why == "cannot resume: block 3 is damaged"
