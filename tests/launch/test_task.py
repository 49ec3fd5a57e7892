"""Which task of an engine a process is, by its environment alone."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass._net.address import Address
from windlass._settings import load
from windlass.launch import is_echo
from windlass.launch.joining import Joining
from windlass.launch.task import PORTS, PORTS_TRIED, find_task

SLURM = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_PROCID": "3",
    "SLURM_GTIDS": "2,3",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURMD_NODENAME": "n2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_RANK": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "4",
    "PMIX_NAMESPACE": "2836004865",
}
UNSET = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "WINDLASS_")


def joining(environ: dict[str, str], servers: int = 2, **more: str) -> Joining:
    settings = load({"servers": str(servers)} | more, None, {})
    return Joining(settings, find_task(environ), requeue=False, resume=None)


def test_a_task_of_slurm_knows_its_number_and_where_the_first_one_is():
    task = find_task(SLURM)
    assert (task.engine, task.index, task.count, task.hosts, task.local) == ("Slurm", 3, 6, ("n1",), (2, 3))
    assert task.several_hosts
    assert [task.host_of(i) for i in range(6)] == ["n1", "n1", "n2", "n2", "n3", "n3"]
    cyclic = find_task(SLURM | {"SLURM_DISTRIBUTION": "cyclic", "SLURM_GTIDS": "0,3", "SLURMD_NODENAME": "n1"})
    assert [cyclic.host_of(i) for i in range(6)] == ["n1", "n2", "n3"] * 2
    assert find_task(SLURM | {"SLURM_DISTRIBUTION": "plane"}).host_of(5) is None


def test_a_step_on_one_host_needs_no_name_of_it():
    task = find_task(SLURM | {"SLURM_STEP_NODELIST": "n1", "SLURM_GTIDS": "0,1,2,3,4,5"})
    assert (task.several_hosts, task.hosts, task.host_of(4)) == (False, (), "127.0.0.1")


def test_reserved_ports_are_used_and_else_a_list_that_all_tasks_and_no_other_run_have():
    reserved = find_task(SLURM | {"SLURM_STEP_RESV_PORTS": "12000-12002"})
    assert (reserved.ports[0], reserved.master_port) == (12000, 12002)
    task, other = find_task(SLURM), find_task(SLURM | {"SLURM_PROCID": "0"})
    assert (task.ports, task.cluster) == (other.ports, other.cluster)
    assert reserved.ports[1:] == task.ports  # should another process have the one that is reserved
    assert len({*task.ports, task.master_port}) == PORTS_TRIED + 1
    assert all(port in PORTS for port in task.ports)
    for another in ({"SLURM_JOB_ID": "72"}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}):
        run = find_task(SLURM | another)
        assert run.cluster != task.cluster
        assert run.ports != task.ports


def test_a_rank_of_open_mpi_on_one_host():
    task = find_task(OPEN_MPI)
    assert (task.engine, task.index, task.count, task.several_hosts) == ("Open MPI", 4, 6, False)
    assert task.local == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("more", "hosts"),
    [
        ({"OMPI_MCA_orte_hnp_uri": "2836004864.0;tcp://10.0.0.1,172.17.0.1:41527"}, ("10.0.0.1", "172.17.0.1")),
        ({"PMIX_NAMESPACE": "prterun-node01.example-4711@1"}, ("node01.example",)),
    ],
)
def test_ranks_of_open_mpi_on_several_hosts_look_for_the_first_one_where_mpirun_runs(
    more: dict[str, str], hosts: tuple[str, ...]
):
    task = find_task(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"} | more)
    assert (task.several_hosts, task.hosts, task.local) == (True, hosts, (4, 5))


def test_mpirun_counts_before_slurm_whose_variables_its_daemons_have():
    assert find_task(SLURM | OPEN_MPI).engine == "Open MPI"
    assert find_task(SLURM | OPEN_MPI).job == "71"  # which can be started again


def test_a_host_that_is_named_counts():
    assert find_task(SLURM, "login").hosts == ("login",)
    assert find_task(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "login").hosts == ("login",)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, r"no engine .* looked for SLURM_STEP_NUM_TASKS \(srun\) and OMPI_COMM_WORLD_SIZE .* `windlass run`"),
        ({"SLURM_JOB_ID": "71"}, r"the batch script of Slurm's job 71, not a task of a step: write `srun"),
        ({"PMI_SIZE": "4"}, r"MPICH or Intel MPI .*PMI_SIZE=4.* use srun or Open MPI's mpirun"),
        ({**SLURM, "SLURM_PROCID": ""}, "srun has not set SLURM_PROCID"),
        ({**SLURM, "SLURM_PROCID": "x"}, "SLURM_PROCID=x: expected a whole number"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[1-"}, r"list of hosts 'n\[1-'"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI's mpirun has not set OMPI_COMM_WORLD_RANK"),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "6 ranks on several hosts, and says neither in OMPI_MCA_orte_hnp_uri nor in PMIX_NAMESPACE",
        ),
    ],
)
def test_what_is_missing_is_named(environ: dict[str, str], said: str):
    with pytest.raises(wl.InvalidArgument, match=said):
        find_task(environ)


@pytest.mark.parametrize(
    ("servers", "said"),
    [
        (6, "started 6 tasks; with --servers 6 at least 7 are needed: 6 are servers, the first of them the scheduler"),
        (9, "with --servers 9 at least 10 are needed"),
    ],
)
def test_too_few_tasks_say_how_many_are_needed(servers: int, said: str):
    with pytest.raises(wl.InvalidArgument, match=said):
        joining(SLURM, servers)


def test_the_first_tasks_are_servers_and_the_others_workers_of_ranks_from_0(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WINDLASS_TOKEN", "secret")
    monkeypatch.setenv("PATH", "")  # no Slurm to ask for the node
    ranks = [joining(SLURM | {"SLURM_PROCID": str(i)}).rank for i in range(6)]
    assert ranks == [-2, -1, 0, 1, 2, 3]
    made = joining(SLURM)
    environment = made.worker_environment(Address.parse("tcp://10.0.0.1:20001"), on_worker_loss="wait")
    expected = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n2"}
    assert {name: environment[name] for name in expected} == expected
    assert environment["WINDLASS_CLUSTER"] == f"{made.task.cluster:016x}"


def test_several_hosts_need_a_token_and_one_does_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WINDLASS_TOKEN", raising=False)
    with pytest.raises(wl.InvalidArgument, match=r"need a token in common: `export WINDLASS_TOKEN=\$\(openssl"):
        joining(SLURM)
    joining(SLURM | {"SLURM_STEP_NODELIST": "n1"})
    several = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:5"}
    with pytest.raises(wl.InvalidArgument, match=r"openssl rand -hex 32\)` and mpirun -x WINDLASS_TOKEN before"):
        joining(OPEN_MPI | several)


def test_a_first_task_that_is_not_where_others_look_for_it_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WINDLASS_TOKEN", "secret")
    monkeypatch.setenv("PATH", "")  # no Slurm to ask for the node
    first = SLURM | {"SLURM_PROCID": "0"}  # on n2
    with pytest.raises(wl.InvalidArgument, match="the first task is on n2, and others look for it on n1, the first of"):
        joining(first).listen()
    several = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    uri = {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://203.0.113.5:5"}
    with pytest.raises(wl.InvalidArgument, match=r"others look for it on 203\.0\.113\.5, which is not an address of"):
        joining(OPEN_MPI | several | uri).listen()
    with pytest.raises(wl.InvalidArgument, match=r"the first task's host, n1, leads to no address here"):
        joining(SLURM).places()


def test_the_scheduler_takes_the_first_port_that_is_free(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WINDLASS_TOKEN", "secret")
    one = joining(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "PMIX_NAMESPACE": f"ports-{os.getpid()}"})
    with one.listen() as first, one.listen() as second:
        assert first.getsockname()[0] == second.getsockname()[0] == "127.0.0.1"
        ports = [first.getsockname()[1], second.getsockname()[1]]
        assert [port for port in one.task.ports if port in ports] == ports


@pytest.mark.parametrize(
    ("options", "environ", "said"),
    [
        (["--requeue", "--checkpoint-dir", "x"], OPEN_MPI, "--requeue: there is no SLURM_JOB_ID"),
        (["--requeue"], {**SLURM, "SLURM_STEP_NODELIST": "n1"}, "--requeue: there is no place for checkpoints"),
        (["--resume"], OPEN_MPI, "--resume: there is no place to look for checkpoints"),
        ([], {}, "no engine has started this process"),
    ],
)
def test_the_command_refuses_what_cannot_work(options: list[str], environ: dict[str, str], said: str):
    own = {name: value for name, value in os.environ.items() if not name.startswith(UNSET)}
    command = [sys.executable, "-m", "windlass", "join", "--servers", "1", *options, "--", "true"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, env={**own, **environ, "COLUMNS": "300"}
    )
    assert done.returncode == 2
    assert said in done.stderr


def test_a_signal_that_comes_twice_at_once_is_one_in_a_process_of_a_task_alone(monkeypatch: pytest.MonkeyPatch):
    now = time.monotonic()
    monkeypatch.delenv("WINDLASS_TASKS", raising=False)
    assert not is_echo(now)
    monkeypatch.setenv("WINDLASS_TASKS", "2")
    assert is_echo(now)
    assert not is_echo(now - 2)


def test_join_says_what_it_looked_for_and_is_not_called_twice(monkeypatch: pytest.MonkeyPatch):
    for name in list(os.environ):
        if name.startswith(UNSET):
            monkeypatch.delenv(name)
    with pytest.raises(wl.InvalidArgument, match="no engine has started this process; looked for SLURM_STEP_NUM_TASKS"):
        wl.join()
    monkeypatch.setenv("WINDLASS_TASKS", "2")
    with pytest.raises(wl.InvalidArgument, match=r"has made this process a worker already: call connect\(\)"):
        wl.join()


# -- tasks without an engine: what an engine would tell them, by hand --------------------------------------------------


class Tasks:
    """Processes of one host with the variables of Open MPI."""

    def __init__(self, namespace: str, folder: pathlib.Path) -> None:
        self.namespace = namespace
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(self, count: int, *arguments: str, only: range | None = None) -> None:
        own = {name: value for name, value in os.environ.items() if not name.startswith(UNSET)}
        for i in range(count) if only is None else only:
            engine = {
                "OMPI_COMM_WORLD_SIZE": str(count),
                "OMPI_COMM_WORLD_RANK": str(i),
                "OMPI_COMM_WORLD_LOCAL_SIZE": str(count),
                "OMPI_COMM_WORLD_LOCAL_RANK": str(i),
                "PMIX_NAMESPACE": self.namespace,
                "WINDLASS_TOKEN": "of tests",
                "WINDLASS_START_TIMEOUT": str(PATIENCE_S),
            }
            process = subprocess.Popen(
                [sys.executable, "-m", "windlass", "join", *arguments],
                env={**own, **engine},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=self.folder,
            )
            self.started.append(process)

    def outputs(self) -> list[str]:
        return [process.communicate(timeout=PATIENCE_S)[0] for process in self.started]

    @property
    def codes(self) -> list[int]:
        return [process.wait(PATIENCE_S) for process in self.started]


@pytest.fixture
def tasks(tmp_path: pathlib.Path):
    made = Tasks(f"test-{os.getpid()}-{tmp_path.name}", tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)  # what it has started ends with it
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


TRAIN = """
import os, signal, sys
import numpy as np
import windlass as wl

