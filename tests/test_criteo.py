"""Clicks in the shape of Criteo's: the same ones every time, none twice, by a power law, with something to learn."""

import math

import numpy as np
import pytest

from windlass.bench.criteo import CARDINALITIES, NUMBERS, Criteo, scattered, zipf_ids


def test_there_are_as_many_rows_as_in_criteo_s_columns():
    assert (len(CARDINALITIES), sum(CARDINALITIES)) == (26, 33_762_577)
    assert Criteo().cardinalities == list(CARDINALITIES)


def test_a_batch_depends_on_its_number_and_the_seed_alone():
    one, again = (Criteo(10_000, seed=3).batch(7, 50) for _ in range(2))
    for a, b in zip(one, again, strict=True):
        np.testing.assert_array_equal(a, b)
    for other in (Criteo(10_000, seed=3).batch(8, 50), Criteo(10_000, seed=4).batch(7, 50)):
        assert not np.array_equal(one.ids, other.ids)
        assert not np.array_equal(one.numbers, other.numbers)


def test_no_batch_comes_twice():
    batches = Criteo(10_000).batches(64)
    seen = {next(batches).ids.tobytes() for _ in range(50)}
    assert len(seen) == 50


def test_shapes_and_ranges_are_those_of_clicks():
    criteo = Criteo(5_000)
    clicks = criteo.batch(0, 300)
    assert (clicks.numbers.shape, clicks.ids.shape, clicks.labels.shape) == ((300, NUMBERS), (300, 26), (300,))
    assert (clicks.numbers.dtype, clicks.ids.dtype, clicks.labels.dtype) == (np.float32, np.int64, np.float32)
    assert (clicks.ids >= 0).all()
    assert (clicks.ids < np.array(criteo.cardinalities)).all()
    assert sorted(set(clicks.labels.tolist())) == [0.0, 1.0]
    assert abs(sum(criteo.cardinalities) - 5_000) < 26
    assert min(criteo.cardinalities) == 1


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.05, 2.0])
def test_frequencies_follow_the_power_law(exponent: float):
    count, size = 1000, 400_000
    drawn = zipf_ids(np.random.default_rng(0), count, size, exponent, salt=5)
    seen = np.bincount(drawn, minlength=count)[scattered(np.arange(count), count, salt=5)]
    wanted = np.arange(1, count + 1) ** -exponent
    wanted *= size / wanted.sum()
    first = 3 if exponent < 2 else 1
    np.testing.assert_allclose(seen[:first], wanted[:first], rtol=0.15)
    halves = [(a[10:100].sum() / a[100:].sum()) for a in (seen, wanted)]
    assert halves[0] == pytest.approx(halves[1], rel=0.1)


@pytest.mark.parametrize("count", [1, 2, 97, 1460, 10_131])
def test_ids_are_scattered_one_to_one(count: int):
    ids = scattered(np.arange(count), count, salt=3)
    assert sorted(ids.tolist()) == list(range(count))
    if count > 10:
        assert np.abs(np.diff(ids)).min() > 1


def test_labels_follow_hidden_factors_of_the_ids():
    criteo = Criteo(2_000)
    clicks = criteo.batch(0, 20_000)
    agreement = criteo._agreement(clicks.ids)
    assert agreement.std() == pytest.approx(1, rel=0.4)
    low, high = (clicks.labels[agreement < -1].mean(), clicks.labels[agreement > 1].mean())
    assert high - low > 0.4
    assert 0.15 < clicks.labels.mean() < 0.45


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"rows": 25}, "rows must be at least 26, one per feature, not 25"),
        ({"exponent": -1.0}, "exponent must be a finite number of at least 0, not -1.0"),
        ({"exponent": math.nan}, "exponent must be a finite number of at least 0, not nan"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options: dict[str, float], complaint: str):
    with pytest.raises(ValueError, match=complaint):
        Criteo(**options)  # type: ignore[arg-type]
