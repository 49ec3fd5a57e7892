"""What `windlass kubernetes` prints, by Kubernetes' schemas and as processes: `make test-kubernetes`."""

import os
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

import pytest
from helpers import PATIENCE_S

from windlass._checkpoint.folder import Folder
from windlass._checkpoint.reader import newest

yaml = pytest.importorskip("yaml", reason="needs kubernetes-validate; make test-kubernetes installs it")
validator = pytest.importorskip(
    "kubernetes_validate", reason="needs kubernetes-validate; make test-kubernetes installs it"
)
jsonschema = pytest.importorskip("jsonschema", reason="needs kubernetes-validate; make test-kubernetes installs it")

from kubelet import Kubelet, Pod  # noqa: E402 (needs yaml)

ROOT = pathlib.Path(__file__).resolve().parents[2]
VERSIONS = ("1.31", "1.33")
TRAIN = """
import sys, time
import numpy as np
import windlass as wl

steps, pause = int(sys.argv[1]), float(sys.argv[2])
goal = np.arange(1000, dtype=np.float32) / 1000
with wl.connect() as cluster:
    w = cluster.tensor("w", 1000, rule=wl.SGD(lr=0.1), sync="bsp")
    print("begins as", cluster.rank, "at", cluster.clock, flush=True)
    weights = w.pull()
    while cluster.clock < steps:
        weights = w.push_pull(weights - goal)
        print("step", cluster.clock, flush=True)
        time.sleep(pause)
    print("off by", float(np.abs(weights - goal).max()), flush=True)
"""
LONG = "1000000"  # steps: until somebody ends it