mark = f"came-{os.environ['RANK']}"
first = not os.path.exists(mark)
open(mark, "w").close()
with wl.connect() as cluster:
    w = cluster.tensor("w", 4, rule=wl.Sum(), sync="bsp")
    while cluster.clock < 5:
        if first and sys.argv[1:] == ["die"] and cluster.rank == 1 and cluster.clock == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        weights = w.push_pull(np.ones(4))
    cluster.barrier()
    print("rank", cluster.rank, "of", cluster.world_size, "done", flush=True)
"""


def test_tasks_find_each_other_and_a_worker_that_dies_is_started_again_in_its_task(tasks: Tasks):
    (tasks.folder / "train.py").write_text(TRAIN)
    tasks.start(4, "--servers", "2", "--worker-restarts", "1", "--", sys.executable, "train.py", "die")
    outputs = tasks.outputs()
    print(*outputs, sep="\n---\n")
    assert tasks.codes == [0, 0, 0, 0]
    assert "Open MPI: 2 of 4 tasks are servers; the scheduler is at tcp://127.0.0.1:" in outputs[0]
    assert "[worker 0] rank 0 of 2 done" in outputs[2]
    assert "worker 1 ended with signal SIGKILL; start 1 of 1 in its place" in outputs[3]
    assert "[worker 1] rank 1 of 2 done" in outputs[3]


def test_a_task_that_is_killed_takes_its_worker_along_and_ends_those_who_would_wait_for_it(tasks: Tasks):
    stepped = "        open(f'stepped-{cluster.rank}', 'w').close()\n    cluster.barrier()"
    script = TRAIN.replace("cluster.clock < 5", "True").replace("    cluster.barrier()", stepped)
    (tasks.folder / "train.py").write_text(script)
    tasks.start(3, "--servers", "1", "--worker-restarts", "1", "--", sys.executable, "train.py")
    deadline = time.monotonic() + PATIENCE_S
    while len(list(tasks.folder.glob("stepped-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    tasks.started[2].kill()
    outputs = tasks.outputs()
    print(*outputs, sep="\n---\n")
    assert tasks.codes[:2] == [1, 1]
    assert "nobody can come in place of worker 1, the task has ended" in outputs[0]


def test_tasks_with_different_numbers_of_servers_are_told(tasks: Tasks):
    (tasks.folder / "train.py").write_text(TRAIN)
    tasks.start(3, "--servers", "1", "--", sys.executable, "train.py", only=range(2))
    tasks.start(3, "--servers", "2", "--", sys.executable, "train.py", only=range(2, 3))
    said = tasks.started[2].communicate(timeout=PATIENCE_S)[0]
    assert tasks.started[2].returncode == 2
    assert "expects 1 workers, the first one 2: all tasks must have the same --servers" in " ".join(said.split())


def test_a_worker_that_failed_before_all_had_come_ends_the_others(tasks: Tasks):
    tasks.start(3, "--servers", "1", "--", sys.executable, "-c", "import sys; sys.exit(7)")
    outputs = tasks.outputs()
    assert tasks.codes[1:] == [7, 7]
    assert tasks.codes[0] == 1
    assert "worker 0 ended with exit code 7" in outputs[1]


def test_a_cluster_whose_scripts_do_not_come_ends_with_them(tasks: Tasks):
    tasks.start(2, "--servers", "1", "--", sys.executable, "-c", "pass")
    tasks.outputs()
    assert tasks.codes == [0, 0]
