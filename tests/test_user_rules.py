"""Rules of the user's own: functions that servers call."""

import contextlib
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import own_compiled
import own_rules
import pytest
import torch
from crew import at_once, together
from helpers import HASTY_SECONDS, new_app

import windlass as wl
from windlass.testing import Servers

HERE = pathlib.Path(__file__).parent
SLACK = 1.0
HEAVY_BALLS = [own_rules.heavy_ball, own_compiled.heavy_ball_compiled, own_rules.heavy_ball_in_torch]


@pytest.fixture
def cluster(own: wl.Cluster) -> wl.Cluster:
    return own


def gradients(*shape: int, n: int = 5, seed: int = 0) -> list[Any]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape, np.float32) for _ in range(n)]


@pytest.mark.embedded("servers elsewhere have their functions from the start")
def test_threads_that_become_workers_at_the_same_time_find_each_others_functions():
    for _ in range(10):
        with wl.connect(threads=1) as cluster:
            begin = threading.Barrier(8)

            def work(rank: int, cluster: wl.Cluster = cluster, begin: threading.Barrier = begin) -> Any:
                begin.wait(SLACK * 60)
                worker = cluster.worker(rank, 8)
                w = worker.tensor(f"w{rank}", 4, rule=own_rules.heavy_ball(lr=0.1))
                pulled = w.push_pull(np.ones(4, np.float32))
                worker.close()
                return pulled

            for pulled in at_once(8, work):
                np.testing.assert_allclose(pulled, -0.1, rtol=1e-6)


