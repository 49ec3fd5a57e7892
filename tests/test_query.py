"""Functions that servers compute: top_k, count, keys, sums, histograms, and deletes by a condition."""

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from crew import Crew, together
from helpers import Connect, held, new_app, rng

import windlass as wl
from windlass.testing import LocalCluster, Servers

ROWS, DIM = 3000, 5


def filled(
    cluster: wl.Cluster, name: str = "t", rows: int = ROWS, dim: int = DIM, seed: int = 0
) -> tuple[Any, Any, Any]:
    """A table, its keys and its rows in float64."""
    random = rng(seed)
    table = cluster.table(name, dim, rule=wl.Assign())
    keys = random.choice(1 << 50, rows, replace=False).astype(np.uint64) << np.uint64(13)
    values = random.standard_normal((rows, dim)).astype(np.float32)
    values[values > 1.5] = 0
    table.push(keys, values).wait()
    return table, keys, values.astype(np.float64)


def best(keys: np.ndarray, scores: np.ndarray, k: int, largest: bool = True) -> np.ndarray:
    """The keys of the k best: ties by the smaller key, NaN last."""
    score = np.where(np.isnan(scores), np.inf, -scores if largest else scores)
    return keys[np.lexsort((keys, score))[:k]]


# -- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [True, False])
def test_top_k_gives_the_best_rows_in_order(cluster: wl.Cluster, largest: bool):
    table, keys, x = filled(cluster)
    scores: list[tuple[Any, np.ndarray]] = [
        ("norm", np.linalg.norm(x, axis=1)),
        ("sum", x.sum(1)),
        ("mean", x.mean(1)),
        ("max", x.max(1)),
        ("min", x.min(1)),
        ("absmax", abs(x).max(1)),
        (2, x[:, 2]),
        (-1, x[:, -1]),
        (abs(wl.row[0] - wl.row[1]) * 2, abs(x[:, 0] - x[:, 1]) * 2),
        (wl.key, keys.astype(np.float64)),
    ]
    for by, score in scores:
        top = table.top_k(50, by=by, largest=largest)
        wanted = best(keys, score, 50, largest)
        of = dict(zip(keys.tolist(), score.tolist(), strict=True))
        np.testing.assert_array_equal(top.keys, wanted, err_msg=str(by))
        np.testing.assert_allclose(top.scores, [of[int(k)] for k in wanted], rtol=1e-14)
    assert len(table.top_k(2 * ROWS).keys) == ROWS


def test_top_k_may_be_all_of_a_large_tensor(cluster: wl.Cluster):
    tensor = cluster.tensor("w", 300_000, rule=wl.Assign())
    x = rng(5).integers(0, 1000, 300_000).astype(np.float32)
    tensor.push(x).wait()
    rows = np.arange(len(x), dtype=np.uint64)
    top = tensor.top_k(1_000_000, by=0)
    np.testing.assert_array_equal(top.keys, best(rows, x, len(x)))
    np.testing.assert_array_equal(top.scores, np.sort(x)[::-1])
    np.testing.assert_array_equal(tensor.top_k(100_000, by=0, largest=False).keys, best(rows, x, 100_000, False))


def test_of_equal_scores_the_smaller_key_comes_first_and_nan_last(cluster: wl.Cluster):
    table = cluster.table("t", 1, rule=wl.Assign())
    table.push([5, 3, 9, 1, 7], np.array([[2], [np.nan], [2], [-0.0], [0.0]], np.float32)).wait()
    top = table.top_k(5, by=0)
    assert top.keys.tolist() == [5, 9, 1, 7, 3]
    np.testing.assert_array_equal(top.scores, [2, 2, 0, 0, np.nan])
    assert table.top_k(5, by=0, largest=False).keys.tolist() == [1, 7, 5, 9, 3]


