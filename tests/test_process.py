"""Whole processes: how they end, fork, and which instructions they use."""

import json
import pathlib
import platform
import threading

import numpy as np
import pytest
from helpers import FLOAT32, PATIENCE_S, check_python, rng, run_python

import windlass as wl

Environment = dict[str, str]  # what the fixture `here` gives

# -- the end of a process --------------------------------------------------------------------------------------------


def test_a_process_may_end_with_work_in_flight(here: Environment):
    out = check_python(
        """
        import windlass as wl
        from helpers import connect_here

        cluster = connect_here()
        tensor = cluster.tensor("w", (1 << 22,), rule=wl.Adam())
        grads = [cluster.empty(1 << 22) for _ in range(8)]
        for grad in grads:
            grad[:] = 1
        futures = [tensor.push(grad) for grad in grads]
        print(sum(not f.done() for f in futures))
        """,
        **here,
    )
    assert int(out) > 0


@pytest.mark.embedded("holds a shard's turn from inside the process")
def test_a_process_may_end_while_a_shard_is_busy():
    check_python(
        """
        import numpy as np
        import windlass as wl

        cluster = wl.connect(threads=2)
        tensor = cluster.tensor("w", (64,), rule=wl.Sum())
        hold = wl._core.hold_tensor(tensor._core, 0)
        future = tensor.push(np.ones(64, np.float32))
        assert not future.done()
        """,
        timeout=50,  # not the 60 s that a call may take
    )


@pytest.mark.parametrize("kept", ["globals", "a cycle", "nothing"])
def test_a_cluster_need_not_be_closed(here: Environment, kept: str):
    check_python(
        f"""
        import numpy as np
        import windlass as wl
        from helpers import connect_here

        def make():
            cluster = connect_here()
            tensor, table = cluster.tensor("w", (4, 2), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Adam())
            array = cluster.empty((4, 2))
            futures = [tensor.push(array), table.push_pull_async([1, 2], np.ones((2, 2), np.float32))]
            walk = table.export()
            next(walk)
            return [cluster, tensor, tensor[1:], table, array, futures, walk, tensor.pull_newer()]

        if {kept!r} == "globals":
            cluster, tensor, rows, table, array, futures, walk, pulled = make()
        elif {kept!r} == "a cycle":
            cycle = make()
            cycle.append(cycle)
        else:
            make()
        """,
        **here,
    )


@pytest.mark.parametrize("large", [False, True])
def test_everything_may_be_let_go_while_work_is_in_flight(here: Environment, large: bool):
    out = check_python(
        f"""
        import numpy as np
        import windlass as wl
        from helpers import connect_here

        n = 1 << 21 if {large} else 64
        for i in range(20):
            cluster = connect_here()
            tensor = cluster.tensor("w", (n,), rule=wl.Adam())
            grad = cluster.empty(n)
            grad[:] = 1
            if not {large} and cluster._remote is None:
                hold = wl._core.hold_tensor(tensor._core, 0)
            tensor.push(grad)
            remote = cluster._remote is not None
            del tensor, grad, cluster
            if not {large} and not remote:
                hold.release()
                del hold
        print("alive")
        """,
        **here,
    )
    assert out == "alive\n"


def test_daemon_threads_may_be_pushing_at_the_end(here: Environment):
    check_python(
        """
        import threading
        import numpy as np
        import windlass as wl
        from helpers import connect_here

        cluster = connect_here()
        tensor = cluster.tensor("w", (1 << 16,), rule=wl.Sum())
        started = threading.Barrier(3)

        def work():
            grad = np.ones(1 << 16, np.float32)
            started.wait()
            try:
                while True:
                    tensor.push_pull(grad)
            except wl.Closed:
                pass

        for _ in range(2):
            threading.Thread(target=work, daemon=True).start()
        started.wait()
        """,
        **here,
    )


def test_an_error_ends_a_process_as_usual(here: Environment):
    done = run_python(
        """
        import windlass as wl
        from helpers import connect_here

        cluster = connect_here()
        tensor = cluster.tensor("w", (4,), rule=wl.Sum())
        tensor.push("text")
        """,
        **here,
    )
    assert done.returncode == 1
    assert "windlass._errors.InvalidArgument" in done.stderr or "windlass.InvalidArgument" in done.stderr
    assert "nanobind" not in done.stderr


# -- fork ------------------------------------------------------------------------------------------------------------

