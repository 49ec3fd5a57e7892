"""The bench of policies: its theory is right, and it measures what it says."""

import statistics

import numpy as np
import pytest
from rich.console import Console

import windlass as wl
from windlass.bench import _native
from windlass.bench import sync as bench

UNEVEN = np.stack([bench.draws(rank, 1, 400) for rank in range(4)])


def ends(seconds: np.ndarray, staleness: int) -> np.ndarray:
    """When each worker may begin its next step, by step: after the slowest's step `staleness` before."""
    workers, steps = seconds.shape
    done, begins = np.zeros((workers, steps + 1)), np.zeros((workers, steps + 1))
    for k in range(1, steps + 1):
        done[:, k] = begins[:, k - 1] + seconds[:, k - 1]
        begins[:, k] = np.maximum(done[:, k], done[:, max(k - staleness, 0)].max())
    return begins[:, -1]


@pytest.mark.parametrize("staleness", [0, 1, 4, 1000])
def test_the_simulation_of_ssp_is_its_recurrence(staleness: int):
    pace = bench.simulate(wl.SSP(staleness), UNEVEN)
    assert pace.steps_per_second == pytest.approx(UNEVEN.size / ends(UNEVEN, staleness).mean(), rel=0.01)
    assert max(pace.staleness) <= staleness


def test_bsp_is_ssp_of_0_and_waits_for_the_slowest_of_every_step():
    bsp = bench.simulate(wl.BSP(), UNEVEN)
    assert bsp.steps_per_second == pytest.approx(UNEVEN.size / UNEVEN.max(axis=0).sum())
    assert bsp == bench.simulate(wl.SSP(0), UNEVEN)
    assert bsp.idle == pytest.approx(1 - UNEVEN.mean() / UNEVEN.max(axis=0).mean())


def test_asp_is_as_fast_as_its_workers_and_idle_never():
    asp = bench.simulate(wl.ASP(), UNEVEN)
    assert asp.steps_per_second == pytest.approx(4 / UNEVEN.mean())
    assert asp.idle == 0


def test_policies_between_bsp_and_asp_are_between_them():
    slowest, fastest = (bench.simulate(sync, UNEVEN).steps_per_second for sync in (wl.BSP(), wl.ASP()))
    for sync in (wl.SSP(4), wl.BSP(spare=1), wl.MaxDelay(0.1)):
        assert slowest * 1.1 < bench.simulate(sync, UNEVEN).steps_per_second < fastest * 0.99, sync
    assert bench.simulate(wl.MaxDelay(0), UNEVEN).steps_per_second == pytest.approx(slowest)
    assert bench.simulate(wl.BSP(spare=3), UNEVEN).steps_per_second == pytest.approx(fastest)


def test_the_theory_of_uneven_workers():
    # A step of BSP is the slowest of four: 50 + 150 * (1 - (7/8)**4) = 112 ms; one of ASP is 68.75 ms on average.
    assert bench.theory(wl.ASP(), 20_000) == pytest.approx(112.07 / 68.75, rel=0.02)
    assert bench.theory(wl.SSP(4), 20_000) == pytest.approx(1.48, rel=0.02)


def test_steps_are_the_same_for_every_policy_and_others_for_every_worker_and_run():
    assert np.array_equal(bench.draws(1, 2, 50), bench.draws(1, 2, 50))
    assert not np.array_equal(bench.draws(1, 2, 50), bench.draws(2, 1, 50))
    assert not np.array_equal(bench.draws(1, 2, 50), bench.draws(1, 3, 50))
    assert set(bench.draws(0, 0, 100)) == {bench.STEP_S, bench.SLOWER * bench.STEP_S}


def test_a_gate_where_many_wait_asks_more_often_than_one_where_nobody_does():
    bsp, asp = (_native.time_gate(sync._spec(), 64, 5_000, 5) for sync in (wl.BSP(), wl.ASP()))
    assert [len(seconds) for seconds in (*bsp, *asp)] == [5] * 4
    once, again, never_waits = (statistics.median(seconds) for seconds in (*bsp, asp[1]))
    assert 0 < once < again
    assert never_waits < again


def test_the_loop_of_two_gradients_is_an_update_by_their_mean():
    w, g0, g1 = (np.random.default_rng(i).standard_normal(4096, np.float32) for i in range(3))
    for stream in (False, True):
        with wl.connect(threads=1) as cluster:
            arrays = [cluster.empty(4096) for _ in range(5)]
            for array, value in zip(arrays, (w, 1e6 * g0, 1e6 * g1, 0 * w, 0 * w), strict=True):
                array[:] = value
            _native.limit_fused_sgd_of_two(*arrays, stream, 2, 1)
            np.testing.assert_allclose(arrays[0], w - (g0 + g1) / 2, rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(arrays[3], arrays[0])
            np.testing.assert_array_equal(arrays[4], arrays[0])


def test_the_bench_has_every_policy_and_every_gate():
    figures = {figure.name: figure for figure in bench.run(Console(quiet=True), 0, short=True).figures}
    for sync, bar in bench.POLICIES:
        name = bench.name(sync)
        assert figures[f"{name}, 4 uneven workers"].value > 0
        assert 0 <= figures[f"{name}, idle"].value < 100
        assert figures[f"{name}, staleness, p99"].value >= 0
        for workers in bench.GATES:
            assert figures[f"gate, {name}, {workers} workers"].value > 0
        if bar is not None:
            assert figures[f"{name} to BSP"].bar == f">= {bar:g} x"
    assert figures["BSP, staleness, p99"].value == 0
    assert (
        figures["BSP, idle"].value > 5
    )  # each of 6 steps has a slow worker with a chance of two in five, always the same
    assert figures["ASP, idle"].value == 0
    assert figures["SSP(4), staleness, p99"].value <= 4
    assert figures["push_pull SGD 16 MB under BSP, 2 workers"].ratio is not None
