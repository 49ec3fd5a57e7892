"""Vector operations between tensors that lie alike: what numpy computes, to the bit, wherever the shards are."""

import math
import re
import threading

import hypothesis
import numpy as np
import pytest
from helpers import SHARD, Connect, held, new_app, numbers
from hypothesis import strategies as st

import windlass as wl

DTYPES = ["float32", "float64", "int64"]
SIZE = 5 * SHARD // 2  # three shards of float32, the last half full


def some(dtype: str, seed: int, size: int = SIZE) -> np.ndarray:
    return (numbers(size, seed=seed) * 1000).astype(dtype)


def pair(cluster: wl.Cluster, dtype: str = "float32", size: int = SIZE) -> tuple[wl.Tensor, wl.Tensor]:
    y = cluster.tensor("y", size, rule=wl.Sum(), dtype=dtype)
    x = cluster.tensor("x", like=y)
    y.put(some(dtype, 1, size))
    x.put(some(dtype, 2, size))
    return y, x


def dot_of(a: np.ndarray, b: np.ndarray, shard: int) -> float:
    """As docs/guide/vectors.md says: sixteen lanes in float64 for each shard, then a tree; shards in order."""
    total = 0.0
    for first in range(0, len(a), shard):
        products = a[first : first + shard].astype(np.float64) * b[first : first + shard].astype(np.float64)
        lanes = np.zeros(16)
        for row in np.concatenate([products, np.zeros(-len(products) % 16)]).reshape(-1, 16):
            lanes += row
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        total += lanes[0]
    return total


# -- what they compute -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_is_what_numpy_does_to_the_bit(cluster: wl.Cluster, dtype: str) -> None:
    y, x = pair(cluster, dtype)
    a, b, k = some(dtype, 1), some(dtype, 2), np.dtype(dtype).type(-7 if dtype == "int64" else 0.3)

    def check(want: np.ndarray) -> np.ndarray:
        np.testing.assert_array_equal(y.pull(), want)
        return want

    y.axpy(float(k) if dtype != "int64" else int(k), x)
    a = check(a + k * b)
    y.scale(k)
    a = check(a * k)
    y.add(x)
    a = check(a + b)
    y.multiply(x)
    a = check(a * b)
    assert y.axpy(2, y) is None
    a = check(a + np.dtype(dtype).type(2) * a)
    y.add(y)
    a = check(a + a)
    y.multiply(y)
    check(a * a)
    y.copy_from(x)
    check(b)
    y.copy_from(y)
    check(b)
    y.fill(k)
    check(np.full(SIZE, k))
    np.testing.assert_array_equal(x.pull(), b)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_dot_product_is_summed_in_a_fixed_order(cluster: wl.Cluster, dtype: str) -> None:
    y, x = pair(cluster, dtype)
    a, b, shard = some(dtype, 1), some(dtype, 2), y.shard_elements
    assert y.shards >= 3
    assert y.dot(x) == x.dot(y) == dot_of(a, b, shard)
    assert y.dot(y) == dot_of(a, a, shard)
    assert math.isclose(y.dot(x), float(a.astype(np.float64) @ b.astype(np.float64)), rel_tol=1e-9)


def test_a_dot_product_of_int64_is_exact_and_wraps_around(cluster: wl.Cluster) -> None:
    y = cluster.tensor("y", SIZE, rule=wl.Assign(), dtype="int64")
    x = cluster.tensor("x", like=y)
    a = np.random.default_rng(3).integers(-(2**63), 2**63 - 1, SIZE)
    b = a[::-1].copy()
    y.put(a)
    x.put(b)
    got = y.dot(x)
    assert type(got) is int
    assert got == int(a @ b)  # numpy wraps around, too
    assert y.axpy(2**62, x) is None
    np.testing.assert_array_equal(y.pull(), a + 2**62 * b)