FORK = """
import gc, os, sys, threading, time
import numpy as np
import windlass as wl
from helpers import connect_here, every_call

def wait_for(pid, seconds=20):
    # The exit code of a child; one that hangs is a failure and is ended.
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return "hangs"

def refused(calls):
    # Every call raises ForkedProcess, and soon.
    for name, call in calls.items():
        try:
            call()
        except wl.ForkedProcess as error:
            assert "windlass.connect()" in str(error), error
        else:
            print(name, "did not raise in the child", file=sys.stderr)
            return False
    return True

cluster = connect_here()
tensor, table = cluster.tensor("w", (4, 2), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
calls = every_call(cluster, tensor, table, cluster.empty((4, 2)))
"""


def test_every_call_in_the_child_of_a_fork_raises_and_the_parent_goes_on(here: Environment):
    out = check_python(
        FORK
        + """
for call in calls.values():
    call()
before = tensor.fingerprint()
pid = os.fork()
if pid == 0:
    ok = refused(calls)
    cluster.close()  # does nothing, as in a process that never had it
    with connect_here() as own:  # what the message asks for
        other = own.tensor("of the child", (4, 2), rule=wl.Sum())
        ok = ok and not other.pull().any() and other.push_pull(np.ones((4, 2), np.float32)).all()
    sys.exit(0 if ok else 1)
assert wait_for(pid) == 0
assert tensor.fingerprint() == before
for call in calls.values():
    call()
print("parent goes on")
""",
        **here,
    )
    assert out == "parent goes on\n"


def test_many_forks_while_other_threads_push(here: Environment):
    out = check_python(
        FORK
        + """
big, grad = cluster.tensor("big", (1 << 16,), rule=wl.Sum()), np.ones(1 << 16, np.float32)
registered = [cluster.empty(1 << 18) for _ in range(2)]
wide, stop, counts = cluster.tensor("wide", (1 << 18,), rule=wl.Sum()), threading.Event(), [0, 0, 0]

def work(i):
    while not stop.is_set():
        if i < 2:
            wide.push(registered[i]).wait()
        else:
            big.push_pull(grad)
        cluster.empty(1000)
        table.push(np.arange(100), np.ones((100, 2), np.float32)).wait()
        counts[i] += 1

for array in registered:
    array[:] = 1
threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
for thread in threads:
    thread.start()
codes = []
forks = 50 if cluster._remote is None else 20
for _ in range(forks):
    pid = os.fork()
    if pid == 0:
        ok = refused(calls)
        gc.collect()
        os._exit(0 if ok else 1)  # as multiprocessing does: what other threads had on their stacks is lost to Python
    codes.append(wait_for(pid))
stop.set()
for thread in threads:
    thread.join()
assert codes == [0] * forks, codes
assert min(counts) > 0, counts
assert big.pull()[0] == counts[2]
assert wide.pull()[0] == counts[0] + counts[1]
assert table.pull([7])[0, 0] == sum(counts)
print("parent goes on")
""",
        timeout=PATIENCE_S,
        **here,
    )
    assert out == "parent goes on\n"


@pytest.mark.embedded("holds a shard's turn from inside the process; tests/wire/test_remote.py stops servers")
def test_a_future_of_the_parent_raises_in_the_child():
    check_python(
        FORK
        + """
hold = wl._core.hold_tensor(tensor._core, 0)
future, done = tensor.push(np.ones((4, 2), np.float32)), table.push([1], np.ones((1, 2), np.float32))
pid = os.fork()
if pid == 0:
    ok = refused({"Future.wait": lambda: future.wait(timeout=2)})
    sys.exit(0 if ok else 1)
assert wait_for(pid) == 0
hold.release()
future.wait()
done.wait()
"""
    )


def test_multiprocessing_by_fork_works_with_clusters_of_its_own(here: Environment):
    out = check_python(
        """
        import multiprocessing
        import numpy as np
        import windlass as wl
        from helpers import connect_here

        cluster = connect_here()
        tensor = cluster.tensor("w", (4,), rule=wl.Sum())
        tensor.push(np.ones(4, np.float32))

        def work(i):
            try:
                tensor.pull()
            except wl.ForkedProcess:
                with connect_here() as own:
                    mine = own.tensor(f"w of {i}", (4,), rule=wl.Sum())
                    mine.push(np.full(4, i, np.float32))
                    return float(mine.pull().sum())

        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(pool.map(work, range(4)))
            pool.close()
            pool.join()
        print(tensor.pull().tolist())
        """,
        **here,
    )
    assert out.splitlines() == ["[0.0, 4.0, 8.0, 12.0]", "[1.0, 1.0, 1.0, 1.0]"]


