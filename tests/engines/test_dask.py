"""Workers that are Dask tasks, with servers outside: the program of the guide. `make test-kubernetes` installs Dask."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from helpers import PATIENCE_S

from windlass.testing import LocalCluster

pytest.importorskip("distributed", reason="needs dask distributed; make test-kubernetes installs it")
GUIDE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "guide" / "engines.md"


@pytest.fixture
def program(tmp_path: pathlib.Path) -> pathlib.Path:
    """As the guide has it."""
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    (text,) = [block for block in blocks if block.startswith("# dask_train.py\n")]
    script = tmp_path / "dask_train.py"
    script.write_text(text)
    return script


def run(program: pathlib.Path, cluster: LocalCluster, *more: str, **environment: str) -> str:
    own = {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}
    done = subprocess.run(
        [sys.executable, str(program), *more],
        env=own | cluster.environment(**environment),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_tasks_of_dask_train_together_each_on_a_worker_of_its_own(program: pathlib.Path):
    with LocalCluster(servers=2) as cluster:
        said = run(program, cluster)
    ranks = re.findall(r"^rank (\d) in process (\d+): off by (\S+)$", said, re.MULTILINE)
    assert sorted(rank for rank, _, _ in ranks) == ["0", "1"]
    assert len({pid for _, pid, _ in ranks}) == 2
    assert all(float(off) < 0.01 for _, _, off in ranks)


def test_a_task_whose_dask_worker_is_killed_runs_again_under_its_rank(program: pathlib.Path):
    step = "            weights = w.push_pull(weights - goal)\n"
    killing = program.read_text().replace(
        step,
        f"{step}"
        "            if cluster.rank == 1 and cluster.clock == 40 and not os.path.exists('killed'):\n"
        "                open('killed', 'w').close()\n"
        "                os.kill(os.getpid(), 9)\n",
    )
    assert killing != program.read_text()
    marker = program.with_name("killed")
    program.write_text(killing.replace("'killed'", repr(str(marker))))
    with LocalCluster(servers=1) as cluster:
        said = run(program, cluster)
    assert marker.exists()
    assert [float(off) < 0.01 for off in re.findall(r"off by (\S+)$", said, re.MULTILINE)] == [True, True]
