"""Local steps with an exchange now and then, against the same arithmetic in numpy."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import SHARD, held, numbers

import windlass as wl

F = np.float32


def together(*jobs: Callable[[], object]) -> None:
    """Runs them at once, each in a thread; raises what one of them raised."""
    errors: list[BaseException] = []

    def run(job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[job]) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Outer:
    """SGD with momentum in numpy, as DiLoCo's outer optimizer."""

    def __init__(self, rule: wl.SGD, start: np.ndarray) -> None:
        self.rule, self.start, self.buffer = rule, start.copy(), np.zeros_like(start)

    def exchange(self, now: np.ndarray) -> np.ndarray:
        lr, momentum = F(self.rule.lr), F(self.rule.momentum)
        delta = self.start - now
        self.buffer = momentum * self.buffer + delta
        self.start = self.start - lr * (delta + momentum * self.buffer if self.rule.nesterov else self.buffer)
        return self.start


# -- one worker against numpy ----------------------------------------------------------------------------------------

OUTERS = [
    wl.SGD(lr=1.0),
    wl.SGD(lr=0.5),
    wl.SGD(lr=0.5, momentum=0.75),
    wl.SGD(lr=0.7, momentum=0.9, nesterov=True),
]


@pytest.mark.parametrize("outer", OUTERS, ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (3, SHARD)], ids=str)
def test_local_steps_and_an_outer_sgd_are_numpys_to_the_last_bit(
    cluster: wl.Cluster, outer: wl.SGD, shape: tuple[int, ...]
):
    w = np.asarray(numbers(*shape))
    reference, mine = Outer(outer, w), w.copy()
    local = cluster.local(w, every=3, outer=outer)
    np.testing.assert_array_equal(w, mine)
    for step in range(1, 13):
        grad = np.asarray(numbers(*shape, seed=step))
        w -= F(0.1) * grad
        mine = mine - F(0.1) * grad
        assert local.step() == (step % 3 == 0)
        if step % 3 == 0:
            mine = reference.exchange(mine)
        np.testing.assert_array_equal(w, mine)
    np.testing.assert_array_equal(local.centre(), w)


def test_an_outer_weight_decay_sees_the_weights(cluster: wl.Cluster):
    w = np.full(4, 8, F)
    local = cluster.local(w, every=1, outer=wl.SGD(lr=1.0, weight_decay=0.25))
    assert w.tolist() == [8] * 4  # the first weights do not decay
    w -= 2
    local.step()
    assert w.tolist() == [8 - (2 + 0.25 * 8)] * 4


def test_average_pushes_the_weights_themselves(cluster: wl.Cluster):
    w = numbers(50)
    local = cluster.local(w, every=2, outer=wl.Average())
    for step in range(1, 7):
        before = w + F(step)
        w += F(step)
        local.step()
        np.testing.assert_array_equal(w, before)
        if step % 2 == 0:
            np.testing.assert_array_equal(local.centre(), before)


@pytest.mark.parametrize("alpha", [0.5, 0.1, 1])
@pytest.mark.parametrize("every", [1, 4])
def test_elastic_averaging_is_numpys_to_the_last_bit(cluster: wl.Cluster, alpha: float, every: int):
    w = numbers(3, 100)
    x, centre = w.copy(), w.copy()
    elastic = cluster.elastic(w, every=every, alpha=alpha)
    for step in range(1, 13):
        grad = numbers(3, 100, seed=step)
        w -= F(0.1) * grad
        x = x - F(0.1) * grad
        assert elastic.step() == (step % every == 0)
        if step % every == 0:
            moved = F(alpha) * (x - centre)
            x, centre = x - moved, centre + moved
        np.testing.assert_array_equal(w, x)
    np.testing.assert_array_equal(elastic.centre(), centre)


# -- the form of the arrays ------------------------------------------------------------------------------------------