# -- instruction sets ------------------------------------------------------------------------------------------------

SETS = {"baseline": [], "avx2": ["avx2"], "avx512": ["avx512f", "avx512dq", "avx512vl", "avx512bw"]}

TRAINING = """
import json
import numpy as np
import windlass as wl

RULES = {
    "SGD": wl.SGD(lr=0.1),
    "SGD weight_decay": wl.SGD(lr=0.1, weight_decay=0.01),
    "SGD momentum": wl.SGD(lr=0.1, momentum=0.9, dampening=0.1),
    "SGD nesterov": wl.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": wl.Adagrad(lr=0.1, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.1),
    "RowAdagrad": wl.RowAdagrad(lr=0.1),
    "Adam": wl.Adam(weight_decay=0.01),
    "AdamW": wl.AdamW(),
    "Sum": wl.Sum(),
    "Assign": wl.Assign(),
    "Max": wl.Max(),
    "Average": wl.Average(),
    "RMSProp": wl.RMSProp(lr=0.01, weight_decay=0.01),
    "RMSProp momentum": wl.RMSProp(lr=0.01, momentum=0.9),
    "RMSProp centered": wl.RMSProp(lr=0.01, centered=True),
    "RMSProp centered momentum": wl.RMSProp(lr=0.01, centered=True, momentum=0.9),
    "Adadelta": wl.Adadelta(weight_decay=0.01),
    "Adamax": wl.Adamax(weight_decay=0.01),
    "NAdam": wl.NAdam(weight_decay=0.01),
    "NAdam decoupled": wl.NAdam(weight_decay=0.01, decoupled_weight_decay=True),
    "Lion": wl.Lion(weight_decay=0.01),
    "FTRL": wl.FTRL(l1=0.1, l2=0.1),
    "Min": wl.Min(),
    "bounded": wl.Adam(clip_value=0.5, clip_weights=(-0.4, 0.3)),
    "scheduled": wl.SGD(lr=0.1, schedule=wl.Schedule(warmup=3, decay="cosine", updates=5)),
}
assert {r._kind for r in RULES.values()} == set(wl._core.RuleKind) - {wl._core.RuleKind.FOREIGN}
cluster, prints = wl.connect(threads=2), {"isa": wl._core.isa()}

def grads(step, *shape):
    random = np.random.default_rng(step)
    values = random.standard_normal(shape, dtype=np.float32)
    tiny = random.random(shape) < 0.1  # down to where numbers lose bits
    return np.where(tiny, values * np.float32(1e-38), values)

for name, rule in RULES.items():
    for width in (1, 7, 64, 100):
        tensor = cluster.tensor(f"{name} {width}", (177, width), rule=rule, init=wl.Normal(std=0.5))
        for step in range(5):
            tensor.push(grads(step, 177, width))
            tensor[[3, 5, 3]].push(grads(step, 3, width).astype(np.float16))
        prints[f"tensor {name} {width}"] = tensor.fingerprint()
    for dim in (1, 5, 16, 32, 33, 64, 128):
        table = cluster.table(f"{name} table {dim}", dim, rule=rule, init=wl.Normal(std=0.5))
        for step in range(5):
            keys = np.random.default_rng(step).integers(0, 150, 200)
            table.push(keys, grads(step, 200, dim))
        prints[f"table {name} {dim}"] = table.fingerprint()
for dtype in ("float64", "int64"):
    for name in ("Sum", "Assign", "Max"):
        tensor = cluster.tensor(f"{name} {dtype}", (1001,), rule=RULES[name], dtype=dtype)
        for step in range(3):
            tensor.push((grads(step, 1001) * 1000).astype(dtype))
        prints[f"tensor {name} {dtype}"] = tensor.fingerprint()
uniform = cluster.tensor("uniform", (1001,), rule=wl.Sum(), init=wl.Uniform(-1, 1))
prints["uniform"] = uniform.fingerprint()
for dtype in ("float16", "bfloat16"):
    pulled = uniform.pull(dtype=dtype).view(np.uint16)
    prints[f"uniform as {dtype}"] = int((pulled.astype(np.int64) * np.arange(1001)).sum())
print(json.dumps(prints))
"""