# -- what they compute ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", HEAVY_BALLS, ids=lambda rule: rule.__name__)
def test_a_function_is_the_rule_of_a_tensor(cluster: wl.Cluster, rule: Any) -> None:
    ours = cluster.tensor("ours", (5000, 20), rule=rule(lr=0.1))
    native = cluster.tensor("native", (5000, 20), rule=wl.SGD(lr=0.1, momentum=0.9))
    assert ours.shards > 1
    for g in gradients(5000, 20):
        np.testing.assert_allclose(ours.push_pull(g), native.push_pull(g), rtol=1e-6, atol=1e-7)
    some = gradients(10, 20)[0]
    ours[90:100].push(some, lr=0.5).wait()
    native[90:100].push(some, lr=0.5).wait()
    np.testing.assert_allclose(ours.pull(), native.pull(), rtol=1e-6, atol=1e-7)
    state = ours.snapshot().state["momentum"]
    np.testing.assert_allclose(state, native.snapshot().state["momentum_buffer"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rule", HEAVY_BALLS[:2], ids=lambda rule: rule.__name__)
def test_a_function_is_the_rule_of_a_tables_rows(cluster: wl.Cluster, rule: Any) -> None:
    ours = cluster.table("ours", dim=8, rule=rule(lr=0.1), init=wl.Normal())
    native = cluster.table("ours too", dim=8, rule=wl.SGD(lr=0.1, momentum=0.9), init=wl.Normal())
    random = np.random.default_rng(1)
    start = ours.pull(np.arange(500)) - native.pull(np.arange(500))
    for g in gradients(400, 8):
        keys = random.integers(0, 500, 400)  # some repeat
        ours.push(keys, g)
        native.push(keys, g)
    both = ours.pull(np.arange(500)) - native.pull(np.arange(500))
    np.testing.assert_allclose(both, start, atol=1e-5)


@pytest.mark.parametrize("kind", ["tensor", "table"])
def test_count_says_how_many_updates_there_were(cluster: wl.Cluster, kind: str) -> None:
    keys = np.arange(30)
    if kind == "tensor":
        ours = cluster.tensor("ours", (30, 4), rule=own_rules.adam(lr=0.1))
        native = cluster.tensor("native", (30, 4), rule=wl.Adam(lr=0.1))
        for g in gradients(30, 4):
            got, expected = ours.push_pull(g), native.push_pull(g)
    else:
        ours = cluster.table("ours", dim=4, rule=own_rules.adam(lr=0.1))
        native = cluster.table("native", dim=4, rule=wl.Adam(lr=0.1))
        for i, g in enumerate(gradients(30, 4)):  # rows have counts of their own
            got, expected = (t.push_pull(keys[: 30 - 5 * i], g[: 30 - 5 * i]) for t in (ours, native))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["tensor", "table"])
def test_numbers_can_be_kept_per_row(cluster: wl.Cluster, kind: str) -> None:
    keys = np.arange(1000)
    if kind == "tensor":
        ours = cluster.tensor("ours", (1000, 50), rule=own_rules.row_adagrad(lr=0.1))
        native = cluster.tensor("native", (1000, 50), rule=wl.RowAdagrad(lr=0.1))
        pairs = [(ours.push_pull(g), native.push_pull(g)) for g in gradients(1000, 50)]
        assert ours.snapshot().state["row_state"].shape == (1000, 1)
    else:
        ours = cluster.table("ours", dim=50, rule=own_rules.row_adagrad(lr=0.1))
        native = cluster.table("native", dim=50, rule=wl.RowAdagrad(lr=0.1))
        pairs = [(ours.push_pull(keys, g), native.push_pull(keys, g)) for g in gradients(1000, 50)]
    for got, expected in pairs:
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_state_begins_as_init_says(cluster: wl.Cluster) -> None:
    w = cluster.tensor("w", (100, 3), rule=own_rules.towards_start(), init=wl.Normal())
    start = w.pull()
    one = np.ones((10, 3), np.float32)
    w[20:30].push(one).wait()  # the other rows have a beginning as well
    w[60:70].push(one).wait()
    moved = start.copy()
    moved[20:30] -= 0.5
    moved[60:70] -= 0.5
    np.testing.assert_allclose(w.pull(), moved, atol=1e-6)
    np.testing.assert_array_equal(w.snapshot().state["start"], start)
    t = cluster.table("t", dim=3, rule=own_rules.towards_start(), init=wl.Normal())
    rows = t.pull([1, 2])
    t.push([1], one[:1]).wait()
    t.push([1, 2], one[:2]).wait()
    np.testing.assert_allclose(t.pull([1, 2]), rows - [[0.75], [0.5]], atol=1e-6)


def test_a_rule_may_need_all_of_a_tensor_or_whole_rows(cluster: wl.Cluster) -> None:
    g = gradients(3000, 100)[0]
    w = cluster.tensor("w", (3000, 100), rule=own_rules.by_norm(lr=2.0))
    assert w.shards == 1
    np.testing.assert_allclose(w.push_pull(g), -2.0 * g / np.linalg.norm(g), rtol=1e-4, atol=1e-7)
    with pytest.raises(wl.InvalidArgument, match="needs a gradient for all of it"):
        w[:5].push(g[:5]).wait()
    rows = cluster.tensor("rows", (3000, 100), rule=own_rules.centred())
    assert rows.shards > 1
    np.testing.assert_allclose(rows.push_pull(g), g.mean(axis=1, keepdims=True) - g, atol=1e-5)
    with pytest.raises(wl.InvalidArgument, match="not for rows"):
        cluster.table("t", dim=3, rule=own_rules.by_norm())


def test_a_tensor_like_one_that_is_cut_otherwise_is_refused(cluster: wl.Cluster) -> None:
    w = cluster.tensor("w", (3000, 100), rule=own_rules.heavy_ball(lr=0.1))
    d = cluster.tensor("d", like=w, rule=own_rules.row_adagrad())
    w.push(gradients(3000, 100)[0]).wait()
    d.copy_from(w)
    assert d.dot(w) > 0
    with pytest.raises(wl.InvalidArgument, match=r"like 'w'.* expected .*shards"):
        cluster.tensor("e", like=w, rule=own_rules.by_norm())
    one, other = cluster.tensor("one", (3000, 100), rule=own_rules.by_norm()), gradients(3000, 100)[1]
    two = cluster.tensor("two", like=one, rule=own_rules.by_norm())
    one.push(other).wait()
    two.copy_from(one)
    np.testing.assert_array_equal(two.pull(), one.pull())
    np.testing.assert_allclose(two.dot(one), 1.0, rtol=1e-5)


def test_workers_under_bsp_have_one_update(cluster: wl.Cluster) -> None:
    def work(worker: wl.Cluster) -> Any:
        ours = worker.tensor("ours", (4000, 10), rule=own_rules.heavy_ball(lr=0.1), sync="bsp")
        native = worker.tensor("native", (4000, 10), rule=wl.SGD(lr=0.1, momentum=0.9), sync="bsp")
        for g in gradients(4000, 10, seed=worker.rank):
            pair = ours.push_pull(g), native.push_pull(g)
        worker.close()
        return pair

    for got, expected in together(cluster, 2, work):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)


