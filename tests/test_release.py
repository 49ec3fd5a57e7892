"""Native objects at the end of a process: all are freed, also those of which C++ code keeps the owner."""

import os
import pathlib
import subprocess
import sys

import pytest
from helpers import PATIENCE_S, check_python, run_python

Environment = dict[str, str]  # what the fixture `here` gives

pytest.importorskip("torch")
TESTS = pathlib.Path(__file__).parent

# torch's graph holds ctx where the collector does not look; by the functions of its class, all globals of the script.
GRAPH = """
import numpy as np
import torch
import windlass as wl
from helpers import connect_here

def make():
    cluster = connect_here()
    table, tensor = cluster.table("t", 2, rule=wl.Adam()), cluster.tensor("w", (4, 2), rule=wl.Sum())
    table.push([1, 2], np.ones((2, 2), np.float32)).wait()
    chunks, keys, rows = table.export(chunk_rows=1), table.keys(chunk_rows=1), tensor.keys(chunk_rows=1)
    for walk in (chunks, keys, rows):
        next(walk)
    delayed = tensor.delayed(1)
    delayed.push_pull(np.ones((4, 2), np.float32))
    return {
        "cluster": cluster,
        "further worker": cluster.worker(0, 1),
        "table": table,
        "tensor": tensor,
        "rows": tensor[1:],
        "future": tensor.push(np.ones((4, 2), np.float32)),
        "step": cluster.step(),
        "open step": cluster.step().__enter__(),
        "version": tensor.pull_newer(),
        "walks": [chunks, keys, rows],
        "delayed": delayed,
        "registered array": cluster.empty(4),
        "slots": cluster.slots(4),
        "lease": cluster.lease(100, batch_size=10, split="static"),
        "method": table.pull,
    }

class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept = kept
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad, None

x = torch.ones(2, requires_grad=True)
"""

KEPT = {
    "table": "loss = Keeps.apply(x, make()['table']).sum()",
    "tensor": "loss = Keeps.apply(x, make()['tensor']).sum()",
    "cluster": "loss = Keeps.apply(x, make()['cluster']).sum()",
    "everything": "loss = Keeps.apply(x, make()).sum()",
    "the module of the function": "everything, loss = make(), Keeps.apply(x, None).sum()",
    "after close": "kept = make(); kept['cluster'].close(); loss = Keeps.apply(x, kept).sum()",
}


@pytest.mark.parametrize("kept", KEPT)
def test_what_a_graph_of_torch_keeps_leaks_no_native_object(here: Environment, kept: str):
    check_python(GRAPH + KEPT[kept], **here)


def test_nanobind_would_report_what_is_not_released(here: Environment):
    done = run_python(
        GRAPH
        + """
import atexit
from windlass._release import release_all
atexit.unregister(release_all)
loss = Keeps.apply(x, make()).sum()
""",
        **here,
    )
    assert done.returncode == 0, done.stderr
    assert "nanobind: leaked" in done.stderr


def test_what_was_frozen_is_released(here: Environment):
    check_python(GRAPH + "import gc; loss = Keeps.apply(x, make()).sum(); gc.freeze()", **here)


def test_released_objects_raise_closed(here: Environment):
    out = check_python(
        """
        import atexit

        @atexit.register  # before windlass is imported, so it is called after everything of windlass
        def late():
            for name, call in calls.items():
                try:
                    call()
                except wl.Closed:
                    pass
                else:
                    print(name, "did not raise")
            for name, call in {"wait": future.wait, "next": lambda: next(walk)}.items():
                try:
                    call()
                except wl.Closed as error:
                    print(name, error)
            assert future.done()
            cluster.close()
            print(cluster, future, tensor, table)

        import numpy as np
        import windlass as wl
        from helpers import connect_here, every_call

        cluster = connect_here()
        tensor, table = cluster.tensor("w", (4, 2), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
        table.push([1, 2], np.ones((2, 2), np.float32)).wait()
        future, walk = tensor.pull_async(), table.export(chunk_rows=1)
        next(walk)
        calls = every_call(cluster, tensor, table, cluster.empty((4, 2)))
        """,
        **here,
    )
    assert out.splitlines() == [
        "wait the cluster has been closed: the process is ending",
        "next the cluster has been closed: the process is ending",
        "<Cluster, closed> <Future, done> <Tensor 'w' float32(4, 2) Sum()> <Table 't' dim=2 Sum()>",
    ]


# -- threads ---------------------------------------------------------------------------------------------------------

STUCK = {"rule": "tensor.push(np.ones(4, np.float32)).wait()", "function": "tensor.call(reads)"}


@pytest.mark.embedded("the function runs inside the process")
@pytest.mark.parametrize("kind", STUCK)
def test_a_function_that_runs_at_the_end_leaks_nothing(kind: str):
    check_python(
        f"""
        import threading, time
        import numpy as np
        import windlass as wl

        begun, kept = threading.Event(), []

        @wl.rule
        def descends(w, g, lr=0.1):
            kept.append(w)
            begun.set()
            time.sleep(1000)

        @wl.function
        def reads(part):
            kept.append(part)
            begun.set()
            time.sleep(1000)

        cluster = wl.connect(threads=2)
        tensor = cluster.tensor("w", (4,), rule=descends() if {kind!r} == "rule" else wl.Sum())

        def ask():
            try:
                {STUCK[kind]}
            except wl.Closed:
                pass

        threading.Thread(target=ask, daemon=True).start()
        begun.wait()
        """,
        timeout=PATIENCE_S,
    )


def test_threads_that_go_on_to_the_end_leak_nothing(here: Environment):
    check_python(
        """
        import threading, time
        import numpy as np
        import windlass as wl
        from helpers import connect_here

        cluster = connect_here()
        tensor, table = cluster.tensor("w", (4, 2), rule=wl.Sum()), cluster.table("t", 2, rule=wl.Sum())
        begun = threading.Barrier(3)

        def work(call):
            begun.wait()
            while True:
                try:
                    call()
                except wl.Closed:
                    time.sleep(0.001)

        for call in (lambda: tensor.push_pull(np.ones((4, 2), np.float32)), lambda: table.pull([1, 2])):
            threading.Thread(target=work, args=(call,), daemon=True).start()
        begun.wait()
        time.sleep(0.1)
        """,
        **here,
    )


# -- runs of pytest --------------------------------------------------------------------------------------------------

LEAVES = (
    GRAPH
    + """
import threading, time

def test_that_fails_with_a_graph_in_its_frame():
    loss = Keeps.apply(x, make()).sum()
    assert loss is None

def test_that_leaves_a_thread_behind():
    tensor = make()["tensor"]

    def work():
        while True:
            try:
                tensor.pull()
            except wl.WindlassError:
                time.sleep(0.001)

    threading.Thread(target=work, daemon=True).start()
"""
)


def run_pytest(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(TESTS), **env}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_a_run_of_pytest_ends_without_a_report_of_leaks(here: Environment, tmp_path: pathlib.Path):
    (tmp_path / "test_leaves.py").write_text(LEAVES)
    done = run_pytest("--rootdir", str(tmp_path), str(tmp_path), **here)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert done.stderr == ""


def test_what_other_tests_keep_is_released():
    # An exception that is a parameter has a frame with a cluster, and is kept once torch is there.
    raises = "control/test_members.py::test_a_worker_whose_block_raises_has_not_left_in_peace"
    done = run_pytest(str(TESTS / raises), str(TESTS / "pytorch" / "test_saved_state.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
