"""Windlass on Ray, with two nodes on this machine: `make test-ray` installs Ray."""

import concurrent.futures
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray_work
from helpers import PATIENCE_S
from ray_cluster import HERE, Nodes, as_listed

import windlass as wl

ray = pytest.importorskip("ray", reason="needs windlass[ray]; make test-ray installs it")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray's packages
STEPS = 8
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Two nodes, with an address each."""
    with Nodes(6, 6, dashboard=True, paths=(str(HERE),)) as started, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", started.address)
        yield started


@pytest.fixture(scope="module")
def connected(nodes: Nodes) -> Iterator[None]:
    """This process is a driver."""
    ray.init(nodes.address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def looked_at(nodes: Nodes, connected: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run with all that was seen of it while it went on: rank 1 has died once, and rank 0 waits."""
    folder = tmp_path_factory.mktemp("look")
    config = folder / "windlass.toml"
    config.write_text('failure_timeout = 7\n[apps.default]\nmemory_bytes_max = "1Gi"\n')

    def run() -> list[Any]:
        return wl.ray.run(
            ray_work.add,
            (str(folder), STEPS, "look"),
            servers=2,
            workers=2,
            resources_per_server={"CPU": 2},
            strategy="SPREAD",
            on_worker_loss="wait",
            sync="bsp",
            config=str(config),
        )

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(run)
        try:
            while not (folder / "look").exists():
                assert not future.done(), future.result()
                time.sleep(0.02)
            look = json.loads((folder / "look").read_text())
            seen = {**look, "processes": nodes.ours(), "command_lines": nodes.command_lines()}
            seen["listed"] = listed(nodes)
        finally:
            (folder / "looked").touch()
        seen["results"] = future.result(PATIENCE_S)
    return seen


def listed(nodes: Nodes) -> str:
    """All that Ray lists of its actors, tasks, jobs and environments, as `ray list` does."""
    state = importlib.import_module("ray.util.state")
    found = {}
    for kind in ("actors", "tasks", "jobs", "runtime_envs", "workers", "placement_groups", "objects"):
        options = {} if kind == "runtime_envs" else {"detail": True}
        found[kind] = getattr(state, f"list_{kind}")(address=nodes.dashboard, limit=1000, **options)
    assert any("scheduler" in str(actor) for actor in found["actors"])
    return repr(found)


def test_a_worker_that_is_killed_is_replaced_and_nothing_is_lost(looked_at: dict[str, Any]):
    results = looked_at["results"]
    assert [one["RANK"] for one in results] == ["0", "1"]
    assert [one["values"] for one in results] == [[2 * STEPS]] * 2
    assert {one["pid"] for one in looked_at["results"][0]["status"]["members"] if one["role"] == "worker"} == {
        one["pid"] for one in results
    }


def test_each_worker_knows_its_place_on_its_node(nodes: Nodes, looked_at: dict[str, Any]):
    first, second = looked_at["results"]
    assert {first["ip"], second["ip"]} == set(nodes.ips)
    assert [one["LOCAL_RANK"] for one in (first, second)] == ["0", "0"]
    assert [one["LOCAL_WORLD_SIZE"] for one in (first, second)] == ["1", "1"]
    assert {one["MASTER_ADDR"] for one in (first, second)} == {first["ip"]}


def test_every_role_binds_the_address_of_its_node_and_no_other(nodes: Nodes, looked_at: dict[str, Any]):
    servers = [one for one in looked_at["results"][0]["status"]["members"] if one["role"] == "server"]
    assert {re.fullmatch(r"tcp://(.*):\d+", one["address"])[1] for one in servers} == set(nodes.ips)
    seen = looked_at["processes"]
    assert sorted(one.role for one in seen) == ["scheduler", "server", "server"]
    assert all(one.listens for one in seen)
    bound = {listening.partition(":")[0] for one in seen for listening in one.listens}
    assert bound == {as_listed(ip) for ip in nodes.ips}


def test_a_server_has_as_many_threads_as_cpus(looked_at: dict[str, Any]):
    servers = [one for one in looked_at["processes"] if one.role == "server"]
    assert [one.environment["WINDLASS_THREADS"] for one in servers] == ["2", "2"]


def test_settings_reach_the_nodes_from_a_file_that_only_the_driver_has(looked_at: dict[str, Any]):
    status = looked_at["results"][0]["status"]
    assert status["timeouts"]["failure_timeout"] == 7
    assert [app["quota_bytes"] for app in status["apps"]] == [1 << 30]