def lacks(name: str) -> bool:
    if platform.machine() != "x86_64":
        return name != "baseline"
    flags = set(pathlib.Path("/proc/cpuinfo").read_text().split())
    return not flags.issuperset(SETS[name])


@pytest.fixture(scope="module")
def baseline() -> dict[str, str]:
    return json.loads(check_python(TRAINING, WINDLASS_ISA="baseline"))


@pytest.mark.parametrize("name", SETS)
def test_every_instruction_set_gives_the_same_bits(baseline: dict[str, str], name: str):
    if lacks(name):
        pytest.skip(f"this machine has no {name}")
    prints = json.loads(check_python(TRAINING, WINDLASS_ISA=name))
    assert prints.pop("isa") == name
    assert len(prints) > 100
    assert len(set(prints.values())) > 100  # and they are not all the same
    assert prints == {key: value for key, value in baseline.items() if key != "isa"}


@pytest.mark.parametrize("name", ["nonsense", "AVX2", "avx2 "])
def test_an_instruction_set_that_is_not_there_is_refused_with_those_there_are(name: str):
    done = run_python("import windlass; windlass.connect()", WINDLASS_ISA=name)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "InvalidArgument" in last
    assert f"WINDLASS_ISA={name}: this machine has baseline" in last


def test_an_empty_instruction_set_is_none():
    check_python("import windlass; windlass.connect(threads=1)", WINDLASS_ISA="")


# -- threads ---------------------------------------------------------------------------------------------------------


def test_many_threads_keep_an_int64_sum_exact(cluster: wl.Cluster):
    rows, width, threads, steps = 96, 1024, 8, 40
    tensor = cluster.tensor("w", (rows, width), rule=wl.Sum(), dtype="int64")
    assert tensor.shards > 4
    totals, errors = [np.zeros((rows, width), np.int64) for _ in range(threads)], []

    def work(i: int) -> None:
        random, mine = rng(i), cluster.worker(i, threads).tensor("w", (rows, width), rule=wl.Sum(), dtype="int64")
        grad, out, last = cluster.empty((rows, width), "int64"), cluster.empty((rows, width), "int64"), 0
        for step in range(steps):
            begin, end = sorted(random.choice(rows + 1, 2, replace=False).tolist())
            part = random.integers(0, 1 << 40, (end - begin, width))
            totals[i][begin:end] += part
            if step % 4 == 0:
                grad[begin:end] = part
                mine[begin:end].push(grad[begin:end]).wait()
            elif step % 4 == 1:
                mine[begin:end].push(part)
            elif step % 4 == 2:
                mine[np.arange(begin, end)].push_pull(part)
            else:
                mine[begin:end].push_pull_async(part, out=out[begin:end]).wait()
                if not (out[begin:end] >= totals[i][begin:end]).all():
                    errors.append(f"thread {i} does not see its own pushes")
            seen = int(mine[:1].pull().sum())
            if seen < last:
                errors.append(f"thread {i} saw {last}, then {seen}")
            last = seen

    run_threads(work, threads)
    assert errors == []
    np.testing.assert_array_equal(tensor.pull(), sum(totals))


def test_many_threads_keep_a_tables_sum_exact(cluster: wl.Cluster):
    threads, steps, keys = 8, 40, 3000
    table = cluster.table("t", 3, rule=wl.Sum())
    totals = [np.zeros((keys, 3), FLOAT32) for _ in range(threads)]

    def work(i: int) -> None:
        random = rng(i)
        for step in range(steps):
            batch = random.integers(0, keys, 500)
            grads = random.integers(0, 5, (500, 3)).astype(FLOAT32)
            np.add.at(totals[i], batch, grads)
            if step % 2:
                table.push(batch, grads)
            else:
                table.push_pull(batch, grads)

    run_threads(work, threads)
    np.testing.assert_array_equal(table.pull(np.arange(keys)), sum(totals))


def run_threads(work, n: int) -> None:
    """Runs work(0), ..., work(n - 1) at once; raises what one of them raises."""
    raised: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            work(i)
        except BaseException as error:
            raised.append(error)

    running = [threading.Thread(target=guarded, args=(i,)) for i in range(n)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if raised:
        raise raised[0]