def printed(*words: str) -> str:
    """What the command prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}
    command = [sys.executable, "-m", "windlass", "kubernetes", "--image=train:1", "--servers=2", "--workers=2", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- schemas ---------------------------------------------------------------------------------------------------------

FORMS = {
    "plain": [],
    "everything": [
        "--gpus=2",
        "--cpu=4",
        "--memory=16Gi",
        "--server-cpu=500m",
        "--server-image=servers:1",
        "--checkpoint-size=100Gi",
        "--storage-class=fast",
        "--checkpoint-every=600s",
        "--resume",
        "--namespace=team",
        "--name=run",
        "--env=A=$(B): 'c'",
        "--env-from=s3",
        "--pull-secret=registry",
        "--allow=torch.optim",
    ],
    "claim": ["--checkpoint-claim=disk", "--secret=mine", "--user=image", "--on-worker-loss=continue"],
}

#: The parts of a JobSet that we use, from its API v1alpha2; a Job's template is checked as a Job.
_TEXT, _COUNT, _TEXTS = (
    {"type": "string"},
    {"type": "integer", "minimum": 0},
    {"type": "array", "items": {"type": "string"}},
)


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


JOBSET = _object(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=_object(["name"], name=_TEXT, namespace=_TEXT, labels={"type": "object"}),
    spec=_object(
        ["replicatedJobs"],
        replicatedJobs={
            "type": "array",
            "items": _object(
                ["name", "template"],
                name=_TEXT,
                replicas=_COUNT,
                template=_object(["spec"], metadata={"type": "object"}, spec={"type": "object"}),
            ),
        },
        network=_object(
            [],
            enableDNSHostnames={"type": "boolean"},
            publishNotReadyAddresses={"type": "boolean"},
            subdomain=_TEXT,
        ),
        successPolicy=_object(["operator"], operator={"enum": ["All", "Any"]}, targetReplicatedJobs=_TEXTS),
        failurePolicy=_object(
            [],
            maxRestarts=_COUNT,
            rules={
                "type": "array",
                "items": _object(
                    ["action", "name"],
                    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
                    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
                    targetReplicatedJobs=_TEXTS,
                    onJobFailureReasons=_TEXTS,
                ),
            },
        ),
    ),
)


def check(document: dict[str, Any], version: str) -> None:
    """Raises on what the cluster would refuse, unknown fields included."""
    if document["kind"] != "JobSet":
        validator.validate(document, version, strict=True)
        return
    jsonschema.validate(document, JOBSET)
    for one in document["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": one["name"]}, **one["template"]}
        validator.validate(job, version, strict=True)


@pytest.mark.parametrize("jobset", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_kubernetes_own_schemas_know_every_field(form: str, jobset: bool):
    text = printed(*FORMS[form], *(["--jobset"] if jobset else []), "--", "python", "train.py", "--lr", "0.1")
    documents = list(yaml.safe_load_all(text))
    assert len(documents) >= (1 if jobset else 4)
    for document in documents:
        for version in VERSIONS:
            check(document, version)


def test_a_field_that_does_not_exist_is_noticed():
    *_, jobset = yaml.safe_load_all(printed("--jobset", "--", "train.py"))
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["enableServiceLink"] = False
    with pytest.raises(validator.ValidationError):
        check(jobset, VERSIONS[0])
    del jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["enableServiceLink"]
    jobset["spec"]["successPolicy"]["operator"] = "Most"
    with pytest.raises(jsonschema.ValidationError):
        check(jobset, VERSIONS[0])


@pytest.mark.parametrize(
    "text", ["a: b", "- x", "#", " x ", "yes", "0x1", "1e3", "a\n\x85b\u2028", "é😀", "~", "a:", "'", "\\"]
)
def test_what_is_written_is_what_is_read(text: str):
    from windlass.launch.yaml import to_yaml

    value = {text or "k": [text, {"in": text, "deep": [[text]]}, [], {}]}
    assert yaml.safe_load(to_yaml(value)) == value


# -- pods as processes -----------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: pathlib.Path) -> Any:
    """Applies what the command prints for this training."""
    (tmp_path / "train.py").write_text(TRAIN)

    def apply(*words: str, steps: str = LONG, pause: str = "0.02") -> Kubelet:
        return Kubelet(printed(*words, "--", "python", "train.py", steps, pause), tmp_path)

    return apply


def begun_at(pod: Pod) -> int:
    (line,) = [line for line in pod.output.splitlines() if line.startswith("begins as")]
    assert line.split()[2] == str(pod.index)
    return int(line.split()[-1])


def off_by(pod: Pod) -> float:
    return float(pod.output.rpartition("off by ")[2])


def clock_saved(folder: pathlib.Path) -> int:
    found = newest(Folder(str(folder / "volume" / "train")), "default").checkpoint
    return -1 if found is None else found.manifest.clock


def test_pods_train_and_a_worker_that_is_killed_is_replaced_by_index(run, tmp_path):
    with run(steps="150", pause="0.01") as pods:
        workers = [pods.pod("worker", index) for index in (0, 1)]
        for worker in workers:
            pods.says(worker, "step 10\n")
        for _ in range(3):
            assert pods.probe() == 3  # the scheduler and two servers
        workers[1].kill()
        pods.until(pods.complete, "all Jobs have succeeded")
        found = [pod for pod in pods.all_pods() if pod.job is pods.job("worker")]
        assert sorted((pod.index, pod.attempt) for pod in found) == [(0, 1), (1, 1), (1, 2)]
        (instead,) = [pod for pod in found if pod.attempt == 2]
        assert begun_at(instead) >= 10
        assert [off_by(pod) for pod in found if pod.process.poll() == 0] == [pytest.approx(0, abs=0.01)] * 2
        assert [pod.attempt for pod in pods.job("server").ended] == [1, 1]
        for pod in pods.all_pods():
            token = pod.environment["WINDLASS_TOKEN"]
            assert token not in " ".join(pod.command)
            assert token not in pod.output
            if pod.job is pods.job("server"):
                assert "handshake" not in pod.output  # with a probe
                assert "WARNING" not in pod.output


def test_at_sigterm_to_all_pods_a_checkpoint_is_saved_and_the_next_run_goes_on_even_when_a_server_is_killed(
    run, tmp_path
):
    with run("--checkpoint-size=1Gi") as pods:
        for index in (0, 1):
            pods.says(pods.pod("worker", index), "step 10\n")
        assert clock_saved(tmp_path) == -1
        pods.terminate()
        saved = clock_saved(tmp_path)
        assert saved >= 10
    time.sleep(1.1)  # a checkpoint of before is none of this run, to the second
    with run("--checkpoint-size=1Gi", "--checkpoint-every=20", "--resume", steps=str(saved + 300)) as pods:
        first = pods.pod("worker")
        pods.until(lambda: clock_saved(tmp_path) > saved, "it goes on and saves")
        assert begun_at(first) == saved
        pods.pod("server", 1).kill()
        pods.until(pods.complete, "all Jobs have succeeded")
        attempts = [pod for pod in pods.all_pods() if pod.job is pods.job("worker") and pod.index == 0]
        assert len(attempts) == 2
        assert begun_at(attempts[1]) > saved
        assert off_by(attempts[1]) == pytest.approx(0, abs=0.01)


def test_a_scheduler_whose_node_is_drained_saves_and_is_replaced_without_counting_as_a_failure(run, tmp_path):
    with run("--checkpoint-size=1Gi", "--restarts=1", "--worker-restarts=0", steps="300") as pods:
        for index in (0, 1):
            pods.says(pods.pod("worker", index), "step 10\n")
        pods.pod("scheduler").drain()
        pods.until(pods.complete, "all Jobs have succeeded")
        assert pods.job("scheduler").failures[0] == 0
        assert begun_at(pods.job("worker").ended[-1]) >= 10


def test_a_jobset_starts_all_again_when_a_server_is_killed_and_is_over_with_its_workers(run, tmp_path):
    with run("--jobset", "--checkpoint-size=1Gi", "--checkpoint-every=20", steps="300") as pods:
        pods.until(lambda: clock_saved(tmp_path) > 0, "it saves")
        pods.pod("server", 0).kill()
        pods.until(pods.complete, "the JobSet has succeeded")
        assert pods.restarts == 1
        assert begun_at(pods.job("worker").ended[-1]) > 0
        pods.until(lambda: not any(pod.runs for pod in pods.all_pods()), "nothing is left")


def test_a_run_whose_script_fails_every_time_ends_with_nothing_left(run, tmp_path):
    (tmp_path / "train.py").write_text("import windlass as wl\nwl.connect()\nraise RuntimeError('no such data')\n")
    with run("--worker-restarts=1", "--restarts=0", "--start-timeout=4") as pods:
        pods.until(lambda: pods.job("worker").failed, "the Job of workers gives up")
        assert "no such data" in pods.job("worker").ended[0].output
        pods.until(lambda: not any(pod.runs for pod in pods.all_pods()), "nothing is left")
        assert pods.job("scheduler").failed


@pytest.mark.parametrize(
    ("data", "usual"), [("digits", 0.93), pytest.param("mnist", 0.87, marks=pytest.mark.long)], ids=["digits", "mnist"]
)
def test_handwritten_digits_are_learned_in_pods_as_well_as_elsewhere(data: str, usual: float, tmp_path: pathlib.Path):
    script = str(ROOT / "apps" / "softmax" / "train.py")
    with Kubelet(printed("--", "python", script, f"--data={data}"), tmp_path) as pods:
        pods.until(pods.complete, "all Jobs have succeeded")
        (first,) = (pod for pod in pods.job("worker").ended if pod.index == 0)
        accuracy = re.search(r"test accuracy (\d\.\d+)", first.output)
        assert accuracy is not None, first.output
        assert float(accuracy[1]) > usual