def test_the_token_is_listed_nowhere(nodes: Nodes, looked_at: dict[str, Any]):
    token = looked_at["token"]
    assert len(token) == 64
    assert "windlass.launch.roles" in looked_at["command_lines"]
    assert token not in looked_at["command_lines"]
    assert token not in looked_at["listed"]
    logs = [file for file in pathlib.Path(nodes.folder).rglob("*") if file.is_file() and "logs" in file.parts]
    assert len(logs) > 10
    assert not [file for file in logs if token.encode() in file.read_bytes()]


def test_nothing_is_left_of_a_run(nodes: Nodes, looked_at: dict[str, Any]):
    nodes.until_nothing_is_left()
    assert all(one["state"] == "REMOVED" for one in ray.util.placement_group_table().values())


def test_workers_that_leave_together_end_well(connected: None, accurate: bool):
    crowd = 48 if accurate else 6
    cpus = {"CPU": 0.2 if accurate else 1}
    results = wl.ray.run(ray_work.leave_together, servers=2, workers=crowd, resources_per_worker=cpus)
    assert results == [crowd] * crowd


def test_an_exception_is_raised_with_its_rank_and_its_traceback(connected: None):
    with pytest.raises(KeyError, match="that one") as caught:
        wl.ray.run(ray_work.fail, ("that one",), workers=2)
    assert "raise KeyError(message)" in str(caught.value)
    assert any("raised by worker 1 of 2" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"resources_per_worker": {"GPU": 2}, "workers": 3}, "missing:  2 GPU, which the cluster does not have"),
        ({"resources_per_worker": {"CPU": 40}}, "missing:  29 CPU, which the cluster does not have"),
        ({"resources_per_server": {"CPU": 8}}, "missing:  a node with 8 CPU for a server"),
        ({"workers": 2, "strategy": "STRICT_SPREAD"}, "missing:  a node for each of 3, as STRICT_SPREAD wants"),
    ],
)
def test_wrong_resources_are_an_error_that_says_what_is_missing(connected: None, options: dict[str, Any], missing: str):
    with pytest.raises(wl.Timeout) as caught:
        wl.ray.run(ray_work.leave_together, start_timeout=0.3, **options)
    assert missing in str(caught.value)
    assert "there is: 12 CPU" in str(caught.value)


class TestServersAlone:
    """Servers that `wl.ray.start()` has started, for all of these tests."""

    @pytest.fixture(scope="class")
    def at(self, connected: None) -> Iterator[wl.ray.Servers]:
        with wl.ray.start(servers=2, resources_per_server={"CPU": 4}) as at:
            yield at

    def test_resources_that_others_hold_are_said_to_be_used(self, at: wl.ray.Servers):
        with pytest.raises(wl.Timeout, match="missing:  3 CPU, which others use"):
            wl.ray.run(ray_work.leave_together, workers=6, start_timeout=0.3)

    def test_plain_tasks_use_servers_that_were_started_for_them(self, at: wl.ray.Servers):
        task = ray.remote(num_cpus=1)(ray_work.of_a_task)
        assert ray.get([task.remote(at.address, at.token, rank, 2) for rank in range(2)]) == [2, 2]
        assert ray.get(task.remote(at.address, at.token, 0, 1, "later")) == 1  # whoever comes and goes
        assert at.token not in repr(at)


def test_a_server_that_dies_is_the_start_of_another_life_from_the_last_checkpoint(
    connected: None, tmp_path: pathlib.Path
):
    ((restarted, began),) = wl.ray.run(
        ray_work.descend,
        (str(tmp_path), 16),
        servers=2,
        checkpoint_dir=str(tmp_path / "saved"),
        failure_timeout=5,
    )
    with wl.connect(threads=2) as undisturbed:
        assert restarted == ray_work.descended(undisturbed, 16)
    assert began >= 8


SCRIPT = """
    import os, sys, time
    import numpy as np
    import windlass as wl
    import beside  # a module next to the script
    cluster = wl.connect(timeout=300)
    w = cluster.tensor("w", (8,), rule=wl.Sum())
    w.push(np.ones(8, np.float32)).wait()
    cluster.barrier(timeout=300)
    print(f"rank {cluster.rank} of {cluster.world_size} has {w.pull()[0]:g}, {sys.argv[1:]}, {beside.SAYS}", flush=True)
    print(f"place {os.environ['LOCAL_RANK']} sees GPU {os.environ.get('CUDA_VISIBLE_DEVICES')}", flush=True)
    cluster.barrier(timeout=300)
    time.sleep(300 if sys.argv[1:2] == ["stay"] else 0)
    sys.exit(3 if sys.argv[1:] == ["fail"] and cluster.rank == 1 else 0)
"""


