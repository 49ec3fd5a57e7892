"""A step size that shrinks with the age of the gradient."""

import numpy as np
import pytest

import windlass as wl

ONE = np.ones(4, np.float32)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_a_gradient_is_worth_less_the_more_updates_it_has_missed(cluster: wl.Cluster, power: float) -> None:
    first, second = (cluster.worker(rank, 2) for rank in range(2))
    w, v = (c.tensor("w", 4, rule=wl.SGD(lr=1.0, staleness=power)) for c in (first, second))
    w.pull()
    for _ in range(3):
        v.push_pull(ONE)  # always fresh
    assert w.pull()[0] == -3
    for _ in range(8):
        v.push_pull(ONE)
    w.push(ONE).wait()  # eight updates old
    np.testing.assert_allclose(v.pull(), -11 - 9.0**-power, rtol=1e-6)
    w.pull()
    w.push(ONE, lr=2.0).wait()  # fresh again, and a rate of its own
    np.testing.assert_allclose(v.pull(), -13 - 9.0**-power, rtol=1e-6)
    for worker in (first, second):
        worker.close()


def test_rows_of_a_table_are_corrected_alike(cluster: wl.Cluster) -> None:
    first, second = (cluster.worker(rank, 2) for rank in range(2))
    t, u = (c.table("t", 2, rule=wl.SGD(lr=1.0, staleness=1.0)) for c in (first, second))
    row = np.ones((1, 2), np.float32)
    t.pull([7])
    for _ in range(3):
        u.push_pull([7], row)
    t.push([7], row).wait()
    np.testing.assert_allclose(u.pull([7]), [[-3.25, -3.25]])
    for worker in (first, second):
        worker.close()


def test_a_negative_power_is_refused() -> None:
    with pytest.raises(wl.InvalidArgument, match="staleness must be at least 0"):
        wl.Adam(staleness=-1.0)
