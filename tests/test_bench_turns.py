"""How figures are measured: turns, medians, percentiles and noise, with clocks that are made up."""

import itertools

import pytest

from windlass.bench._turns import FULL, RUNS, SHORT, Length, Times, in_turns, loop_over, scatter, timed, timed_over


class Machine:
    """A clock, and sides whose calls take as long as they are told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns: list[tuple[str, int]] = []

    def side(self, name: str, seconds: float, first: float = 0.0):
        extra = itertools.chain([first], itertools.repeat(0.0))

        def turn(calls: int) -> list[float]:
            self.turns.append((name, calls))
            took = [seconds + next(extra) for _ in range(calls)]
            self.now += sum(took)
            return took

        return turn


def test_sides_take_turns_in_their_order_after_they_have_warmed_up():
    machine = Machine()
    length = Length(rounds=3, calls=2, seconds=0.0)
    ours, limit = in_turns(
        machine.side("ours", 1.0), machine.side("limit", 0.5), length=length, clock=lambda: machine.now
    )
    warm_up = [("ours", 1), ("ours", 2), ("limit", 1), ("limit", 2)]
    assert machine.turns == warm_up + 3 * [("ours", 2), ("limit", 2)]
    assert ours == Times(((1.0, 1.0),) * 3)
    assert limit == Times(((0.5, 0.5),) * 3)


def test_what_warms_up_is_not_counted():
    machine = Machine()
    (ours,) = in_turns(machine.side("ours", 0.01, first=5.0), length=FULL, clock=lambda: machine.now)
    assert set(itertools.chain(*ours.rounds)) == {0.01}


@pytest.mark.parametrize(
    ("each", "calls"),
    [(1e-6, 20_000), (1e-4, 2_000), (1e-3, 200), (0.005, 40), (0.01, 30), (0.05, 30), (0.1, 20), (0.5, 4), (3.0, 3)],
)
def test_a_turn_has_30_calls_or_takes_a_fifth_of_a_second_but_hardly_more_than_two(each: float, calls: int):
    machine = Machine()
    (ours,) = in_turns(machine.side("ours", each), length=FULL, clock=lambda: machine.now)
    assert [len(turn) for turn in ours.rounds] == [pytest.approx(calls, abs=1)] * FULL.rounds


def test_a_slow_first_call_does_not_make_turns_short():
    machine = Machine()
    (ours,) = in_turns(machine.side("ours", 1e-4, first=1.0), length=FULL, clock=lambda: machine.now)
    assert sum(ours.rounds[0]) == pytest.approx(FULL.seconds, rel=0.5)


def test_runs_warm_up_by_themselves_and_short_measurements_are_short():
    machine = Machine()
    in_turns(machine.side("a", 60.0), machine.side("b", 60.0), length=RUNS, clock=lambda: machine.now)
    assert machine.turns == RUNS.rounds * [("a", 1), ("b", 1)]
    machine = Machine()
    in_turns(machine.side("a", 1e-6), length=SHORT, clock=lambda: machine.now)
    assert sum(calls for _, calls in machine.turns) <= 10


def test_the_median_and_the_p99_are_over_all_calls_of_all_rounds():
    times = Times((tuple(range(1, 51)), tuple(range(51, 101))))
    assert times.median == 50.5
    assert times.p99 == 99
    assert times.calls == 100
    assert times.medians == [25.5, 75.5]
    assert Times(((3.0,),)).p99 == 3.0


def test_one_slow_call_in_a_hundred_moves_neither_the_median_nor_the_p99_and_two_move_the_p99():
    assert Times(((1.0,) * 99 + (50.0,),)).p99 == 1.0
    assert Times(((1.0,) * 98 + (50.0,) * 2,)).p99 == 50.0
    assert Times(((1.0,) * 98 + (50.0,) * 2,)).median == 1.0


def test_a_round_without_calls_is_refused():
    with pytest.raises(ValueError, match=r"at least one call, not \[1, 0\]"):
        Times(((1.0,), ()))


def test_calls_that_workers_make_at_once_share_the_time():
    assert Times(((1.0, 3.0),)).shared_by(2) == Times(((0.5, 1.5),))


def test_noise_is_half_the_interquartile_range_and_forgives_a_round():
    assert scatter([1.0] * 7) == 0
    assert scatter([1.0] * 6 + [9.0]) == 0
    assert scatter([0.8, 0.9, 1.0, 1.1, 1.2]) == pytest.approx(0.1)
    assert scatter([80, 90, 100, 110, 120]) == pytest.approx(0.1)
    assert scatter([5.0]) == 0


def test_every_call_is_timed_and_inputs_are_drawn_in_their_order():
    made: list[int] = []
    assert len(timed(lambda: made.append(1))(4)) == 4
    assert len(timed_over(itertools.count(), made.append)(3)) == 3
    assert made == [1, 1, 1, 1, 0, 1, 2]
    assert loop_over(itertools.count(), lambda i: [i + 0.5])(3) == [0.5, 1.5, 2.5]