def test_what_it_keeps_is_put_back(cluster: wl.Cluster) -> None:
    g = gradients(300, 4, n=4)
    one = cluster.tensor("one", (300, 4), rule=own_rules.heavy_ball(lr=0.1))
    for step in g[:2]:
        one.push(step).wait()
    kept = one.snapshot()
    other = cluster.tensor("other", (300, 4), rule=own_rules.heavy_ball(lr=0.1))
    other.put(kept.weights, state=kept.state, updates=kept.updates)
    for step in g[2:]:
        np.testing.assert_array_equal(other.push_pull(step), one.push_pull(step))


# -- torch.optim ------------------------------------------------------------------------------------------------------

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("ASGD", {}),
    ("Adadelta", {}),
    ("Adafactor", {"weight_decay": 0.1}),
    ("Adagrad", {}),
    ("Adam", {"betas": (0.8, 0.99), "amsgrad": True}),
    ("AdamW", {}),
    ("Adamax", {}),
    ("Muon", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Rprop", {}),
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
]


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=[f"{n}{len(o) or ''}" for n, o in OPTIMIZERS])
def test_an_optimizer_of_torch_is_a_rule(cluster: wl.Cluster, name: str, options: dict[str, Any]) -> None:
    kind = getattr(torch.optim, name)
    w = cluster.tensor("w", (300, 200), rule=wl.TorchRule(kind, lr=0.01, **options), init=wl.Normal())
    assert (w.shards == 1) == (name in ("Adafactor", "Muon"))
    param = torch.nn.Parameter(torch.from_numpy(w.pull()))
    opt = kind([param], lr=0.01, **options)
    for i, g in enumerate(gradients(300, 200, n=8)):
        opt.param_groups[0]["lr"] = 0.01 / (i + 1)
        got = w.push_pull(g, lr=0.01 / (i + 1))
        param.grad = torch.from_numpy(g)
        opt.step()
    np.testing.assert_allclose(got, param.detach().numpy(), rtol=2e-5, atol=1e-6)
    kept = w.snapshot()
    again = cluster.tensor("again", (300, 200), rule=wl.TorchRule(kind, lr=0.01, **options))
    again.put(kept.weights, state=kept.state, updates=kept.updates)
    np.testing.assert_array_equal(again.push_pull(g), w.push_pull(g))


def test_what_cannot_be_a_rule_of_torch_is_said() -> None:
    with pytest.raises(wl.InvalidArgument, match=r"expected a class of torch\.optim"):
        wl.TorchRule(dict)
    with pytest.raises(wl.InvalidArgument, match="calls the model itself"):
        wl.TorchRule(torch.optim.LBFGS)
    with pytest.raises(wl.InvalidArgument, match=r"torch\.optim\.SGD: TypeError.*flavour"):
        wl.TorchRule(torch.optim.SGD, flavour=3)
    with pytest.raises(wl.InvalidArgument, match="lr must be a number"):
        wl.TorchRule(torch.optim.SGD, lr=-1)
    with pytest.raises(wl.InvalidArgument, match="these can: lr"):
        wl.TorchRule(torch.optim.SGD, lr=1)._with({"momentum": 3})


# -- when they fail ---------------------------------------------------------------------------------------------------


def test_an_exception_is_the_workers_to_see_and_changes_nothing(
    cluster: wl.Cluster, own_servers: Servers | None, caplog: pytest.LogCaptureFixture
) -> None:
    w = cluster.tensor("w", (5000, 20), rule=own_rules.sometimes())
    t = cluster.table("t", dim=4, rule=own_rules.sometimes())
    w.push(gradients(5000, 20)[0]).wait()
    t.push(np.arange(300), gradients(300, 4)[0]).wait()
    before = cluster.fingerprint()
    said = r"its function raised ValueError: as it was told; nothing was changed"
    with pytest.raises(wl.FunctionFailed, match=f"tensor 'w'.*{said}"):
        w.push(gradients(5000, 20)[1], fails=1).wait()
    with pytest.raises(wl.FunctionFailed, match=f"tensor 'w'.*{said}"):
        w.push_pull(gradients(5000, 20)[1], fails=1)
    with pytest.raises(wl.FunctionFailed, match=f"table 't'.*{said}"):
        t.push(np.arange(300), gradients(300, 4)[1], fails=1).wait()
    assert cluster.fingerprint() == before
    one = np.ones((5000, 20), np.float32)
    np.testing.assert_allclose(w.pull() - w.push_pull(one), one, rtol=1e-5)
    log = caplog.text if own_servers is None else own_servers.output(0) + own_servers.output(1)
    assert 'raise ValueError("as it was told")' in log
    with pytest.raises(wl.FunctionFailed, match=r"returned an array of shape \(1,\), expected \(100,\)"):
        cluster.tensor("v", (100,), rule=own_rules.wrong_shape()).push(one[0, :1].repeat(100)).wait()


