"""Average: the weights become the mean of what one update is made of."""

import ml_dtypes
import numpy as np
import pytest
from helpers import SHARD, numbers, rng

import windlass as wl


def means(keys: np.ndarray, grads: np.ndarray) -> dict[int, np.ndarray]:
    """The mean of each key's gradients: added in order of occurrence in float32, then divided."""
    sums: dict[int, np.ndarray] = {}
    for key, grad in zip(keys.tolist(), grads.astype(np.float32), strict=True):
        sums[key] = sums[key] + grad if key in sums else grad
    return {key: total / np.float32((keys == key).sum()) for key, total in sums.items()}


@pytest.mark.parametrize("shape", [(), (5,), (3, SHARD)], ids=str)
def test_a_push_alone_is_what_the_weights_become(cluster: wl.Cluster, shape: tuple[int, ...]):
    tensor = cluster.tensor("w", shape, rule=wl.Average(), init=wl.Constant(9))
    first, second = numbers(*shape, seed=1), numbers(*shape, seed=2)
    np.testing.assert_array_equal(tensor.push_pull(first), first)
    tensor.push(second)
    np.testing.assert_array_equal(tensor.pull(), second)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("n", [300, 5000], ids=["few", "enough to be shared"])
def test_repeated_keys_become_their_mean_bit_by_bit(cluster: wl.Cluster, dtype: str, n: int):
    dim = 17
    keys = rng(n).integers(0, n // 5, n)
    grads = numbers(n, dim, seed=n).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    table = cluster.table("rows", dim, rule=wl.Average(), init=wl.Constant(9))
    got = table.push_pull(keys, grads)
    expected = means(keys, grads)
    np.testing.assert_array_equal(got, [expected[key] for key in keys.tolist()])
    assert len(table) == len(expected)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_repeated_rows_become_their_mean_bit_by_bit(cluster: wl.Cluster, dtype: str):
    n, width = 200, 300
    rows = rng(3).integers(0, 40, n)
    grads = numbers(n, width, seed=3).astype(dtype)
    tensor = cluster.tensor("w", (41, width), rule=wl.Average(), init=wl.Constant(9))
    got = tensor[rows].push_pull(grads)
    expected = means(rows, grads)
    np.testing.assert_array_equal(got, [expected[row] for row in rows.tolist()])
    assert (tensor[40:41].pull() == 9).all()


def test_the_mean_is_of_one_push_not_of_all(cluster: wl.Cluster):
    table = cluster.table("rows", 1, rule=wl.Average())
    table.push([7, 7], np.array([[2], [4]], np.float32))
    table.push([7, 7, 8], np.array([[10], [20], [5]], np.float32))
    assert table.pull([7, 8]).ravel().tolist() == [15, 5]


def test_the_mean_of_a_step_is_that_of_a_push(cluster: wl.Cluster):
    table, tensor = cluster.table("rows", 1, rule=wl.Average()), cluster.tensor("w", (4, 1), rule=wl.Average())
    grads = np.array([[2], [1], [4]], np.float32)
    with cluster.step() as s:
        s.push(table, [7, 8, 7], grads)
        s.push(tensor[[2, 1, 2]], grads)
    assert table.pull([7, 8]).ravel().tolist() == [3, 1]
    assert tensor.pull().ravel().tolist() == [0, 1, 3, 0]


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_it_is_for_float32_and_says_so(cluster: wl.Cluster, dtype: type):
    with pytest.raises(
        wl.InvalidArgument, match=r"'w': rule Average works on float32, not .*; Sum, Max, Min and Assign"
    ):
        cluster.tensor("w", (2,), rule=wl.Average(), dtype=dtype)
