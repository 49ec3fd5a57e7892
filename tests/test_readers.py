"""A reader reads: whatever would change anything is refused, and what is not there it does not make.

What servers refuse of somebody who does not ask first is in tests/wire/test_raw_readers.py.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import own_rules
import pytest
from helpers import PATIENCE_S, Connect, new_app

import windlass as wl
from windlass import _core
from windlass.testing import LocalCluster, Servers
from windlass.testing.cluster import until

SHAPE, DIM = (6, 4), 3
ONES, ROWS = np.ones(SHAPE, np.float32), np.ones((2, DIM), np.float32)
KEYS = [1, 2]
SYNCS = ["asp", "bsp", "ssp:1", "maxdelay:0.5"]
Objects = tuple[wl.Tensor, wl.Tensor, wl.Table]


def make(cluster: wl.Cluster, sync: str = "asp") -> Objects:
    """What a worker has trained."""
    w = cluster.tensor("w", SHAPE, rule=wl.Adam(lr=0.1), init=wl.Constant(1), sync=sync)
    d, t = cluster.tensor("d", like=w, sync=sync), cluster.table("t", DIM, rule=wl.Sum(), sync=sync)
    w.push(ONES)
    d.push(ONES)
    t.push(KEYS, ROWS)
    cluster.tick()
    cluster.settle()
    return w, d, t


def opened(cluster: wl.Cluster) -> Objects:
    return cluster.tensor("w"), cluster.tensor("d"), cluster.table("t")


def in_a_step(cluster: wl.Cluster, verb: str, *arguments: Any) -> None:
    with cluster.step() as step:
        getattr(step, verb)(*arguments)


#: Everything that would change something, by the words that name it in the error.
CHANGES: dict[str, Callable[[wl.Cluster, wl.Tensor, wl.Tensor, wl.Table], object]] = {
    "push of tensor 'w'": lambda c, w, d, t: w.push(ONES),
    "push_pull of tensor 'w'": lambda c, w, d, t: w.push_pull(ONES),
    "push of tensor 'w', rows": lambda c, w, d, t: w[[1, 2]].push(ONES[:2]),
    "push_pull of tensor 'w', later": lambda c, w, d, t: w.push_pull_async(ONES).wait(),
    "put of tensor 'w'": lambda c, w, d, t: w.put(ONES),
    "axpy of tensor 'd'": lambda c, w, d, t: d.axpy(2.0, w),
    "scale of tensor 'd'": lambda c, w, d, t: d.scale(2.0),
    "copy_from of tensor 'd'": lambda c, w, d, t: d.copy_from(w),
    "add of tensor 'd'": lambda c, w, d, t: d.add(w),
    "multiply of tensor 'd'": lambda c, w, d, t: d.multiply(w),
    "fill of tensor 'd'": lambda c, w, d, t: d.fill(2.0),
    "push of table 't'": lambda c, w, d, t: t.push(KEYS, ROWS),
    "push_pull of table 't'": lambda c, w, d, t: t.push_pull(KEYS, ROWS),
    "delete of table 't'": lambda c, w, d, t: t.delete(KEYS),
    "delete of table 't', where": lambda c, w, d, t: t.delete(where=wl.row.norm() > 0),
    "push of tensor 'w', in a step": lambda c, w, d, t: in_a_step(c, "push", w, ONES),
    "push_pull of table 't', in a step": lambda c, w, d, t: in_a_step(c, "push_pull", t, KEYS, ROWS),
    "tick": lambda c, w, d, t: c.tick(),
    "barrier": lambda c, w, d, t: c.barrier(),
    "all_reduce": lambda c, w, d, t: c.all_reduce(1.0),
    "save": lambda c, w, d, t: c.save(),
    "lease 'data'": lambda c, w, d, t: c.lease(10, 2),
    "lease 'data', split for good": lambda c, w, d, t: c.lease(10, 2, split="static"),
}


def check_changes_nothing(worker: wl.Cluster, reader: wl.Cluster) -> None:
    """A reader of what make() has made is refused whatever would change it, and has made nothing of it."""
    before, clock = worker.fingerprint(), worker.clock
    for what, change in CHANGES.items():
        with pytest.raises(wl.AccessDenied) as error:
            change(reader, *opened(reader))
        assert "a reader" in str(error.value), what
        assert what.partition(",")[0] in str(error.value), what
    assert (worker.fingerprint(), worker.clock, reader.clock) == (before, clock, 0)


def check_reads(worker: wl.Cluster, reader: wl.Cluster) -> None:
    """All that reads is allowed, sees what workers see, and makes no rows."""
    (w, d, t), (v, e, u) = opened(worker), opened(reader)
    before = worker.fingerprint()
    np.testing.assert_array_equal(v.pull(), w.pull())
    np.testing.assert_array_equal(v[[3, 1]].pull(), w.pull()[[3, 1]])
    np.testing.assert_array_equal(v.pull_async().wait(), w.pull())
    np.testing.assert_array_equal(v.snapshot().weights, w.snapshot().weights)
    assert v.pull_newer().changed
    assert (v.dot(e), v.sum(), v.fingerprint()) == (w.dot(d), w.sum(), w.fingerprint())
    np.testing.assert_array_equal(u.pull([1, 77, 78]), [[1] * 3, [0] * 3, [0] * 3])
    np.testing.assert_array_equal(u.pull_async([79]).wait(), [[0] * 3])
    assert (len(u), u.count(), u.sum(), len(t)) == (2, 2, 6, 2)
    assert sorted(u.top_k(5).keys) == KEYS
    assert sum(len(chunk.keys) for chunk in u.export()) == 2
    assert [keys.tolist() for keys in u.keys(wl.row.norm() > 0)] in ([[1, 2]], [[2, 1]])
    with reader.step() as step:
        weights, rows = step.pull(v), step.pull(u, [2, 99])
    np.testing.assert_array_equal(weights, w.pull())
    np.testing.assert_array_equal(rows, [[1] * 3, [0] * 3])
    for _, ahead in u.ahead([[1], [101]]):
        assert ahead.shape == (1, 3)
    reader.settle()
    assert (reader.clock, reader.fingerprint(), len(t)) == (0, before, 2)


def check_makes_nothing(worker: wl.Cluster, reader: wl.Cluster) -> None:
    """A name that is not there is not found, with a spec and without, and is not there afterwards either."""
    listed = worker.objects()
    worker_error = pytest.raises(wl.NotFound, match="tensor 'v': there is none")
    for ask in (
        lambda: reader.tensor("v"),
        lambda: reader.tensor("v", SHAPE, rule=wl.Sum()),
        lambda: reader.tensor("v", like=reader.tensor("w")),
        lambda: reader.table("tt"),
        lambda: reader.table("tt", DIM, rule=wl.Sum()),
    ):
        with pytest.raises(wl.NotFound, match=r"there is none; .*\(a reader makes nothing: a worker must have made"):
            ask()
    with pytest.raises(wl.NotFound, match="did you mean 't'"):
        reader.table("tt")
    with worker_error as error:
        worker.tensor("v")
    assert "reader" not in str(error.value)
    with pytest.raises(wl.SpecMismatch):
        reader.tensor("w", (7,), rule=wl.Adam(lr=0.1))
    assert worker.objects() == listed == reader.objects()


@pytest.mark.parametrize("sync", SYNCS)
def test_a_reader_reads_and_changes_nothing(cluster: wl.Cluster, sync: str):
    make(cluster, sync)
    reader = cluster.reader()
    check_changes_nothing(cluster, reader)
    check_reads(cluster, reader)
    check_makes_nothing(cluster, reader)
    reader.close()
    with pytest.raises(wl.Closed):
        reader.objects()
    cluster.tensor("w").pull()  # the engine inside the process is the worker's, too


def test_a_reader_calls_functions_that_read(own: wl.Cluster):
    own.tensor("w", SHAPE, rule=own_rules.heavy_ball(lr=1.0)).push(ONES).wait()
    reader = own.reader()
    w = reader.tensor("w")
    assert (w.pull() == -1).all()
    with pytest.raises(wl.AccessDenied):
        w.push(ONES)


def test_nobody_waits_for_a_reader_and_it_waits_for_nobody(connect: Connect):
    with connect(sync="bsp") as one:
        w = one.tensor("w", 4, rule=wl.Sum())
        reader = one.reader()
        v = reader.tensor("w")
        assert v.pull(timeout=PATIENCE_S).tolist() == [0] * 4
        assert w.push_pull(np.ones(4), timeout=PATIENCE_S).tolist() == [1] * 4
        assert v.pull(timeout=PATIENCE_S).tolist() == [1] * 4
        assert (one.world_size, reader.world_size, one.clock, reader.clock) == (1, 1, 0, 0)
        one.barrier(timeout=PATIENCE_S)


def test_connect_makes_no_reader_of_nothing():
    with pytest.raises(wl.InvalidArgument, match="connect: a reader needs a cluster"):
        wl.connect(reader=True)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_connect_makes_readers_on_a_list_of_servers(pair_of: Callable[[str], Servers], kind: str):
    pair, app = pair_of(kind), new_app()
    with pair.connect(app=app) as worker:
        make(worker)
        with pair.connect(app=app, reader=True) as reader:
            check_changes_nothing(worker, reader)
            check_reads(worker, reader)
            check_makes_nothing(worker, reader)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_reader_may_come_first(pair_of: Callable[[str], Servers], kind: str):
    pair, app = pair_of(kind), new_app()
    with pair.connect(app=app, reader=True) as reader:
        with pytest.raises(wl.NotFound):
            reader.tensor("w")
        with pair.connect(app=app) as worker:
            worker.tensor("w", 3, rule=wl.Sum()).push(np.ones(3)).wait()
            assert reader.tensor("w").pull().tolist() == [1] * 3


# -- with a scheduler ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scheduled() -> Iterator[LocalCluster]:
    """Tests take apps of their own."""
    with LocalCluster(servers=2) as cluster:
        until(lambda: len(cluster.members("server")) == 2, "the servers have come", PATIENCE_S)
        yield cluster


@pytest.mark.parametrize("further", [False, True], ids=["connected", "further"])
def test_with_a_scheduler_a_reader_reads_and_changes_nothing(scheduled: LocalCluster, further: bool):
    app = new_app()
    with scheduled.connect(app=app) as worker:
        make(worker)
        with worker.reader() if further else scheduled.connect(app=app, reader=True) as reader:
            check_changes_nothing(worker, reader)
            check_reads(worker, reader)
            check_makes_nothing(worker, reader)
        assert worker.tensor("w").pull().shape == SHAPE  # the reader has left, and the worker goes on


def test_the_scheduler_makes_no_object_for_a_reader_that_asks_for_one(scheduled: LocalCluster):
    app = new_app()
    with scheduled.connect(app=app) as worker, scheduled.connect(app=app, reader=True) as reader:
        make(worker)

        def ask(name: str) -> None:  # what cluster.tensor() asks, when it has not looked first
            rule = wl.Sum()._spec((3,))
            zeros, asp = (_core.InitKind.ZEROS, 0.0, 0.0, 0), (0, 0, 0.0)
            _core.Tensor(reader._session, name, [3], _core.Dtype.FLOAT32, rule, *zeros, False, asp, "", PATIENCE_S)

        with pytest.raises(wl.AccessDenied, match="'new' is not there, and a reader makes no objects"):
            ask("new")
        with pytest.raises(wl.SpecMismatch):
            ask("w")
        assert "new" not in {info.name for info in worker.objects()}
        assert reader.tensor("w").pull().shape == SHAPE  # it is still a member