def test_under_bsp_every_worker_sees_it(cluster: wl.Cluster) -> None:
    def work(worker: wl.Cluster) -> list[str]:
        w = worker.tensor("w", (100,), rule=own_rules.sometimes(), sync="bsp")
        one, seen = np.ones(100, np.float32), []
        for fails in (0, 1, 0):
            try:
                seen.append(float(w.push_pull(one, fails=fails)[0]))
            except wl.FunctionFailed as error:
                seen.append(type(error).__name__)
        worker.close()
        return seen

    assert together(cluster, 2, work) == [[-1.0, "FunctionFailed", -2.0]] * 2


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_a_function_that_does_not_end_is_given_up(hasty: wl.Cluster) -> None:
    """Others wait no longer than the limit, and other shards do not wait at all."""
    cluster, embedded = hasty, hasty._remote is None
    w = cluster.tensor("w", (100,), rule=own_rules.slow())
    other = cluster.tensor("other", (100,), rule=wl.Sum())
    one = np.ones(100, np.float32)
    w.push(one).wait()
    start = time.monotonic()
    stuck = None if embedded else w.push(one, seconds=20.0)
    failed: list[wl.WindlassError] = []

    def push() -> None:
        try:
            w.push(one, seconds=20.0).wait()
        except wl.FunctionFailed as error:
            failed.append(error)

    thread = threading.Thread(target=push)
    if stuck is None:
        thread.start()
        time.sleep(0.1)
    with contextlib.nullcontext(cluster) if embedded else contextlib.closing(cluster.worker(1, 2)) as second:
        elsewhere = second.tensor("other", (100,), rule=wl.Sum())
        began = time.monotonic()
        elsewhere.push_pull(one)
        assert time.monotonic() - began < HASTY_SECONDS / 2
        np.testing.assert_array_equal(second.tensor("w", (100,), rule=own_rules.slow()).pull(), -one)
        assert time.monotonic() - start < HASTY_SECONDS + SLACK
    if stuck is None:
        thread.join(5)
    else:
        with pytest.raises(wl.FunctionFailed) as error:
            stuck.wait()
        failed.append(error.value)
    assert f"took longer than {HASTY_SECONDS:g} s and was given up; nothing was changed" in str(failed[0])
    np.testing.assert_array_equal(w.push_pull(one), -2 * one)
    assert time.monotonic() - start < 2 * HASTY_SECONDS + SLACK
    assert other.pull()[0] == 1


@pytest.mark.embedded("looks at the interpreter's lock")
def test_what_numba_compiled_runs_without_the_gil(cluster: wl.Cluster) -> None:
    w = cluster.tensor("w", (10,), rule=own_compiled.spins())
    rounds = 1e6
    while True:  # about a fifth of a second
        start = time.monotonic()
        w.push(np.ones(10, np.float32), rounds=rounds).wait()
        took = time.monotonic() - start
        if took > 0.2:
            break
        rounds *= 2
    waits = []
    over = threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not over.is_set():
            time.sleep(0.001)
            waits.append(time.monotonic() - last)
            last = time.monotonic()

    thread = threading.Thread(target=tick)
    thread.start()
    w.push(np.ones(10, np.float32), rounds=rounds).wait()
    over.set()
    thread.join()
    assert max(waits) < took / 2, "another thread of Python's stood still"


# -- what is allowed --------------------------------------------------------------------------------------------------