def test_where_counts_and_filters_by_key_and_row(cluster: wl.Cluster):
    table, keys, x = filled(cluster)
    norm = np.linalg.norm(x, axis=1)
    middle = int(np.sort(keys)[ROWS // 2])
    cases: list[tuple[wl.types.Expression, np.ndarray]] = [
        (wl.row.norm() < 1.5, norm < 1.5),
        ((wl.row.norm() < 1.5) & (wl.key >= middle), (norm < 1.5) & (keys >= middle)),
        ((wl.row[0] > 0) | ~(wl.row[1] > 0), (x[:, 0] > 0) | ~(x[:, 1] > 0)),
        (wl.row.sum() / 2 - 1 != 0, x.sum(1) / 2 - 1 != 0),
        (wl.key % 3 == 1, keys % np.uint64(3) == 1),
        (wl.row.max() >= abs(wl.row.min()), x.max(1) >= abs(x.min(1))),
        (-wl.row.mean() <= 0.1, -x.mean(1) <= 0.1),
        (wl.row[2] == 0, x[:, 2] == 0),
        (wl.key > 2**64, np.zeros(ROWS, bool)),
        (wl.key < 2**64, np.ones(ROWS, bool)),
    ]
    for where, holds in cases:
        assert table.count(where) == holds.sum(), where
        found = list(table.keys(where, chunk_rows=100))
        assert all(0 < len(chunk) <= 100 for chunk in found)
        np.testing.assert_array_equal(np.sort(np.concatenate([*found, np.zeros(0, np.uint64)])), np.sort(keys[holds]))
    assert table.count() == ROWS
    holds = x[:, 0] > 1
    exported = list(table.export(chunk_rows=77, where=wl.row[0] > 1))
    rows = dict(zip(keys.tolist(), x.astype(np.float32), strict=True))
    assert sum(len(chunk.keys) for chunk in exported) == holds.sum()
    for chunk in exported:
        for key, row in zip(chunk.keys.tolist(), chunk.weights, strict=True):
            np.testing.assert_array_equal(row, rows[key])
    assert (
        table.top_k(5, where=wl.row[0] > 1).keys.tolist()
        == best(keys[holds], np.linalg.norm(x[holds], axis=1), 5).tolist()
    )


def test_keys_are_compared_exactly_and_as_bit_patterns(cluster: wl.Cluster):
    table = cluster.table("t", 1, rule=wl.Sum())
    near = 2**53
    table.pull(np.array([near, near + 1, 2**64 - 1, 0], np.uint64))
    assert table.count(wl.key == near + 1) == 1
    assert table.count(wl.key > near) == 2
    assert table.count(wl.key == -1) == 1
    assert table.count(wl.key != -1) == 3
    assert table.count(wl.key >= 0) == 4


def test_updates_of_rows_are_counted(cluster: wl.Cluster):
    table = cluster.table("t", 2, rule=wl.Sum())
    table.pull([1, 2, 3])
    for keys in ([2], [2, 3], [2]):
        table.push(keys, np.ones((len(keys), 2), np.float32)).wait()
    assert [table.count(wl.row.updates == n) for n in range(4)] == [1, 1, 0, 1]
    assert table.top_k(1, by=wl.row.updates).keys.tolist() == [2]


# -- deletes ---------------------------------------------------------------------------------------------------------


def test_delete_takes_out_what_satisfies_the_condition(cluster: wl.Cluster):
    table, keys, x = filled(cluster)
    gone = (x[:, 0] > 0.5) & (keys % np.uint64(16384) == 0)
    listed = keys[:100]
    n = int((x[:100, 1] > 0).sum())
    assert table.delete(listed, where=wl.row[1] > 0) == n
    kept = np.ones(ROWS, bool)
    kept[:100] = x[:100, 1] <= 0
    assert len(table) == kept.sum()
    assert table.delete(where=(wl.row[0] > 0.5) & (wl.key % 16384 == 0)) == (gone & kept).sum()
    kept &= ~gone
    assert len(table) == kept.sum()
    np.testing.assert_array_equal(np.sort(np.concatenate(list(table.keys()))), np.sort(keys[kept]))
    with pytest.raises(wl.InvalidArgument, match="keys"):
        table.delete(None, where=wl.key >= 0)  # type: ignore[arg-type]
    assert table.delete(where=wl.key >= 0) == kept.sum()
    assert len(table) == 0
    assert table.delete(where=wl.key >= 0) == 0


def test_a_row_that_was_updated_before_its_delete_had_its_turn_stays(cluster: wl.Cluster):
    """The condition is decided again where the row is taken out, after everything that came first."""
    table = cluster.table("t", 1, rule=wl.Sum())
    table.push([1, 2], np.array([[1], [5]], np.float32)).wait()
    assert table.count(wl.row[0] > 0) == 2
    deleted: list[int] = []
    with held(table, *range(256)) as go_on:
        table.push([1], np.array([[-10]], np.float32))
        thread = threading.Thread(target=lambda: deleted.append(table.delete([1, 2], where=wl.row[0] > 0)))
        thread.start()
        thread.join(0.1)
        go_on()
        thread.join(30)
    assert deleted == [1]
    assert table.pull([1], create=False).tolist() == [[-9]]
    assert len(table) == 1


def test_rows_deleted_by_a_condition_while_others_push(cluster: wl.Cluster):
    """Every row is either there with what was pushed, or was counted as deleted once."""
    table = cluster.table("t", 1, rule=wl.Sum())
    keys = np.arange(2000, dtype=np.uint64)
    deleted = 0
    stop = threading.Event()
    other = cluster.worker(1, 2).table("t", 1, rule=wl.Sum())

    def push() -> None:
        while not stop.is_set():
            other.push(keys, np.ones((len(keys), 1), np.float32)).wait()

    table.push(keys, np.ones((len(keys), 1), np.float32)).wait()
    thread = threading.Thread(target=push)
    thread.start()
    try:
        for _ in range(10):
            n = table.delete(where=wl.row.updates >= 1)
            assert n >= 0
            deleted += n
    finally:
        stop.set()
        thread.join(30)
    assert deleted > 0
    assert len(table) == table.count() <= len(keys)


# -- numbers ---------------------------------------------------------------------------------------------------------


def check_numbers(thing: wl.Tensor | wl.Table, x: np.ndarray, where: wl.types.Expression | None = None) -> None:
    y = x.astype(np.float64)
    near = {"rel": 1e-12, "abs": 1e-12}
    assert thing.sum(where) == pytest.approx(y.sum(), **near)
    assert thing.mean(where) == pytest.approx(y.mean(), **near)
    assert (thing.min(where), thing.max(where)) == (x.min(), x.max())
    assert thing.norm(where=where) == pytest.approx(np.linalg.norm(y), rel=1e-14)
    assert thing.norm(where, ord=1) == pytest.approx(abs(y).sum(), rel=1e-14)
    assert thing.norm(where, ord=math.inf) == abs(y).max()
    assert thing.nnz(where) == np.count_nonzero(x)
    for bins, span in ((10, None), (7, (-1.0, 2.0)), ([-5, -1, 0, 0.25, 9], None)):
        counts, edges = thing.histogram(bins=bins, range=span, where=where)
        want, want_edges = np.histogram(y, bins, range=span)
        np.testing.assert_array_equal(counts, want)
        np.testing.assert_array_equal(edges, want_edges)


def test_numbers_of_a_table(cluster: wl.Cluster):
    table, _, x = filled(cluster)
    check_numbers(table, x)
    check_numbers(table, x[x[:, 1] > 0.3], wl.row[1] > 0.3)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize("shape", [(), (7,), (40000,), (3000, 16), (100, 3, 7)])
def test_numbers_of_a_tensor(cluster: wl.Cluster, dtype: str, shape: tuple[int, ...]):
    tensor = cluster.tensor("w", shape, rule=wl.Assign(), dtype=dtype)
    x = (rng(3).standard_normal(shape) * 5).astype(dtype)
    tensor.push(x).wait()
    check_numbers(tensor, np.atleast_1d(x))
    if not shape:
        return
    rows = x.reshape(len(x), -1)
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    assert tensor.count(wl.row.norm() > 3) == (norms > 3).sum()
    keys = np.arange(len(x), dtype=np.uint64)
    some = (rows[:, 0] > 0) & (keys % np.uint64(2) == 0)
    if some.any():
        check_numbers(tensor, rows[some], (wl.row[0] > 0) & (wl.key % 2 == 0))
    found = list(tensor.keys(wl.row[0] > 0, chunk_rows=1000))
    np.testing.assert_array_equal(np.concatenate(found), keys[rows[:, 0] > 0])
    top = tensor.top_k(9)
    np.testing.assert_array_equal(top.keys, best(keys, norms, 9))


def test_whole_numbers_are_exact(cluster: wl.Cluster):
    tensor = cluster.tensor("w", 3, rule=wl.Assign(), dtype="int64")
    tensor.push(np.array([2**62, 2**53 + 1, -(2**63)])).wait()
    assert tensor.sum() == 2**62 + 2**53 + 1 - 2**63
    assert (tensor.max(), tensor.min()) == (2**62, -(2**63))
    assert isinstance(tensor.sum(), int)
    assert isinstance(tensor.mean(), float)


def test_rows_longer_than_a_shard_have_functions_of_all_numbers_alone(cluster: wl.Cluster):
    tensor = cluster.tensor("w", (2, 1_500_000), rule=wl.Assign())
    assert tensor.shards > 2
    x = rng(1).standard_normal((2, 1_500_000)).astype(np.float32)
    tensor.push(x).wait()
    assert tensor.sum() == pytest.approx(x.sum(dtype=np.float64))
    assert (tensor.min(), tensor.nnz()) == (x.min(), np.count_nonzero(x))
    for ask in (tensor.count, lambda: tensor.top_k(1), lambda: list(tensor.keys()), lambda: tensor.sum(wl.key == 0)):
        with pytest.raises(wl.InvalidArgument, match=r"tensor 'w'.*1500000 numbers.*more than one shard"):
            ask()


def test_of_nothing_there_is_a_sum_and_no_minimum(cluster: wl.Cluster):
    table = cluster.table("t", 4, rule=wl.Sum())
    for thing in (table, cluster.tensor("w", (0, 3), rule=wl.Sum()), cluster.tensor("v", 0, rule=wl.Sum())):
        assert (thing.count(), thing.sum(), thing.norm(), thing.norm(ord=1), thing.nnz()) == (0, 0, 0, 0, 0)
        assert math.isnan(thing.mean())
        for ask in (thing.min, thing.max):
            with pytest.raises(wl.InvalidArgument, match="there are no numbers"):
                ask()
        assert thing.histogram(bins=3).counts.tolist() == [0, 0, 0]
        assert len(thing.top_k(3).keys) == 0
        assert list(thing.keys()) == []
    table.pull([1])
    assert table.sum(wl.key == 2) == 0
    assert len(table) == 1


def test_nan_and_infinity_are_as_in_numpy(cluster: wl.Cluster):
    tensor = cluster.tensor("w", 40, rule=wl.Assign())
    x = np.arange(40, dtype=np.float32)
    x[17] = np.inf
    tensor.push(x).wait()
    assert (tensor.sum(), tensor.max(), tensor.min(), tensor.norm()) == (math.inf, math.inf, 0, math.inf)
    x[23] = np.nan
    tensor.push(x).wait()
    for value in (tensor.sum(), tensor.mean(), tensor.min(), tensor.max(), tensor.norm(), tensor.norm(ord=math.inf)):
        assert math.isnan(value)
    assert tensor.nnz() == 39
    assert tensor.count(wl.row[0] == wl.row[0]) == 39
    assert tensor.count(~(wl.row[0] <= 1e9)) == 2
    assert tensor.histogram(bins=2, range=(0, 40)).counts.sum() == 38
    with pytest.raises(wl.InvalidArgument, match="finite range"):
        tensor.histogram()


# -- the same everywhere ---------------------------------------------------------------------------------------------


def answers(cluster: wl.Cluster, order: np.ndarray) -> list[Any]:
    """Everything that can be asked, of the same rows, which come in that order."""
    random = rng(7)
    keys = random.choice(1 << 60, 4000, replace=False).astype(np.uint64)
    x = (random.standard_normal((4000, 19)) * 10.0 ** random.integers(-8, 8, (4000, 1))).astype(np.float32)
    table = cluster.table("t", 19, rule=wl.Assign())
    for some in np.array_split(order, 7):
        table.push(keys[some], x[some]).wait()
    tensor = cluster.tensor("w", (4000, 19), rule=wl.Assign())
    tensor.push(x).wait()
    return answers_of(table, tensor)


def answers_of(*things: wl.Tensor | wl.Table) -> list[Any]:
    found: list[Any] = []
    for thing in things:
        for where in (None, (wl.row[3] > 0) & (wl.key % 3 != 0)):
            found += [thing.sum(where), thing.mean(where), thing.norm(where, ord=2), thing.norm(where, ord=1)]
            found += [thing.norm(where, ord=math.inf), thing.min(where), thing.max(where), thing.nnz(where)]
            found += [thing.count(where), thing.histogram(bins=9, where=where).counts.tolist()]
            top = thing.top_k(30, where=where)
            found += [top.keys.tolist(), top.scores.tolist()]
    return found


def test_answers_are_the_same_bits_for_any_number_of_servers_and_any_order(connect: Connect):
    order = np.arange(4000)
    with wl.connect(threads=1) as alone:
        wanted = answers(alone, order)
    with connect() as cluster:
        assert answers(cluster, order[::-1]) == wanted


def test_answers_of_three_servers_are_those_of_one():
    order = np.arange(4000)
    with wl.connect(threads=2) as alone:
        wanted = answers(alone, order)
    for n in (1, 3):
        with Servers(n, kind="tcp", threads=3) as servers, servers.connect(app=new_app()) as cluster:
            assert answers(cluster, rng(n).permutation(order)) == wanted


# -- other workers ---------------------------------------------------------------------------------------------------


def test_a_query_sees_what_its_worker_has_pushed(cluster: wl.Cluster):
    table = cluster.table("t", 8, rule=wl.Sum())
    tensor = cluster.tensor("w", (100, 8), rule=wl.Sum())
    for i in range(1, 30):
        table.push(np.arange(100), np.ones((100, 8), np.float32))
        tensor.push(np.ones((100, 8), np.float32))
        assert (table.sum(), tensor.sum()) == (i * 800, i * 800)


def test_a_query_waits_at_the_gate_as_a_pull_does(cluster: wl.Cluster):
    crew = Crew(cluster)
    first, second = crew.tensor(wl.BSP())
    first.push(np.ones(4, np.float32))
    crew.workers[0].tick()
    asked: list[float] = []
    thread = threading.Thread(target=lambda: asked.append(first.sum()))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    second.push(np.full(4, 2, np.float32))
    crew.workers[1].tick()
    thread.join(30)
    assert asked == [12.0]
    crew.leave()


def test_a_query_that_waits_for_others_ends_at_its_timeout(cluster: wl.Cluster):
    crew = Crew(cluster)
    first, second = crew.tensor(wl.BSP())
    first.push(np.ones(4, np.float32))
    crew.workers[0].tick()
    with pytest.raises(wl.Timeout, match=r"sum of tensor 'w'.*rank 1"):
        first.sum(timeout=0.3)
    second.push(np.ones(4, np.float32))
    crew.workers[1].tick()
    assert first.sum() == 8
    crew.leave()


def test_queries_of_a_table_under_ssp(cluster: wl.Cluster):
    def work(worker: wl.Cluster) -> list[float]:
        table = worker.table("t", 2, rule=wl.Sum(), sync=wl.SSP(1))
        seen = []
        for step in range(5):
            table.push([worker.rank, 7], np.ones((2, 2), np.float32))
            worker.tick()
            seen.append(table.sum(wl.key == worker.rank) / 2 - (step + 1))
        return seen

    assert together(cluster, 2, work) == [[0] * 5, [0] * 5]


def test_a_query_ends_with_its_timeout_and_the_next_is_answered(cluster: wl.Cluster):
    table, _, x = filled(cluster)
    with held(table, *range(256)), pytest.raises(wl.Timeout, match="count of table 't'"):
        table.count(timeout=0.2)
    assert table.count() == len(x)


def test_queries_while_others_push_see_whole_shards(cluster: wl.Cluster):
    """A push to a shard is all in an answer or not at all."""
    tensor = cluster.tensor("w", 1000, rule=wl.Sum())
    other = cluster.worker(1, 2).tensor("w", 1000, rule=wl.Sum())
    stop = threading.Event()

    def push() -> None:
        while not stop.is_set():
            other.push(np.ones(1000, np.float32)).wait()

    thread = threading.Thread(target=push)
    thread.start()
    try:
        for _ in range(200):
            assert tensor.sum() % 1000 == 0
    finally:
        stop.set()
        thread.join(30)


def test_shards_that_have_moved_answer_the_same_and_a_reader_waits_for_nobody():
    order = np.arange(4000)
    with wl.connect(threads=2) as alone:
        wanted = answers(alone, order)
    with LocalCluster(servers=3) as cluster, cluster.connect(rank=0, world_size=1) as worker:
        assert answers(worker, order) == wanted
        table, tensor = worker.table("t", 19, rule=wl.Assign()), worker.tensor("w", (4000, 19), rule=wl.Assign())
        behind = worker.tensor("b", 4, rule=wl.Sum(), sync=wl.BSP())
        behind.push(np.ones(4, np.float32))
        stop, sums = threading.Event(), {table.sum()}

        def ask() -> None:
            while not stop.is_set():
                sums.add(table.sum())

        thread = threading.Thread(target=ask)
        thread.start()
        with cluster.operator() as operator:
            for shard in range(0, 60, 3):
                operator.move("default/t", shard, (shard + 1) % 3, 20)
            operator.move("default/w", 1, 2, 20)
        stop.set()
        thread.join(30)
        assert sums == {wanted[0]}
        assert answers_of(table, tensor) == wanted
        with cluster.connect(reader=True) as reader:
            tables = reader.table("t", 19, rule=wl.Assign()), reader.tensor("w", (4000, 19), rule=wl.Assign())
            assert answers_of(*tables) == wanted
            assert reader.tensor("b", 4, rule=wl.Sum(), sync=wl.BSP()).sum(timeout=5) == 0


# -- bad input -------------------------------------------------------------------------------------------------------


def test_conditions_are_combined_with_operators():
    for wrong in (
        lambda: (wl.row[0] > 1) and (wl.row[1] > 1),
        lambda: (wl.row[0] > 1) or True,
        lambda: not (wl.row[0] > 1),
        lambda: 0 < wl.row[0] < 1,
        lambda: bool(wl.key),
    ):
        with pytest.raises(wl.InvalidArgument, match="combine conditions with &"):
            wrong()
    with pytest.raises(TypeError):
        iter(wl.row)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        hash(wl.key)


def test_an_expression_says_what_is_wrong_with_it():
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: wl.row[0] & (wl.row[1] > 1), "put comparisons in parentheses"),
        (lambda: (wl.row[0] > 1) + 1, "is true or false and no number"),
        (lambda: (wl.row[0] > 1) == True, "combined with & and |, not compared"),  # noqa: E712
        (lambda: wl.row["x"], "a column is a whole number"),
        (lambda: wl.row[0] > "x", "expected a number or an expression"),
        (lambda: wl.row[0] > 10**400, "does not fit a float64"),
        (lambda: wl.key < -1, "ordered as unsigned numbers"),
        (lambda: wl.key < 1.5, "compared with a whole number"),
        (lambda: wl.key % 0, "a remainder is by a whole number"),
        (lambda: wl.row[0] % 2, "only keys have a remainder"),
    ]
    for wrong, why in cases:
        with pytest.raises(wl.InvalidArgument, match=why):
            wrong()
    assert repr((wl.row.norm() < 1) & ~(wl.key % 3 == 1)) == "((wl.row.norm() < 1) & ~((wl.key % 3) == 1))"


