"""All-reduces: what is made of what workers give, and as the scheduler's state machine uses it."""

from typing import Any

import msgspec
import numpy as np
import pytest
from brain import Brain, started

from windlass.control import all_reduce
from windlass.control import messages as m
from windlass.control.all_reduce import LOST, combined, complaint, reduced_of
from windlass.control.barrier import Barrier

A, B, C = 11, 22, 33


def give(array: Any, op: str = "sum", dtype: str = "float32") -> m.Numbers:
    made = np.asarray(array, dtype)
    return m.Numbers(op, dtype, list(made.shape), made.astype(made.dtype.newbyteorder("<")).tobytes())  # type: ignore[arg-type]


def array_of(reduced: m.Reduced | None) -> np.ndarray:
    assert reduced is not None
    assert not reduced.error
    return np.frombuffer(reduced.data, reduced.dtype)


def barrier(*workers: int, waited: tuple[int, ...] = ()) -> Barrier:
    made = Barrier()
    made.follow(dict(enumerate(workers)), waited)
    return made


# -- what is made of arrays ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "expected"), [("sum", [6, 3]), ("mean", [2, 1]), ("max", [3, 4]), ("min", [1, -2])])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_each_operation_of_each_dtype(op: str, expected: list[int], dtype: str):
    reduced = combined([give(x, op, dtype) for x in ([1, 4], [2, 1], [3, -2])])
    assert reduced.workers == 3
    assert reduced.dtype == ("float64" if (op, dtype) == ("mean", "int64") else dtype)
    assert array_of(reduced).tolist() == expected


def test_arrays_are_combined_in_the_order_of_ranks():
    """A sum of float64 depends on its order: 1e16 + 1 - 1e16 is not 1e16 - 1e16 + 1."""
    values = {2: give(-1e16, dtype="float64"), 0: give(1e16, dtype="float64"), 1: give(1.0, dtype="float64")}
    assert array_of(reduced_of(values)).item() == (1e16 + 1.0) - 1e16
    assert array_of(reduced_of(dict(sorted(values.items())))).item() == (1e16 + 1.0) - 1e16


def test_a_sum_of_float32_is_rounded_once():
    parts = [np.float32(1e8), *[np.float32(1)] * 7]
    assert array_of(combined([give(x) for x in parts])).item() == np.float32(1e8 + 7)


def test_int64_is_exact_and_wraps_around():
    assert array_of(combined([give(2**62 + 1, dtype="int64"), give(2**61, dtype="int64")])).item() == 2**62 + 2**61 + 1
    assert array_of(combined([give(2**63 - 1, dtype="int64"), give(1, dtype="int64")])).item() == -(2**63)


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_nan_and_infinity_are_numbers_like_others(op: str):
    assert np.isnan(array_of(combined([give([1.0], op), give([np.nan], op)])))
    assert array_of(combined([give([np.inf], op), give([np.inf], op)])).item() == np.inf


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_of_any_shape(shape: tuple[int, ...]):
    assert array_of(combined([give(np.ones(shape)), give(np.ones(shape))])).tolist() == [2.0] * int(np.prod(shape))


@pytest.mark.parametrize(
    ("other", "error", "said"),
    [
        (
            give([1, 2, 3]),
            "ShapeMismatch",
            "rank 0 gave float32 of shape (2,) for op='sum', rank 5 float32 of shape (3,)",
        ),
        (give([[1, 2]]), "ShapeMismatch", "rank 5 float32 of shape (1, 2) for op='sum'"),
        (give([1, 2], dtype="float64"), "InvalidArgument", "rank 5 float64 of shape (2,)"),
        (give([1, 2], "max"), "InvalidArgument", "rank 5 float32 of shape (2,) for op='max'"),
        (None, "InvalidArgument", "rank 5 nothing (barrier)"),
    ],
)
def test_ranks_that_differ_are_an_error_that_names_both(other: m.Numbers | None, error: str, said: str):
    reduced = reduced_of({0: give([1, 2]), 2: give([3, 4]), 5: other, 7: give([1, 2])})
    assert reduced is not None
    assert (reduced.error, reduced.data) == (error, b"")
    assert said in reduced.why