def test_only_modules_that_the_server_allows_are_used(
    allowing: Callable[[str, bool], Servers], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the module could be imported: its code never runs on the server."""
    mark = tmp_path / "imported"
    (tmp_path / "others.py").write_text(
        f"import os, pathlib, windlass as wl\npathlib.Path({str(mark)!r} + str(os.getpid())).touch()\n"
        "@wl.rule\ndef plain(w, g): w -= g\n@wl.function\ndef none(part): return 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{tmp_path}")
    import others

    here = set(tmp_path.glob("imported*"))
    with Servers(1, allow="own_rules") as servers, servers.connect() as cluster:
        with pytest.raises(wl.AccessDenied, match=r"'others:plain' is in module 'others'.*--allow others"):
            cluster.tensor("w", (3,), rule=others.plain())
        with pytest.raises(wl.AccessDenied, match=r"--allow torch\.optim \(WINDLASS_ALLOW\)"):
            cluster.tensor("w", (3,), rule=wl.TorchRule(torch.optim.SGD, lr=0.1))
        w = cluster.tensor("w", (3,), rule=own_rules.sometimes())  # the name is still free
        with pytest.raises(wl.AccessDenied, match=r"'others:none' is in module 'others'.*--allow others"):
            w.call(others.none)
        stranger = wl.rule(own_rules.not_a_rule)
        with pytest.raises(wl.AccessDenied, match="'own_rules:not_a_rule' is not a rule"):
            cluster.tensor("v", (3,), rule=stranger())
        stranger.__module__, stranger.__qualname__ = "__main__", "f"
        with pytest.raises(wl.AccessDenied, match="a script is no module"):
            cluster.tensor("v", (3,), rule=stranger())
        stranger.__module__ = "own_rules"
        stranger.__qualname__ = "np.linalg.norm"
        with pytest.raises(wl.AccessDenied, match="is not a rule"):
            cluster.tensor("v", (3,), rule=stranger())
        assert w.push_pull(np.ones(3, np.float32))[0] == -1
    with Servers(1) as servers, servers.connect() as cluster:
        with pytest.raises(wl.AccessDenied, match=r"this server allows no others; start servers with --allow MODULE"):
            cluster.tensor("w", (3,), rule=own_rules.sometimes())
        v = cluster.tensor("v", (3,), rule=wl.Sum())
        with pytest.raises(wl.AccessDenied, match=r"'own_rules:above'.*--allow MODULE"):
            v.call(own_rules.above)
    assert set(tmp_path.glob("imported*")) == here


def test_another_version_of_a_rule_is_refused(allowing: Callable[[str, bool], Servers]) -> None:
    def heavy_ball(w, g, lr=0.1):
        w -= lr * g

    heavy_ball.__module__, heavy_ball.__qualname__ = "own_rules", "heavy_ball"
    said = "the two have different versions of it"
    with allowing("tcp", True).connect(app=new_app()) as cluster, pytest.raises(wl.InvalidArgument, match=said):
        cluster.tensor("w", (3,), rule=wl.rule(heavy_ball)())


def test_a_module_that_cannot_be_imported_ends_the_server() -> None:
    with pytest.raises(Exception, match=r"allow: module 'there_is_none' cannot be imported"):
        Servers(1, allow="there_is_none").__enter__()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: wl.rule(3), "expected a function"),
        (lambda: wl.rule(lambda g: 0), "expected a parameter w"),
        (lambda: wl.rule(lambda w, *more: 0), "parameters with names"),
        (lambda: wl.rule(state=("w",))(lambda w: 0), "cannot be called 'w'"),
        (lambda: wl.rule(state=("a", "a"))(lambda w: 0), "names, each once"),
        (lambda: wl.rule(state=[f"s{i}" for i in range(9)])(lambda w: 0), "at most 8 names of state"),
        (lambda: wl.rule(lambda w, a, b, c, d, e, f, h, i: 0), "at most 7 numbers"),
        (lambda: wl.rule(whole=True, rows=True)(lambda w: 0), "exclude each other"),
        (lambda: wl.rule(lambda w: 0, arrays="jax"), '"numpy" or "torch"'),
        (lambda: wl.rule(init=lambda w, g: 0)(lambda w: 0), "init takes w and state"),
        (lambda: own_rules.heavy_ball(), "its numbers are: lr, beta"),
        (lambda: own_rules.heavy_ball(lr="x"), "lr must be a finite float32"),
        (lambda: own_rules.heavy_ball(lr=1)._with({"gamma": 1}), "no hyperparameter 'gamma'; it has: beta, lr"),
    ],
)
def test_what_cannot_be_a_rule_is_said(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(wl.InvalidArgument, match=said):
        make()
