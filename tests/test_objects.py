"""Tensors and tables that are opened by their names alone, and the list of what there is."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import own_rules
import pytest
from helpers import PATIENCE_S, Connect, new_app

import windlass as wl
from windlass._objects.named import ObjectInfo
from windlass._rules import optimizers, written
from windlass._rules import rule as plain
from windlass.testing import LocalCluster, Servers
from windlass.testing.cluster import until

SHAPE, DIM = (3, 5), 4
KEYS = np.array([7, -1, 2**40])
#: One of every rule, with numbers that are not its defaults.
RULES = [
    wl.SGD(lr=0.1, weight_decay=0.01),
    wl.SGD(lr=0.3, momentum=0.9, nesterov=True, staleness=0.5),
    wl.SGD(lr=0.1, clip_value=0.1, clip_weights=(-0.5, 0.7)),
    wl.SGD(lr=0.1, schedule=wl.Schedule(warmup=3, decay="cosine", updates=10, end=0.1)),
    wl.SGD(lr=0.1, schedule=wl.Schedule(decay="steps", updates=2, factor=0.3)),
    wl.Adagrad(lr=0.2, initial_accumulator_value=0.1),
    wl.RowAdagrad(lr=0.2, initial_accumulator_value=0.3),
    wl.RMSProp(lr=0.02),
    wl.RMSProp(lr=0.02, momentum=0.5, centered=True),
    wl.Adadelta(lr=0.5),
    wl.Adam(lr=0.05, beta1=0.8),
    wl.AdamW(lr=0.05, weight_decay=0.1),
    wl.Adamax(lr=0.03),
    wl.NAdam(lr=0.04),
    wl.Lion(lr=0.06),
    wl.FTRL(lr=0.3, l1=0.01),
    wl.Sum(clip_value=0.5),
    wl.Assign(),
    wl.Max(),
    wl.Min(),
    wl.Average(),
]
INITS = [wl.Zeros(), wl.Constant(0.25), wl.Uniform(-0.1, 0.2), wl.Normal(0.1, 0.02)]
SYNCS = [wl.ASP(), wl.BSP(), wl.BSP(spare=1), wl.SSP(2), wl.MaxDelay(0.5)]
ATTRIBUTES = ("name", "rule", "init", "seed", "reject_nonfinite", "sync")


def same(opened: Any, made: Any) -> bool:
    """Whether two handles are alike in all that a user can see, and in what travels with a push."""
    sizes = ("shape", "dtype", "shards") if isinstance(made, wl.Tensor) else ("dim",)
    return all(getattr(opened, name) == getattr(made, name) for name in (*ATTRIBUTES, *sizes)) and (
        repr(opened) == repr(made) and opened.rule._sent() == made.rule._sent()
    )


def own_objects(cluster: wl.Cluster) -> list[ObjectInfo]:
    """Those of its app: on servers that tests share there are others."""
    return [info for info in cluster.objects() if "/" not in info.name]


def test_every_rule_is_tried_here():
    kinds = {found for module in (optimizers, plain) for found in vars(module).values() if isinstance(found, type)}
    rules = {kind for kind in kinds if issubclass(kind, wl.Rule)} - {wl.Rule, optimizers.Optimizer}
    assert {type(rule) for rule in RULES} == rules


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_handle_that_was_opened_by_name_behaves_as_its_makers(cluster: wl.Cluster, rule: wl.Rule):
    i = RULES.index(rule)
    how: dict[str, Any] = {"init": INITS[i % 4], "seed": i, "reject_nonfinite": i % 2 == 1}
    w, t = cluster.tensor("w", SHAPE, rule=rule, **how), cluster.table("t", DIM, rule=rule, **how)
    v, u = cluster.tensor("w"), cluster.table("t")
    assert same(v, w)
    assert same(u, t)
    # What its maker's handle would do, seen on others of that rule: the first from the same weights, the second empty.
    twin, other = cluster.tensor("twin", SHAPE, rule=rule, **how), cluster.table("other", DIM, rule=rule)
    cluster.table("zeros", DIM, rule=rule)
    zeros = cluster.table("zeros")
    twin.put(w.pull())
    v.put(w.pull())
    grad = np.linspace(-1, 1, 15, dtype=np.float32).reshape(SHAPE)
    rows = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, DIM)
    for _ in range(4):
        np.testing.assert_array_equal(v.push_pull(grad), twin.push_pull(grad))
        np.testing.assert_array_equal(zeros.push_pull(KEYS, rows), other.push_pull(KEYS, rows))
    assert v.snapshot().state.keys() == twin.snapshot().state.keys()
    np.testing.assert_array_equal(u.pull(KEYS, create=False), t.pull(KEYS))
    assert len(u) == 3


@pytest.mark.parametrize("sync", SYNCS, ids=str)
def test_the_policy_is_the_makers_and_not_the_openers(connect: Connect, sync: wl.Sync):
    with connect(sync="ssp:7") as cluster:
        w, t = cluster.tensor("w", 3, rule=wl.Sum(), sync=sync), cluster.table("t", 2, rule=wl.Sum(), sync=sync)
        assert (cluster.tensor("w").sync, cluster.table("t").sync) == (sync, sync)
        v, u = cluster.tensor("w"), cluster.table("t")
        v.push(np.ones(3, np.float32))
        u.push([1], np.ones((1, 2)))
        cluster.tick()
        assert (w.pull(), t.pull([1])[0]) == (pytest.approx([1] * 3), pytest.approx([1] * 2))
        assert cluster.clock == 1


@pytest.mark.parametrize(
    ("dtype", "init"),
    [("float64", wl.Constant(0.1)), ("int64", wl.Constant(2**40)), ("float32", wl.Constant(1.5))],
)
def test_the_dtype_is_that_of_the_maker(cluster: wl.Cluster, dtype: str, init: wl.Init):
    made = cluster.tensor("w", (), rule=wl.Sum(), dtype=dtype, init=init)
    opened = cluster.tensor("w")
    assert same(opened, made)
    opened.push(np.ones((), dtype)).wait()
    assert opened.pull().dtype == dtype
    assert made.pull() == np.array(init.value, dtype) + 1  # type: ignore[attr-defined]


def test_tensors_that_are_alike_stay_alike(cluster: wl.Cluster):
    w = cluster.tensor("w", 100, rule=wl.Sum(), init=wl.Constant(2))
    cluster.tensor("d", like=w, init=wl.Constant(3))
    v, d = cluster.tensor("w"), cluster.tensor("d")
    assert v.dot(d) == 600
    d.axpy(2.0, v)
    assert (d.pull() == 7).all()
    e = cluster.tensor("e", like=d, init=wl.Constant(1))
    assert (cluster.tensor("e").dot(v), e._like) == (200, "w")


def test_giving_a_spec_still_compares_it(cluster: wl.Cluster):
    cluster.tensor("w", 3, rule=wl.SGD(lr=0.1))
    cluster.table("t", 3, rule=wl.Sum())
    with pytest.raises(wl.SpecMismatch, match="exists with another spec"):
        cluster.tensor("w", 4, rule=wl.SGD(lr=0.1))
    with pytest.raises(wl.SpecMismatch, match="exists with another spec"):
        cluster.table("t", 3, rule=wl.Max())
    assert cluster.tensor("w", 3, rule=wl.SGD(lr=0.5)).rule == wl.SGD(lr=0.5)  # a number that travels is not compared
    assert cluster.tensor("w").rule == wl.SGD(lr=0.1)  # that of its maker


def test_half_a_spec_is_no_name_alone(cluster: wl.Cluster):
    cluster.tensor("w", 3, rule=wl.Sum())
    cluster.table("t", 3, rule=wl.Sum())
    for options in ({"init": wl.Zeros()}, {"seed": 3}, {"sync": "bsp"}, {"reject_nonfinite": True}):
        with pytest.raises(wl.InvalidArgument, match="tensor 'w': to open it, give the name alone; to make one"):
            cluster.tensor("w", **options)  # type: ignore[arg-type]
        with pytest.raises(wl.InvalidArgument, match="table 't': to open it, give the name alone; to make one"):
            cluster.table("t", **options)  # type: ignore[arg-type]
    with pytest.raises(wl.InvalidArgument, match="rule must be a windlass rule"):
        cluster.tensor("w", 3)
    with pytest.raises(wl.InvalidArgument, match="dim must be a whole number"):
        cluster.table("t", rule=wl.Sum())
    with pytest.raises(wl.InvalidArgument, match="printable characters"):
        cluster.tensor(7)  # type: ignore[arg-type]


def test_a_name_that_is_not_there_is_not_found_and_makes_nothing(cluster: wl.Cluster):
    with pytest.raises(wl.NotFound, match=r"tensor 'w': there is none; this app has nothing yet \(to make it, "):
        cluster.tensor("w")
    cluster.tensor("weights", 3, rule=wl.Sum())
    cluster.table("user", 3, rule=wl.Sum())
    with pytest.raises(wl.NotFound, match="tensor 'wieghts': there is none; did you mean 'weights'"):
        cluster.tensor("wieghts")
    with pytest.raises(wl.NotFound, match="table 'item': there is none; there are 'user', 'weights'"):
        cluster.table("item")
    with pytest.raises(KeyError, match="there is none; app 'nobody' has nothing"):
        cluster.table("nobody/xyz")
    assert [one.name for one in own_objects(cluster)] == ["user", "weights"]


def test_the_wrong_kind_is_an_error_that_says_what_is_there(cluster: wl.Cluster):
    cluster.tensor("w", 3, rule=wl.Sum())
    cluster.table("t", 3, rule=wl.Sum())
    with pytest.raises(wl.SpecMismatch, match=re.escape("table 'w': expected a table, saw a tensor: ")) as error:
        cluster.table("w")
    assert "cluster.tensor('w') opens it" in str(error.value)
    with pytest.raises(wl.SpecMismatch, match=re.escape("tensor 't': expected a tensor, saw a table: ")):
        cluster.tensor("t")


def test_objects_lists_what_there_is(cluster: wl.Cluster):
    assert own_objects(cluster) == []
    cluster.tensor("w", (10, 4), rule=wl.Adam(lr=0.1), sync="ssp:3")
    cluster.tensor("n", (), rule=wl.Sum(), dtype="int64")
    t = cluster.table("t", 8, rule=wl.Adagrad(lr=0.5), sync=wl.BSP())
    t.pull(np.arange(1000))
    assert own_objects(cluster) == [
        ObjectInfo("n", "tensor", (), None, "int64", "Sum()", wl.ASP(), 1, 8),
        ObjectInfo("t", "table", None, 8, "float32", str(wl.Adagrad(lr=0.5)), wl.BSP(), 1000, 1000 * (16 + 2 * 8 * 4)),
        ObjectInfo("w", "tensor", (10, 4), None, "float32", str(wl.Adam(lr=0.1)), wl.SSP(3), 10, 3 * 160),
    ]


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_what_another_app_has_is_listed_and_opened_under_the_apps_name(pair_of: Callable[[str], Servers], kind: str):
    pair, mine, theirs = pair_of(kind), new_app(), new_app()
    with pair.connect(app=mine) as one, pair.connect(app=theirs) as two:
        one.tensor("w", 3, rule=wl.SGD(lr=0.5))
        two.table("w", 3, rule=wl.Sum())
        listed = {info.name: info.kind for info in one.objects() if mine in info.name or theirs in info.name}
        assert listed == {f"{theirs}/w": "table"}
        assert {info.name for info in one.objects() if "/" not in info.name} == {"w"}
        v = two.tensor(f"{mine}/w")
        v.push(np.ones(3)).wait()
        assert one.tensor("w").pull().tolist() == [-0.5] * 3
        assert same(one.tensor(f"{mine}/w"), one.tensor("w"))
        with pytest.raises(wl.SpecMismatch):
            one.tensor(f"{theirs}/w")


@pytest.mark.parametrize("name", ["heavy_ball", "adam", "row_adagrad", "towards_start", "by_norm", "centred"])
def test_a_rule_of_the_users_comes_with_the_name(own: wl.Cluster, name: str, monkeypatch: pytest.MonkeyPatch):
    function = getattr(own_rules, name)
    rule = function(**dict.fromkeys(["lr"] if "lr" in function._numbers else [], 0.25), clip_value=0.5)
    w, twin = (own.tensor(n, SHAPE, rule=rule, init=wl.Constant(1)) for n in ("w", "twin"))
    v = own.tensor("w")
    assert (v.rule, v.rule._sent()) == (rule, rule._sent())
    grad = np.linspace(-1, 1, 15, dtype=np.float32).reshape(SHAPE)
    np.testing.assert_array_equal(v.push_pull(grad), twin.push_pull(grad))
    if own._remote is None:
        return
    # In a process that has not imported the module there is a rule all the same, which servers run.
    monkeypatch.setattr(written, "imported", lambda name: None)
    monkeypatch.setattr("windlass._objects.named.imported", lambda name: None)
    u = own.tensor("w")
    assert (str(u.rule), u.rule._sent(), u.rule._spec(SHAPE).same(rule._spec(SHAPE))) == (str(rule), rule._sent(), True)
    np.testing.assert_array_equal(u.push_pull(grad), twin.push_pull(grad))
    assert u.snapshot().state.keys() == w.snapshot().state.keys()
    with pytest.raises(wl.InvalidArgument, match="has no hyperparameter 'nonsense'"):
        u.push(grad, nonsense=1.0)


def test_a_torch_optimizer_comes_with_the_name(own: wl.Cluster):
    pytest.importorskip("torch")
    rule = wl.TorchRule("Adafactor", lr=0.5, clip_value=0.5)
    own.tensor("w", SHAPE, rule=rule, init=wl.Constant(1))
    twin = own.tensor("twin", SHAPE, rule=rule, init=wl.Constant(1))
    v = own.tensor("w")
    assert v.rule == rule
    np.testing.assert_array_equal(v.push_pull(np.ones(SHAPE)), twin.push_pull(np.ones(SHAPE)))


def test_functions_and_steps_and_arrays_of_ones_own_work_on_what_was_opened_by_name(cluster: wl.Cluster):
    cluster.tensor("w", SHAPE, rule=wl.SGD(lr=1.0))
    cluster.table("t", DIM, rule=wl.Sum())
    w, t = cluster.tensor("w"), cluster.table("t")
    grad, out = cluster.empty(SHAPE), cluster.empty(SHAPE)
    grad[:] = -1
    with cluster.step() as step:
        step.push_pull(w, grad, out=out)
        step.push(t, KEYS, np.ones((3, DIM)))
    assert (out == 1).all()
    w[[2, 0]].push(np.full((2, 5), -2.0), lr=0.5).wait()
    assert w.pull()[:, 0].tolist() == [2, 1, 2]
    assert (t.sum(), t.count(), sorted(t.top_k(3).keys)) == (12, 3, sorted(KEYS.astype(np.uint64)))


# -- with a scheduler ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scheduled() -> Iterator[LocalCluster]:
    """Tests take apps of their own."""
    with LocalCluster(servers=2) as cluster:
        until(lambda: len(cluster.members("server")) == 2, "the servers have come", PATIENCE_S)
        yield cluster


def test_with_a_scheduler_names_are_enough_too(scheduled: LocalCluster):
    app, other = new_app(), new_app()
    with scheduled.connect(app=app) as maker, scheduled.connect(app=other) as opener:
        made = maker.tensor("w", (100_000,), rule=wl.SGD(lr=0.5, momentum=0.9), init=wl.Normal(std=0.1), seed=3)
        maker.table("t", 4, rule=wl.Adagrad(lr=0.1), init=wl.Uniform(-1, 1)).pull(np.arange(50))
        opened, table = opener.tensor(f"{app}/w"), opener.table(f"{app}/t")
        assert (opened.rule, opened.init, opened.seed, opened.shape) == (made.rule, made.init, made.seed, made.shape)
        opened.push(np.ones(100_000)).wait()
        np.testing.assert_array_equal(maker.tensor("w").pull(), opened.pull())
        assert (len(table), table.rule) == (50, wl.Adagrad(lr=0.1))
        mine = {info.name: (info.rows, info.bytes) for info in maker.objects() if "/" not in info.name}
        assert mine == {"t": (50, 50 * (16 + 2 * 16)), "w": (100_000, 800_000)}
        assert {f"{app}/t", f"{app}/w"} <= {info.name for info in opener.objects()}
        with pytest.raises(wl.NotFound, match="there is none"):
            opener.tensor("w")


def test_after_a_move_a_name_still_finds_every_shard(scheduled: LocalCluster):
    app = new_app()
    with scheduled.connect(app=app) as maker:
        made = maker.tensor("w", (100_000,), rule=wl.Sum(), dtype="int64")
        made.push(np.arange(100_000)).wait()
        with scheduled.operator(PATIENCE_S) as operator:
            shard = next(i for i in range(made.shards) if made._core.owner(i)[0] == 0)
            operator.move(f"{app}/w", shard, 1, PATIENCE_S)
        with scheduled.connect(app=app, reader=True) as reader:
            np.testing.assert_array_equal(reader.tensor("w").pull(), np.arange(100_000))
