"""`windlass join` under Slurm itself: a controller and three nodes on this host, each node with an address of its own.

Run by `make test-slurm`, which installs Slurm.
"""

import os
import pathlib
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator

import pytest
from engine_scripts import JOIN, PYTHON, await_none_with, processes_with, write_scripts
from helpers import PATIENCE_S
from slurm import Job, Slurm

pytestmark = pytest.mark.skipif("slurm" not in os.environ.get("ENGINES", ""), reason="needs Slurm: make test-slurm")
TOKEN = "export WINDLASS_TOKEN=of-these-tests WINDLASS_START_TIMEOUT=300\n"
SRUN = "srun --kill-on-bad-exit=0"
GUIDE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "guide" / "engines.md"
ACROSS = ("--nodes=3", "--ntasks=6", "--ntasks-per-node=2")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="wl-slurm-"))  # a short path: sockets lie there
    try:
        with Slurm(folder) as made:
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def submit(slurm: Slurm, folder: pathlib.Path, script: str, *options: str) -> Job:
    write_scripts(folder)
    return slurm.submit(TOKEN + script, folder, *options)


def test_two_jobs_train_across_three_nodes_beside_each_other_and_a_worker_that_is_killed_is_replaced(
    slurm: Slurm, tmp_path: pathlib.Path
):
    one = submit(
        slurm,
        tmp_path / "one",
        f"{SRUN} {JOIN} --servers 3 --worker-restarts 3 -- {PYTHON} train.py 20 die",
        *ACROSS,
    )
    other = submit(
        slurm,
        tmp_path / "other",
        f"{SRUN} --resv-ports=0 {JOIN} --servers 1 -- {PYTHON} train.py 30 plainly",
        "--nodes=3",
        "--ntasks=3",
    )
    assert (one.wait(), other.wait()) == ("COMPLETED", "COMPLETED"), one.told() + other.told()
    assert "63 from 3 workers on ['127.0.1.1', '127.0.1.2']" in one.output()
    assert "62 from 2 workers on ['127.0.1.1']" in other.output()
    assert "worker 1 ended with signal SIGKILL; start 1 of 3 in its place" in one.output()
    assert "in its place" not in other.output()
    for job, servers in ((one, "3 of 6"), (other, "1 of 3")):
        assert f"{servers} tasks are servers; the scheduler is at tcp://127.0.1.1:" in job.output()


def test_what_cannot_work_is_said_and_ends_at_once(slurm: Slurm, tmp_path: pathlib.Path):
    join = f"{JOIN} --servers 2 -- {PYTHON} train.py 5 plainly"
    lines = [
        f"{SRUN} --nodes=2 --ntasks=2 {join}",
        f"env -u WINDLASS_TOKEN {SRUN} --nodes=3 --ntasks=3 {join}",
        join,
    ]
    job = submit(slurm, tmp_path, "\n".join(f"{line}; echo ended with $?" for line in lines), "--nodes=3", "--ntasks=3")
    assert job.wait() == "COMPLETED", job.told()
    said = " ".join(job.output().replace("│", " ").split())
    assert "Slurm started 2 tasks; with --servers 2 at least 3 are needed: 2 are servers" in said
    assert "Slurm started tasks on several hosts, which need a token in common" in said
    assert f"this is the batch script of Slurm's job {job.number}, not a task of a step" in said
    assert said.count("ended with 2") == 3, job.told()


def test_when_srun_is_killed_nothing_is_left(slurm: Slurm, tmp_path: pathlib.Path):
    script = f"{SRUN} {JOIN} --servers 1 -- {PYTHON} train.py 1000000 slow"
    job = submit(slurm, tmp_path, script, "--nodes=3", "--ntasks=3")
    job.until("trains", 2)
    there = processes_with("SLURM_JOB_ID", job.number)
    assert sum("train.py" in command for command in there.values()) >= 4  # two scripts and those who started them
    sruns = [pid for pid, command in there.items() if command.startswith("srun")]
    assert sruns
    for pid in sruns:
        os.kill(pid, signal.SIGKILL)
    await_none_with("SLURM_JOB_ID", job.number)
    assert job.wait() == "FAILED"


def manifests(folder: pathlib.Path) -> int:
    return len(list((folder / "saved").rglob("manifest*")))


def test_a_job_that_is_told_early_saves_and_is_started_again_where_it_was_and_scancel_ends_it(
    slurm: Slurm, tmp_path: pathlib.Path
):
    script = f"{SRUN} {JOIN} --servers 1 --checkpoint-dir saved --requeue -- {PYTHON} train.py 1000000 slow"
    job = submit(slurm, tmp_path, script, "--nodes=3", "--ntasks=3", "--requeue")
    job.until("trains", 2)
    slurm.call("scancel", "--signal=USR1", job.number)  # as `#SBATCH --signal=USR1@120` two minutes ahead of the end
    job.until(f"Slurm is asked to start job {job.number} again")
    job.until("resumes at clock", 2)
    assert manifests(tmp_path) == 1, job.told()
    assert "Slurm has started this job again (1): it begins from the last checkpoint" in job.output()
    slurm.call("scancel", job.number)
    assert job.wait() == "CANCELLED", job.told()
    await_none_with("SLURM_JOB_ID", job.number)
    assert job.output().count("is asked to start") == 1