def test_arrays_come_as_one_as_a_list_or_by_name_and_so_does_the_centre(cluster: wl.Cluster):
    w, b, c = np.ones((2, 3), F), np.zeros(3), np.array(5, F)
    by_name = cluster.local({"w": w, "b": b}, every=1, outer=wl.SGD(lr=1.0), name="named")
    listed = cluster.local((w, b, c), every=1, outer=wl.Average(), name="listed")
    w += 1
    b += 0.5
    assert by_name.step()
    assert list(by_name.centre()) == ["w", "b"]
    assert by_name.centre()["w"].tolist() == [[2] * 3] * 2
    assert by_name.centre()["b"].tolist() == [0.5] * 3
    c *= 2
    listed.step()
    assert [a.ravel()[0] for a in listed.centre()] == [2, 0.5, 10]
    assert [a.shape for a in listed.centre()] == [(2, 3), (3,), ()]
    assert repr(listed) == "<Local 'listed' every 1, 3 arrays, Average()>"


def test_arrays_are_changed_in_place_whatever_their_layout(cluster: wl.Cluster):
    whole = numbers(6, 8)
    view = whole[::2, ::-1]
    outside, start = whole[1::2].copy(), view.copy()
    local = cluster.local(view, every=1, outer=wl.SGD(lr=0.5))
    view -= 4
    local.step()
    np.testing.assert_array_equal(whole[::2, ::-1], start - F(0.5) * (start - (start - 4)))
    np.testing.assert_array_equal(whole[1::2], outside)


def test_float64_arrays_keep_their_dtype(cluster: wl.Cluster):
    w = np.full(3, 1 + 2**-40)
    local = cluster.local(w, every=1, outer=wl.SGD(lr=0.5))
    assert w.tolist() == [1] * 3  # what the servers keep is float32
    w -= 1
    local.step()
    assert w.dtype == np.float64
    assert w.tolist() == [0.5] * 3


# -- several workers -------------------------------------------------------------------------------------------------


def test_what_two_workers_have_moved_is_averaged_exactly_in_any_order(cluster: wl.Cluster):
    n, periods = 1000, 20
    centres, barrier = [], threading.Barrier(2, timeout=60)

    def work(rank: int) -> None:
        w = np.full(n, 100 if rank == 0 else -1, F)
        local = cluster.worker(rank, 2).local(w, every=2, outer=wl.SGD(lr=0.5))
        assert (w == 100).all()
        barrier.wait()
        for _ in range(2 * periods):
            w -= 2 * (rank + 1)
            local.step()
        barrier.wait()
        centres.append(local.centre())

    together(lambda: work(1), lambda: work(0))
    for centre in centres:
        assert (centre == 100 - periods * np.mean([2 * 2, 2 * 4])).all()


def test_what_two_workers_give_elastically_is_what_the_centre_gets(cluster: wl.Cluster):
    given, centres, barrier = [], [], threading.Barrier(2, timeout=60)

    def work(rank: int) -> None:
        w = np.full(10, 64, F)
        elastic = cluster.worker(rank, 2).elastic(w, every=1, alpha=0.5)
        barrier.wait()
        for _ in range(6):  # few enough halves for float32 to be exact
            w -= 2 + rank
            before = w.copy()
            elastic.step()
            given.append(before - w)
        barrier.wait()
        centres.append(elastic.centre())

    together(lambda: work(1), lambda: work(0))
    for centre in centres:
        np.testing.assert_array_equal(centre, 64 + np.sum(given, axis=0))
        assert (centre < 64).all()


def test_workers_with_different_data_meet_at_the_common_minimum(cluster: wl.Cluster):
    targets = [np.array([x, -x], F) for x in (1.0, 2.0, 6.0)]  # of (w - target)^2 / 2; their mean is 3, -3
    centres: list[np.ndarray] = []

    def work(rank: int, barrier: threading.Barrier) -> None:
        w = np.zeros(2, F)
        elastic = cluster.worker(rank, 3).elastic(w, every=4, alpha=0.25)
        for _ in range(400):
            w -= F(0.02) * (w - targets[rank])
            if elastic.step():
                barrier.wait()
        barrier.wait()
        elastic.finish()
        centres.append(elastic.centre())

    barrier = threading.Barrier(3, timeout=60)
    together(*[lambda rank=rank: work(rank, barrier) for rank in range(3)])
    for centre in centres:
        np.testing.assert_allclose(centre, [3, -3], rtol=0.05)