def test_bits_do_not_depend_on_the_transport_or_the_number_of_servers(connect: Connect) -> None:
    def work(cluster: wl.Cluster) -> tuple[float, str]:
        y, x = pair(cluster)
        for i in range(3):
            y.axpy(y.dot(x) / x.dot(x) / (i + 1), x)
            x.multiply(y)
            x.scale(1 / math.sqrt(x.dot(x)))
        return y.dot(x), x.fingerprint() + y.fingerprint()

    with connect() as cluster, wl.connect(threads=1) as embedded:
        assert work(cluster) == work(embedded)


@hypothesis.settings(max_examples=25)
@hypothesis.given(data=st.data())
@pytest.mark.embedded("many small examples; what travels is tested above")
def test_any_program_gives_what_numpy_gives(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = tuple(data.draw(st.lists(st.integers(0, 200), min_size=0, max_size=3)))
    with wl.connect(threads=1) as cluster:
        tensors = [cluster.tensor("t0", shape, rule=wl.Sum(), dtype=dtype)]
        for i in (1, 2):
            tensors.append(cluster.tensor(f"t{i}", like=tensors[data.draw(st.integers(0, i - 1))]))
        arrays = [np.zeros(shape, dtype) for _ in tensors]
        for i, t in enumerate(tensors):
            arrays[i] = some(dtype, i, math.prod(shape)).reshape(shape)
            t.put(arrays[i])
        for _ in range(data.draw(st.integers(1, 8))):
            i, j = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
            a = data.draw(st.integers(-3, 3) if dtype == "int64" else st.floats(-4, 4, width=16))
            k = np.dtype(dtype).type(a)
            y, x, op = (
                tensors[i],
                tensors[j],
                data.draw(st.sampled_from(["axpy", "scale", "copy_from", "add", "multiply", "fill"])),
            )
            with np.errstate(all="ignore"):
                match op:
                    case "axpy":
                        y.axpy(a, x)
                        arrays[i] = arrays[i] + k * arrays[j]
                    case "scale" | "fill":
                        getattr(y, op)(a)
                        arrays[i] = arrays[i] * k if op == "scale" else np.full(shape, k)
                    case _:
                        getattr(y, op)(x)
                        left, right = arrays[i], arrays[j]
                        arrays[i] = {"copy_from": right, "add": left + right, "multiply": left * right}[op]
        for t, array in zip(tensors, arrays, strict=True):
            np.testing.assert_array_equal(t.pull(), array)


def test_a_tensor_without_elements_and_a_scalar(cluster: wl.Cluster) -> None:
    empty = cluster.tensor("empty", (0, 3), rule=wl.Sum())
    other = cluster.tensor("other", like=empty)
    empty.axpy(2, other)
    empty.fill(1)
    assert empty.dot(other) == 0.0
    one = cluster.tensor("one", (), rule=wl.Sum(), dtype="float64")
    two = cluster.tensor("two", like=one, init=wl.Constant(3))
    one.fill(0.1)
    one.axpy(10, two)
    assert one.dot(two) == (0.1 + 10 * 3) * 3


# -- their place among other requests ----------------------------------------------------------------------------------


def test_what_this_worker_pushed_to_either_before_is_seen(cluster: wl.Cluster) -> None:
    """Without waiting for the futures; the pushes take the lane for bulk, the operations the other."""
    size = 40 * SHARD
    y = cluster.tensor("y", size, rule=wl.Sum(), dtype="int64")
    x = cluster.tensor("x", like=y, rule=wl.Sum())
    one, want_y, want_x = np.ones(size, np.int64), 0, 0
    for i in range(20):
        futures = [t.push(one) for t in (x, x, x, x, y)]
        want_x, want_y = want_x + 4, want_y + 1
        y.axpy(i + 1, x)
        want_y += (i + 1) * want_x
        assert y.dot(x) == want_y * want_x * size
        futures.append(x.push(one))
        want_x += 1
        assert y.dot(x) == want_y * want_x * size
        x.copy_from(y)
        want_x = want_y = want_y % 1000
        x.fill(want_x)
        y.fill(want_y)
        for future in futures:
            future.wait()
    assert set(y.pull().tolist()) == {want_y}


def test_a_push_that_follows_comes_after(cluster: wl.Cluster) -> None:
    y, _ = pair(cluster)
    y.fill(1)
    y.push(np.full(SIZE, 2, np.float32))
    y.scale(10)
    y.push(np.full(SIZE, 5, np.float32)).wait()
    np.testing.assert_array_equal(y.pull(), 35)


def test_the_rules_state_and_count_stay_as_they_are(cluster: wl.Cluster) -> None:
    w = cluster.tensor("w", SIZE, rule=wl.Adam(lr=0.1))
    d = cluster.tensor("d", like=w)
    w.push(numbers(SIZE)).wait()
    before = w.snapshot()
    w.axpy(1, d)
    w.fill(3)
    after = w.snapshot()
    for name in before.state:
        np.testing.assert_array_equal(after.state[name], before.state[name])
    assert after.updates.tolist() == before.updates.tolist() == [1] * w.shards
    np.testing.assert_array_equal(after.weights, 3)


def test_a_shards_version_goes_up(cluster: wl.Cluster) -> None:
    y, x = pair(cluster)
    seen = y.pull_newer()
    y.dot(x)
    assert not y.pull_newer(seen.version).changed
    y.scale(2)
    newer = y.pull_newer(seen.version)
    assert newer.changed
    np.testing.assert_array_equal(newer.value, some("float32", 1) * 2)


def test_no_gate_is_waited_at_and_no_iteration_closed(connect: Connect) -> None:
    with connect(sync=wl.BSP()) as first, first.worker(0, 2) as cluster:
        y = cluster.tensor("y", SIZE, rule=wl.Sum())
        x = cluster.tensor("x", like=y, init=wl.Constant(2))
        y.axpy(3, x, timeout=20)
        assert y.dot(x, timeout=20) == 12 * SIZE
        assert cluster.clock == 0
        np.testing.assert_array_equal(y.snapshot().weights, 6)


def test_two_workers_at_once_lose_nothing(connect: Connect) -> None:
    rounds = 50
    with connect() as cluster, cluster.worker(1, 2) as other:
        y = cluster.tensor("y", SIZE, rule=wl.Sum(), dtype="int64")
        x = cluster.tensor("x", like=y, init=wl.Constant(1))
        theirs = other.tensor("y", SIZE, rule=wl.Sum(), dtype="int64")
        one = other.tensor("x", like=theirs, init=wl.Constant(1))

        def work() -> None:
            for _ in range(rounds):
                theirs.axpy(1000, one)

        thread = threading.Thread(target=work)
        thread.start()
        for _ in range(rounds):
            y.add(x)
        thread.join()
        assert set(y.pull().tolist()) == {1001 * rounds}


# -- like= ------------------------------------------------------------------------------------------------------------


def test_like_has_the_shape_dtype_and_place_and_its_own_rule(cluster: wl.Cluster) -> None:
    for i in range(3):  # others, so that placement alone would put it elsewhere
        cluster.tensor(f"other{i}", 3 * SHARD, rule=wl.Sum())
    w = cluster.tensor("w", (SIZE // 8, 8), rule=wl.Sum(), dtype="float64")
    d = cluster.tensor("d", like=w)
    e = cluster.tensor("e", like=d, rule=wl.Sum(), init=wl.Constant(2), sync="ssp:3")
    assert (d.shape, d.dtype, d.shards, d.rule) == (w.shape, w.dtype, w.shards, wl.Assign())
    assert (e.shape, e.rule, e.init, e.sync) == (w.shape, wl.Sum(), wl.Constant(2), wl.SSP(3))
    assert not d.pull().any()
    if w._core.remote:
        places = [[t._core.owner(i) for i in range(w.shards)] for t in (w, d, e)]
        assert places[0] == places[1] == places[2]
        assert len(set(places[0])) == 2
    assert e.dot(w) == 0


def test_like_is_part_of_the_spec(cluster: wl.Cluster) -> None:
    w = cluster.tensor("w", SIZE, rule=wl.Sum())
    v = cluster.tensor("v", SIZE, rule=wl.Sum())
    d = cluster.tensor("d", like=w, rule=wl.Sum())
    assert cluster.tensor("d", like=w, rule=wl.Sum()).fingerprint() == d.fingerprint()
    assert cluster.tensor("d", like=cluster.tensor("e", like=d), rule=wl.Sum()).fingerprint() == d.fingerprint()
    for again in (lambda: cluster.tensor("d", like=v, rule=wl.Sum()), lambda: cluster.tensor("d", SIZE, rule=wl.Sum())):
        with pytest.raises(wl.SpecMismatch, match=r"there: .* like='w'\)"):
            again()


def test_what_cannot_be_like_is_refused_by_name(cluster: wl.Cluster, connect: Connect) -> None:
    w = cluster.tensor("w", (20, 2), rule=wl.Sum())
    with connect() as elsewhere, cluster.worker(1, 2) as further:
        for make, why in [
            (
                lambda: cluster.tensor("d", (20, 2), like=w),
                r"tensor 'd', like 'w': the shape is that of 'w', \(20, 2\)",
            ),
            (lambda: cluster.tensor("d", like=w, dtype="int64"), "expected dtype float32, saw int64"),
            (lambda: cluster.tensor("d", like=w[3:5]), "expected the whole tensor, saw 2 of its rows"),
            (lambda: cluster.tensor("d", like="w"), "like must be a tensor, not 'w'"),
            (lambda: cluster.tensor("d", like=np.zeros(3)), "like must be a tensor"),
            (lambda: elsewhere.tensor("d", like=w), "expected a tensor of the same worker, saw one of <Cluster"),
            (lambda: further.tensor("d", like=w), "expected a tensor of the same worker"),
            (lambda: cluster.tensor("d", 3), "rule must be a windlass rule"),
            (lambda: cluster.tensor("d", rule=wl.Sum()), "shape must be whole numbers"),
        ]:
            with pytest.raises(wl.InvalidArgument, match=why):
                make()


def test_a_tensor_of_another_app_is_refused(connect: Connect, transport: str) -> None:
    if transport == "embedded":
        pytest.skip("there is one app inside the process")
    first, second = new_app(), new_app()
    with connect(app=first) as a, connect(app=second) as b:
        a.tensor("w", 30, rule=wl.Sum())
        w = b.tensor(f"{first}/w", 30, rule=wl.Sum())
        with pytest.raises(wl.InvalidArgument, match=f"same app, '{second}', saw one of '{first}'"):
            b.tensor("d", like=w)
        d = b.tensor(f"{first}/d", like=w)
        d.fill(2)
        assert d.dot(w) == 0
        assert a.tensor("d", like=a.tensor("w", 30, rule=wl.Sum())).pull()[0] == 2
        own = b.tensor("w", 30, rule=wl.Sum())
        with pytest.raises(wl.InvalidArgument, match="made with like="):
            own.dot(w)


# -- misuse ------------------------------------------------------------------------------------------------------------


def test_tensors_that_are_not_alike_are_refused_by_name(cluster: wl.Cluster) -> None:
    y, x = pair(cluster)
    stranger = cluster.tensor("stranger", SIZE, rule=wl.Sum())
    for call in (lambda: y.dot(stranger), lambda: stranger.axpy(1, x), lambda: y.copy_from(stranger)):
        with pytest.raises(
            wl.InvalidArgument, match=r"of tensor '.*' with tensor '.*': expected a tensor that was made"
        ):
            call()
    for call in (lambda: y.dot(x[0:3]), lambda: y[0:3].dot(x), lambda: y[0:3].fill(1)):
        with pytest.raises(wl.InvalidArgument, match="expected the whole tensor"):
            call()
    for call in (lambda: y.dot(np.ones(SIZE)), lambda: y.add(None), lambda: y.copy_from(3)):
        with pytest.raises(wl.InvalidArgument, match="expected a tensor, saw"):
            call()
    np.testing.assert_array_equal(y.pull(), some("float32", 1))
    with cluster.worker(1, 2) as other:
        mine = other.tensor("y", SIZE, rule=wl.Sum())
        with pytest.raises(wl.InvalidArgument, match="expected a tensor of the same worker, saw another's"):
            y.add(mine)


@pytest.mark.parametrize("a", ["1", None, 1j, [1.0], True, np.ones(2)])
def test_what_is_no_number_is_refused(cluster: wl.Cluster, a: object) -> None:
    y, x = pair(cluster, size=10)
    for call in (lambda: y.axpy(a, x), lambda: y.scale(a), lambda: y.fill(a)):
        with pytest.raises(wl.InvalidArgument, match=f"of tensor 'y': expected a number, saw {re.escape(repr(a))}"):
            call()


def test_int64_takes_whole_numbers_of_64_bits(cluster: wl.Cluster) -> None:
    y, x = pair(cluster, "int64", 10)
    for a in (0.5, 2**63, -(2**63) - 1, math.nan):
        with pytest.raises(wl.InvalidArgument, match="expected a whole number of 64 bits for an int64 tensor"):
            y.axpy(a, x)
    y.fill(np.int32(-5))
    y.scale(np.array(3))
    assert set(y.pull().tolist()) == {-15}


def test_a_number_may_be_numpys_or_torchs(cluster: wl.Cluster) -> None:
    torch = pytest.importorskip("torch")
    y, x = pair(cluster, "float64", 10)
    y.fill(np.float64(0.1))
    y.axpy(torch.tensor(2.0, dtype=torch.float64), x)
    np.testing.assert_array_equal(y.pull(), 0.1 + 2 * some("float64", 2, 10))


def test_nan_and_infinity_are_refused_where_they_are_not_wanted(cluster: wl.Cluster) -> None:
    y = cluster.tensor("y", SIZE, rule=wl.Sum(), init=wl.Constant(1), reject_nonfinite=True)
    x = cluster.tensor("x", like=y)
    wrong = np.zeros(SIZE, np.float32)
    wrong[SHARD + 7] = np.nan
    x.put(wrong)
    for call in (lambda: y.add(x), lambda: y.copy_from(x), lambda: y.multiply(x), lambda: y.axpy(0.0, x)):
        y.fill(1)
        with pytest.raises(wl.NonFinite, match="nothing was applied to shard 1"):
            call()
        assert (y.pull()[SHARD : 2 * SHARD] == 1).all()
    y.fill(1)
    for a in (math.nan, math.inf, 1e300):
        for call in (lambda a=a: y.axpy(a, x), lambda a=a: y.fill(a), lambda a=a: y.scale(a)):
            with pytest.raises(wl.NonFinite, match="of tensor 'y': the number is NaN or infinity; nothing was changed"):
                call()
    np.testing.assert_array_equal(y.pull(), 1)
    assert math.isnan(y.dot(x))


def test_a_call_ends_when_its_time_is_up(cluster: wl.Cluster) -> None:
    y, x = pair(cluster)
    for busy in (x, y):
        for call in (lambda: y.axpy(1, x, timeout=0.2), lambda: y.dot(x, timeout=0.2)):
            with held(busy, 0, 1, 2), pytest.raises(wl.Timeout, match=r"(axpy|dot) of tensor 'y': not done in time"):
                call()
    before = y.dot(x)
    assert y.dot(x) == before