def test_bad_questions_name_the_object_and_the_limit(cluster: wl.Cluster):
    table = cluster.table("t", 4, rule=wl.Sum())
    tensor = cluster.tensor("w", (6, 4), rule=wl.Sum())
    deep: Any = wl.row[0] > 0
    for _ in range(100):
        deep = deep & (wl.row[0] > 0)
    right: Any = wl.row[0]
    for _ in range(20):
        right = 1 + right
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: table.top_k(0), "top_k of table 't': k must be .* not 0"),
        (lambda: table.top_k(1_000_001), "top_k of table 't'.*1 to 1000000 rows, not 1000001"),
        (lambda: table.top_k(2**70), "1 to 1000000 rows"),
        (lambda: table.top_k(1, by="size"), "by must be one of norm, sum.*not 'size'"),
        (lambda: table.top_k(1, by=4), "top_k of table 't', by: column 4 of rows with 4"),
        (lambda: table.top_k(1, by=wl.key > 1), "by: expected a number, saw .*which is true or false"),
        (lambda: table.count(wl.row[0]), "where: expected a condition.*which is a number"),
        (lambda: table.count(True), "where: expected an expression of wl.key and wl.row, saw True"),
        (lambda: table.count(deep), "count of table 't': where: .*at most 256"),
        (lambda: table.count(right > 0), "count of table 't': where: .*at most 16 values"),
        (lambda: tensor.count(wl.row.updates > 0), "count of tensor 'w': where: .*in tables alone"),
        (lambda: table.norm(ord=3), "norm of table 't': ord must be 1, 2 or inf, not 3"),
        (lambda: table.histogram(bins=0), "at least one bin, not 0"),
        (lambda: table.histogram(bins=5000, range=(0, 1)), "1 to 4096 bins"),
        (lambda: table.histogram(bins=[2, 1]), "edges are"),
        (lambda: table.histogram(bins=3, range=(2, 1)), "expected a finite range that ascends, saw 2.0 to 1.0"),
        (lambda: table.keys(chunk_rows=0), "keys of table 't': chunk_rows must be at least 1, not 0"),
        (lambda: table.delete(), "delete of table 't': which rows"),
        (lambda: table.delete([1], where=wl.row[9] > 0), "delete of table 't', where: column 9 of rows with 4"),
        (lambda: tensor[0:2].sum(), "sum of tensor 'w': of the whole tensor only"),
        (lambda: tensor[0:2].keys(), "keys of tensor 'w': of the whole tensor only"),
    ]
    for wrong, why in cases:
        with pytest.raises(wl.InvalidArgument, match=why):
            wrong()
    assert table.count() == 0


def test_a_long_expression_within_the_limits_is_answered(cluster: wl.Cluster):
    table, _, x = filled(cluster)
    where: Any = wl.row[0] > 0
    for i in range(60):
        where = where | (wl.row[i % DIM] > 1)
    assert table.count(where) == ((x[:, 0] > 0) | (x > 1).any(1)).sum()