# -- the first weights -----------------------------------------------------------------------------------------------


def test_others_wait_for_the_weights_of_rank_0(cluster: wl.Cluster):
    zero, one = cluster.worker(0, 2), cluster.worker(1, 2)
    a, b, done = np.full(4, 5, F), np.full(4, 9, F), threading.Event()

    def second() -> None:
        one.local(b, every=1, outer=wl.SGD(lr=0.7, momentum=0.9))
        done.set()

    def first() -> None:
        assert not done.wait(0.3)
        zero.local(a, every=1, outer=wl.SGD(lr=0.7, momentum=0.9))
        assert done.wait(30)

    together(second, first)
    assert a.tolist() == b.tolist() == [5] * 4


def test_they_do_not_wait_for_ever(cluster: wl.Cluster):
    one = cluster.worker(1, 2)
    with pytest.raises(wl.Timeout, match=r"local 'local': waited for the first weights for 0\.1 s"):
        one.local(np.ones(3, F), every=1, outer=wl.SGD(lr=1.0), timeout=0.1)


@pytest.mark.parametrize("outer", [wl.SGD(lr=0.5), wl.SGD(lr=0.5, momentum=0.5), wl.Average(), None], ids=str)
def test_what_is_on_the_servers_wins(cluster: wl.Cluster, outer: wl.Rule | None):
    def make(w: np.ndarray) -> Any:
        if outer is None:
            return cluster.elastic(w, every=1, alpha=0.5)
        return cluster.local(w, every=1, outer=outer)

    w, again = np.full(4, 8, F), np.full(4, -1, F)
    first = make(w)
    w -= 4
    first.step()
    before = cluster.fingerprint()
    make(again)
    np.testing.assert_array_equal(again, first.centre())
    assert cluster.fingerprint() == before


def test_first_weights_that_came_only_in_part_are_put_again(cluster: wl.Cluster):
    outer = wl.SGD(lr=0.5, momentum=0.5, nesterov=True)
    half = cluster.tensor("local", (4,), rule=outer)  # a worker that died before it could say that all is there
    half.push(np.full(4, -3 / 2.0**60, F), lr=2.0**60, nesterov=False).wait()
    assert half.pull().tolist() == [3] * 4
    w = np.full(4, 8, F)
    cluster.local(w, every=1, outer=outer)
    assert w.tolist() == [8] * 4
    assert half.pull().tolist() == [8] * 4


@pytest.mark.parametrize("other", [{"w": (4,), "c": (2,)}, {"w": (4,)}, {"w": (4,), "b": (2,), "c": ()}], ids=str)
def test_workers_with_other_arrays_are_told(cluster: wl.Cluster, other: dict[str, Any]):
    cluster.local({"w": np.ones(4, F), "b": np.ones(2, F)}, every=1, outer=wl.Average())
    arrays = {name: np.ones(shape, F) for name, shape in other.items()}
    with pytest.raises(
        wl.InvalidArgument, match=r"local 'local': other arrays than those it was begun with.*'local.w'"
    ):
        cluster.worker(1, 2).local(arrays, every=1, outer=wl.Average())


# -- the end ---------------------------------------------------------------------------------------------------------


def test_finish_exchanges_what_is_left_and_only_that(cluster: wl.Cluster):
    w = np.zeros(3, F)
    local = cluster.local(w, every=4, outer=wl.SGD(lr=0.5))
    local.finish()
    assert not local.centre().any()
    for _ in range(5):
        w += 2
        local.step()
    assert w.tolist() == [4 + 2] * 3
    local.finish()
    local.finish()
    assert w.tolist() == [4 + 1] * 3
    assert local.centre().tolist() == [5] * 3
    w += 2
    assert not local.step()  # a period has four steps again


@pytest.mark.parametrize("raises", [False, True])
def test_a_block_finishes_unless_it_raises(cluster: wl.Cluster, raises: bool):
    w = np.zeros(3, F)

    def block() -> None:
        with cluster.local(w, every=10, outer=wl.SGD(lr=1.0)) as local:
            w[:] = 4
            local.step()
            if raises:
                raise KeyError("mine")

    if raises:
        with pytest.raises(KeyError, match="mine"):
            block()
    else:
        block()
    assert cluster.tensor("local", 3, rule=wl.SGD(lr=1.0)).pull().tolist() == [0 if raises else 4] * 3