@pytest.mark.parametrize(
    "wrong",
    [
        msgspec.structs.replace(give([1, 2]), data=b"1234567"),
        msgspec.structs.replace(give([1, 2]), shape=[3]),
        msgspec.structs.replace(give([1, 2]), shape=[2**32 - 1] * 64),
        msgspec.structs.replace(give([1, 2]), dtype="float64"),
    ],
)
def test_bytes_that_do_not_fit_their_shape_are_noticed(wrong: m.Numbers):
    assert complaint(give([1, 2])) == ""
    assert complaint(wrong).startswith("expected ")


@pytest.mark.parametrize(
    "wrong",
    [
        {"op": "product"},
        {"dtype": "int8"},
        {"data": bytes(m.REDUCE_BYTES_MAX + 1)},
        {"shape": [1] * 65},
        {"shape": [-1]},
    ],
)
def test_a_message_with_something_else_in_it_is_malformed(wrong: dict[str, Any]):
    good = m.Arrive(1, 1, True, give([1, 2]))
    assert m.read_member(m.encode(good)) == good
    with pytest.raises(m.Malformed):
        m.read_member(m.encode(m.Arrive(1, 1, True, msgspec.structs.replace(give([1, 2]), **wrong))))


# -- at a barrier ----------------------------------------------------------------------------------------------------


def test_the_result_is_of_those_who_are_there_when_it_is_passed():
    b = barrier(A, B, C)
    b.arrive(A, 1, give(1))
    b.arrive(C, 1, give(100))
    b.follow({0: A, 1: B})  # what the third gave does not count any more
    b.arrive(B, 1, give(10))
    reduced = b.reduced(1, give(1))
    assert array_of(reduced).item() == 11
    assert reduced is not None
    assert reduced.workers == 2


def test_the_last_one_missing_makes_the_result_by_dying():
    b = barrier(A, B)
    b.arrive(A, 1, give(1))
    b.follow({0: A})
    assert (b.number, array_of(b.reduced(1, give(1))).item()) == (2, 1)


def test_a_replacement_gives_for_itself():
    b = barrier(A, B)
    b.arrive(B, 1, give(1000))
    b.follow({0: A}, [1])
    b.arrive(A, 1, give(1))
    assert b.number == 1
    b.follow({0: A, 1: C})
    b.arrive(C, 1, give(10))
    assert array_of(b.reduced(1, give(10))).item() == 11


def test_the_last_result_can_be_asked_for_again_and_takes_bounded_memory():
    b = barrier(A, B)
    assert b.held_bytes == 0
    for number in range(1, 6):
        b.arrive(A, number, give([1.0, 2.0]))
        assert b.held_bytes == 8 * (1 if number == 1 else 2)  # what one has given, and the result before
        b.arrive(B, number, give([1.0, 2.0]))
        assert b.held_bytes == 8
        assert array_of(b.reduced(number, give([1.0, 2.0]))).tolist() == [2, 4]
    b.arrive(A, 6)
    b.arrive(B, 6)
    assert (b.held_bytes, b.reduced(6)) == (0, None)


def test_a_result_that_was_made_elsewhere_is_lost_and_not_invented():
    b = barrier(A, B)
    b.arrive(A, 4, give(1))
    b.arrive(B, 5, give(1))  # so 4 was passed, at a scheduler that is gone
    assert b.reduced(4, give(1)) is LOST
    assert b.reduced(4) is None  # a plain barrier has nothing to lose


# -- in the scheduler ------------------------------------------------------------------------------------------------


def reduced(brain: Brain, who: int) -> list[m.Reduced | None]:
    return [a.reduced for a in brain.told[who] if isinstance(a, m.Answer) and not a.error]


def test_all_get_the_same_bytes_when_the_last_has_arrived():
    brain = started(workers=3)
    for i, who in enumerate((200, 202, 201)):
        assert reduced(brain, 200) == []
        brain.say(who, m.Arrive(7, 1, numbers=give([0.1 * i, i])))
    (first,) = reduced(brain, 200)
    assert reduced(brain, 201) == reduced(brain, 202) == [first]
    brain.say(201, m.Arrive(7, 1, numbers=give([0.2, 2])))  # its connection was made again
    assert reduced(brain, 201) == [first, first]