@pytest.fixture
def program(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with a script and a module beside it."""
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "beside.py").write_text("SAYS = 'found'\n")
    return tmp_path


RUN = ("-m", "windlass", "run", "--on", "ray", "--servers", "2", "--workers", "2")


def said_by(output: str) -> list[str]:
    """What workers printed, each line with the name that Ray puts in front."""
    return sorted(
        re.findall(r"\((worker \d) pid=\d+(?:, ip=[\d.]+)?\) (rank .*)", re.sub("\033\\[[0-9;]*m", "", output))
    )


def test_a_script_runs_on_ray_by_the_same_command_and_nothing_is_left_when_that_is_killed(
    nodes: Nodes, program: pathlib.Path
):
    command = [sys.executable, *RUN, "train.py", "stay", "--lr", "0.1", "--servers"]
    with tempfile.TemporaryFile() as output:
        driver = subprocess.Popen(command, env=nodes.environment, cwd=program, stdout=output, stderr=subprocess.STDOUT)

        def said() -> str:
            return os.pread(output.fileno(), 1 << 20, 0).decode()

        try:
            deadline = time.monotonic() + PATIENCE_S
            while len(said_by(said())) < 2:
                assert driver.poll() is None, said()
                assert time.monotonic() < deadline, said()
                time.sleep(0.05)
            seen = nodes.ours()
        finally:
            driver.kill()
            driver.wait()
        assert said_by(said()) == [
            (f"worker {rank}", f"rank {rank} of 2 has 2, ['stay', '--lr', '0.1', '--servers'], found")
            for rank in range(2)
        ]
    assert sorted(one.role for one in seen) == ["", "", "scheduler", "server", "server"]
    nodes.until_nothing_is_left()


def test_a_job_that_is_submitted_runs_on_ray_by_the_same_command(nodes: Nodes, program: pathlib.Path):
    submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", nodes.dashboard]
    gpus = ["--resources-per-worker=GPU=1", "--strategy=STRICT_PACK"]
    command = [*submit, "--working-dir", ".", "--", sys.executable, *RUN, *gpus, "train.py", "fail"]
    done = subprocess.run(
        command, env=nodes.environment, cwd=program, capture_output=True, text=True, timeout=PATIENCE_S
    )
    output = done.stdout + done.stderr
    assert {rank for rank, _ in said_by(output)} == {"worker 0", "worker 1"}, output  # the command repeats them
    sees = {place: gpus.split(",") for place, gpus in re.findall(r"place (\d) sees GPU (\d,\d)", output)}
    assert sees.keys() == {"0", "1"}
    assert sees["0"] == sees["1"]  # so that LOCAL_RANK says which is whose
    assert sorted(sees["0"]) == ["0", "1"]
    assert "windlass run: worker 1 ended with exit code 3" in output
    assert done.returncode != 0
    nodes.until_nothing_is_left()


@pytest.mark.long
def test_mnist_trains_to_the_usual_accuracy(nodes: Nodes):
    command = [sys.executable, *RUN, "apps/mnist/train.py"]
    done = subprocess.run(command, env=nodes.environment, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = re.search(r"test accuracy (\d\.\d+)", done.stdout + done.stderr)
    assert accuracy is not None, done.stdout
    assert float(accuracy[1]) >= 0.95  # 0.96 to 0.97 without Ray


@pytest.mark.long
def test_what_was_on_a_node_that_is_lost_goes_on_elsewhere(tmp_path: pathlib.Path):
    """Its worker is replaced; with the server or the scheduler on it, everything starts from the checkpoint."""
    with Nodes(6, 6, paths=(str(HERE),)) as nodes:
        code = f"""
            import windlass as wl, ray_work
            arguments = {(str(tmp_path), nodes.ips[1])!r}
            options = {{"failure_timeout": 3, "checkpoint_dir": {str(tmp_path / "saved")!r}}}
            print(wl.ray.run(ray_work.lose_node, arguments, workers=2, on_worker_loss="wait", **options))
        """
        driver = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=nodes.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert driver.returncode == 0, driver.stdout + driver.stderr
        assert (tmp_path / "lost").exists()
        *_, results = driver.stdout.splitlines()
        assert re.fullmatch(r"\[\(\d+, 80\), \(\d+, 80\)\]", results), driver.stdout
        assert results != "[(0, 80), (0, 80)]", "somebody began later"


@pytest.mark.long
def test_the_suite_that_measures_ray_has_all_its_figures(tmp_path: pathlib.Path):
    command = [sys.executable, "-m", "windlass", "bench", "ray", "--short", "--json", str(tmp_path / "ray.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "ray.json").read_text())["figures"]
    kept = json.loads((ROOT / "benchmarks" / "ray.json").read_text())["figures"]
    assert [figure["name"] for figure in figures] == [figure["name"] for figure in kept]
    assert all(figure["ratio"] > 0 for figure in figures)