@pytest.mark.parametrize("kind", ["local", "elastic"])
def test_after_an_exchange_that_failed_a_new_one_begins_with_what_is_on_the_servers(cluster: wl.Cluster, kind: str):
    def make(w: np.ndarray) -> Any:
        if kind == "local":
            return cluster.local(w, every=1, outer=wl.SGD(lr=1.0), name="s")
        return cluster.elastic(w, every=1, alpha=0.5, name="s")

    w = np.ones(4, F)
    schedule = make(w)
    w += 1
    with held(schedule._tensors[0]):
        with pytest.raises(wl.Timeout):
            schedule.step(timeout=0.2)
        assert w.tolist() == [2] * 4
    for call in (schedule.step, schedule.finish):
        with pytest.raises(wl.InvalidArgument, match="'s': an exchange has failed"):
            call()
    again = np.zeros(4, F)
    fresh = make(again)
    np.testing.assert_array_equal(again, fresh.centre())
    again += 1
    assert fresh.step()


# -- misuse ----------------------------------------------------------------------------------------------------------

HERE = pytest.mark.embedded("refused before anything is sent")


@HERE
@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, None, "8"])
def test_every_is_a_whole_number_of_steps(cluster: wl.Cluster, wrong: Any):
    with pytest.raises(wl.InvalidArgument, match="local 'local': every must be a whole number of at least 1, not"):
        cluster.local(np.ones(3, F), every=wrong, outer=wl.Average())


@HERE
@pytest.mark.parametrize("wrong", [wl.Adam(), wl.Sum(), None, "sgd"], ids=str)
def test_the_outer_rule_is_sgd_or_average(cluster: wl.Cluster, wrong: Any):
    with pytest.raises(wl.InvalidArgument, match="outer must be SGD or Average, not"):
        cluster.local(np.ones(3, F), every=1, outer=wrong)
    with pytest.raises(wl.InvalidArgument, match=r"outer must have no dampening, not 0\.5"):
        cluster.local(np.ones(3, F), every=1, outer=wl.SGD(lr=1.0, momentum=0.9, dampening=0.5))


@HERE
@pytest.mark.parametrize("wrong", [0, -0.1, 1.1, float("nan"), True, None, "0.5"])
def test_alpha_is_a_share(cluster: wl.Cluster, wrong: Any):
    with pytest.raises(wl.InvalidArgument, match="elastic 'elastic': alpha must be above 0 and at most 1, not"):
        cluster.elastic(np.ones(3, F), every=1, alpha=wrong)


READ_ONLY = np.ones(3, F)
READ_ONLY.flags.writeable = False


@HERE
@pytest.mark.parametrize(
    ("arrays", "error", "says"),
    [
        (np.ones(3, np.int64), wl.ShapeMismatch, "'local': expected float32 or float64, saw int64"),
        ([np.ones(3, F), [1.0]], wl.ShapeMismatch, r"'local\.1': expected a numpy array or a torch tensor, saw list"),
        (3.0, wl.ShapeMismatch, "'local': expected a numpy array or a torch tensor, saw float"),
        ({"w": READ_ONLY}, wl.ShapeMismatch, r"'local\.w': the array is read-only"),
        ({"a/b": np.ones(3, F)}, wl.InvalidArgument, r"text without '/', use '\.' instead; not 'a/b'"),
        ({1: np.ones(3, F)}, wl.InvalidArgument, "names of arrays are text .* not 1"),
        ({}, wl.InvalidArgument, "expected at least one array"),
        ([], wl.InvalidArgument, "expected at least one array"),
    ],
)
def test_arrays_of_another_kind_are_named(cluster: wl.Cluster, arrays: Any, error: Any, says: str):
    with pytest.raises(error, match=rf"local 'local'.*{says}"):
        cluster.local(arrays, every=1, outer=wl.Average())