def test_tasks_that_slurm_ends_save_within_the_time_that_it_gives_them(slurm: Slurm, tmp_path: pathlib.Path):
    write_scripts(tmp_path)
    join = f"{JOIN} --servers 1 --checkpoint-dir saved -- {PYTHON} train.py 1000000 slow"
    srun = slurm.direct(join, tmp_path, "--nodes=3", "--ntasks=3", "--job-name=direct")
    deadline = time.monotonic() + PATIENCE_S
    while (tmp_path / "direct").read_text().count("trains") < 2:
        assert srun.poll() is None, (tmp_path / "direct").read_text()
        assert time.monotonic() < deadline, (tmp_path / "direct").read_text()
        time.sleep(0.1)
    slurm.call("scancel", "--name=direct")
    srun.wait(PATIENCE_S)
    said = (tmp_path / "direct").read_text()
    assert manifests(tmp_path) == 1, said
    assert said.count("SIGTERM; ends when a checkpoint is taken") == 2, said  # though it came twice


def test_many_workers_that_leave_together_leave_in_peace(slurm: Slurm, tmp_path: pathlib.Path, accurate: bool):
    count = 48 if accurate else 8
    job = submit(slurm, tmp_path, f"{SRUN} {PYTHON} crowd.py", "--nodes=3", f"--ntasks={count + 1}")
    assert job.wait() == "COMPLETED", job.told()
    assert job.output().count(f"left {3 * count}") == count
    assert job.output().count("served") == 1
    assert "in its place" not in job.output()


def test_the_program_of_the_guide_is_a_server_or_a_worker_in_each_task(slurm: Slurm, tmp_path: pathlib.Path):
    """submitit would call it in each task; here a line does."""
    (program,) = re.findall(r"^```python\n(# submit.py\n.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    write_scripts(tmp_path)
    (tmp_path / "submit.py").write_text(program)
    (tmp_path / "task.py").write_text("from submit import Training\nprint('result', Training()(), flush=True)\n")
    job = submit(slurm, tmp_path, f"{SRUN} {PYTHON} task.py", "--nodes=3", "--ntasks=4")
    assert job.wait() == "COMPLETED", job.told()
    results = re.findall(r"^result (\S+)$", job.output(), re.MULTILINE)
    assert len(results) == 4, job.told()
    assert results.count("None") == 2, job.told()


@pytest.mark.long
def test_a_job_that_loses_a_server_goes_on_from_its_newest_checkpoint(slurm: Slurm, tmp_path: pathlib.Path):
    join = f"{JOIN} --servers 2 --checkpoint-dir saved --checkpoint-every 20 --requeue"
    job = submit(
        slurm, tmp_path, f"{SRUN} {join} -- {PYTHON} train.py 1000000 slow", "--nodes=3", "--ntasks=4", "--requeue"
    )
    deadline = time.monotonic() + PATIENCE_S
    while manifests(tmp_path) < 1:
        assert time.monotonic() < deadline, job.told()
        time.sleep(0.1)
    second = processes_with("SLURM_JOB_ID", job.number).keys() & processes_with("WINDLASS_NUMBER", "1").keys()
    (server,) = second
    os.kill(server, signal.SIGKILL)
    job.until(f"Slurm is asked to start job {job.number} again")
    job.until("resumes at clock", 2)
    slurm.call("scancel", job.number)
    assert job.wait() == "CANCELLED", job.told()


@pytest.mark.long
def test_a_job_at_its_time_limit_goes_on_where_it_was(slurm: Slurm, tmp_path: pathlib.Path):
    script = f"{SRUN} {JOIN} --servers 1 --checkpoint-dir saved --requeue -- {PYTHON} train.py 1000000 slow"
    job = submit(slurm, tmp_path, script, "--nodes=3", "--ntasks=3", "--requeue", "--time=2", "--signal=TERM@60")
    job.until("resumes at clock", 4)  # of two workers, in two further starts
    slurm.call("scancel", job.number)
    assert job.wait() == "CANCELLED", job.told()


@pytest.mark.long
def test_mnist_reaches_its_usual_accuracy(slurm: Slurm, tmp_path: pathlib.Path):
    train = pathlib.Path(__file__).resolve().parents[2] / "apps" / "mnist" / "train.py"
    job = submit(slurm, tmp_path, f"{SRUN} {JOIN} --servers 2 -- {PYTHON} {train}", "--nodes=3", "--ntasks=4")
    deadline = time.monotonic() + 10 * PATIENCE_S
    while job.show().get("JobState") in ("PENDING", "RUNNING", "COMPLETING") and time.monotonic() < deadline:
        time.sleep(1)
    assert job.wait() == "COMPLETED", job.told()
    reached = re.search(r"test accuracy (\d\.\d{4})", job.output())
    assert reached is not None, job.output()
    assert float(reached[1]) > 0.97