@pytest.mark.parametrize("arrived", [False, True])
def test_who_dies_in_the_round_is_not_in_the_sum_and_the_count_says_so(arrived: bool):
    brain = started(workers=3)
    brain.say(200, m.Arrive(7, 1, numbers=give(1)))
    if arrived:
        brain.say(202, m.Arrive(7, 1, numbers=give(100)))
    brain.die(202)
    brain.say(201, m.Arrive(7, 1, numbers=give(10)))
    for who in (200, 201):
        (got,) = reduced(brain, who)
        assert got is not None
        assert (array_of(got).item(), got.workers) == (11, 2)


def test_where_a_lost_worker_is_waited_for_its_replacement_completes_the_sum():
    brain = started(workers=2, on_worker_loss="wait")
    brain.say(201, m.Arrive(7, 1, numbers=give(100)))
    brain.die(201)
    brain.say(200, m.Arrive(7, 1, numbers=give(1)))
    assert reduced(brain, 200) == []
    assert brain.join("worker", 300, rank=1, world_size=2, on_worker_loss="wait") is None
    brain.say(300, m.Arrive(1, 1, numbers=give(10)))
    assert [array_of(x).item() for x in reduced(brain, 200)] == [11]


def test_a_plain_barrier_beside_an_all_reduce_is_an_error_for_both():
    brain = started()
    brain.say(200, m.Arrive(7, 1, numbers=give(1)))
    brain.say(201, m.Arrive(7, 1))
    for who in (200, 201):
        (got,) = reduced(brain, who)
        assert got is not None
        assert got.error == "InvalidArgument"
        assert got.why == "rank 0 gave float32 of shape () for op='sum', rank 1 nothing (barrier)"
    brain.say(200, m.Arrive(8, 2))
    brain.say(201, m.Arrive(8, 2))  # they can go on
    assert reduced(brain, 200)[1:] == [None]


def test_what_does_not_fit_its_shape_is_refused_and_has_not_arrived():
    brain = started()
    brain.say(201, m.Arrive(7, 1, numbers=give(1)))
    answer = brain.ask(200, m.Arrive(7, 1, numbers=msgspec.structs.replace(give(1), shape=[2])))
    assert (answer.error, answer.why) == (
        "InvalidArgument",
        "all_reduce 1 of app 'default': expected 8 bytes of float32 of shape (2,) for op='sum', saw 4",
    )
    assert reduced(brain, 201) == []


def test_what_one_round_and_what_all_take_is_bounded(monkeypatch: pytest.MonkeyPatch):
    brain = started(workers=3)
    monkeypatch.setattr(all_reduce, "ROUND_BYTES_MAX", 3 * 4 - 1)
    answer = brain.ask(200, m.Arrive(7, 1, numbers=give(1)))
    assert answer.error == "InvalidArgument"
    assert "4 bytes from each of 3 workers, at most 11 together; for more use a tensor" in answer.why
    monkeypatch.setattr(all_reduce, "ROUND_BYTES_MAX", 3 * 4)
    monkeypatch.setattr(all_reduce, "HELD_BYTES_MAX", 4)
    brain.say(200, m.Arrive(8, 1, numbers=give(1)))
    brain.workers(2, app="other", first=300)
    answer = brain.ask(300, m.Arrive(7, 1, numbers=give(1)))
    assert (answer.error, answer.why) == (
        "ResourceExhausted",
        "all_reduce 1 of app 'other': all apps together hold 4 bytes here, of at most 4",
    )
    brain.say(200, m.Leave())  # what it held is free
    brain.say(300, m.Arrive(8, 1, numbers=give(1)))
    brain.say(301, m.Arrive(8, 1))
    assert len(reduced(brain, 300)) == 1


def test_time_that_is_up_says_who_is_missing():
    brain = started(workers=3)
    answer = brain.ask(200, m.Arrive(7, 1, waits=False, numbers=give(1)))
    assert answer.error == "Timeout"
    assert answer.why == "all_reduce 1 of app 'default': 1 of 3 workers have arrived; missing: ranks 1, 2"


def test_nothing_is_kept_of_an_app_that_is_over():
    brain = started(linger=True)
    for who in (200, 201):
        brain.say(who, m.Arrive(1, 1, numbers=give([1.0] * 100)))
    assert brain.state.apps["default"].barrier.held_bytes == 400
    for who in (200, 201):
        brain.say(who, m.Leave())
    assert sum(app.barrier.held_bytes for app in brain.state.apps.values()) == 0
