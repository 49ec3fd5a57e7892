"""What `windlass kubernetes` prints and refuses. `make test-kubernetes` runs it, and asks Kubernetes' own schemas."""

import base64
import re
from typing import Any

import pytest
from typer.testing import CliRunner

from windlass._cli import app
from windlass._errors import InvalidArgument
from windlass._settings import load
from windlass.launch import kubernetes
from windlass.launch.kubernetes import KubernetesRun
from windlass.launch.yaml import to_yaml

TOKEN = b"a token of tests"


def made(*, flags: dict[str, Any] | None = None, **wanted: Any) -> list[dict[str, Any]]:
    run = KubernetesRun("i:1", wanted.pop("command", ["train.py"]), **wanted)
    return kubernetes._Made(run, load({"servers": 2, "workers": 4, **(flags or {})}, environ={}), 7.5).documents(TOKEN)


def pod_of(documents: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """The pod's spec."""
    if documents[-1]["kind"] == "JobSet":
        jobs = {one["name"]: one["template"]["spec"] for one in documents[-1]["spec"]["replicatedJobs"]}
    else:
        jobs = {one["metadata"]["name"].rpartition("-")[2]: one["spec"] for one in documents if one["kind"] == "Job"}
    spec: dict[str, Any] = jobs[role]["template"]["spec"]
    return spec


def environment_of(documents: list[dict[str, Any]], role: str) -> dict[str, Any]:
    (container,) = pod_of(documents, role)["containers"]
    names = [one["name"] for one in container["env"]]
    assert len(names) == len(set(names))
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("WINDLASS_TOKEN", raising=False)
    return lambda *words: CliRunner().invoke(app, ["kubernetes", *words])


def test_it_prints_a_secret_a_service_and_three_jobs_whose_token_is_nowhere_else(command):
    done = command("--image=i:1", "--servers=2", "--workers=4", "--gpus=1", "--", "python", "train.py", "--lr=0.1")
    assert done.exit_code == 0, done.output
    kinds = re.findall(r"^kind: (\w+)$", done.stdout, re.MULTILINE)
    assert kinds == ["Secret", "Service", "Job", "Job", "Job"]
    (token,) = re.findall(r'^  token: "?([\w=+/]+)"?$', done.stdout, re.MULTILINE)
    assert len(base64.b64decode(token)) == 64
    assert done.stdout.count(token) == 1
    assert base64.b64decode(token).decode() not in done.stdout
    assert "kubectl exec job/train-scheduler -- windlass status" in done.stdout
    again = command("--image=i:1", "--", "train.py")
    assert token not in again.stdout


def test_rank_and_number_are_the_index_and_what_is_bound_is_the_pods_address():
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    for jobset in (False, True):
        documents = made(jobset=jobset)
        worker, server = environment_of(documents, "worker"), environment_of(documents, "server")
        assert (worker["RANK"], worker["WORLD_SIZE"]) == (index, "4")
        assert server["WINDLASS_NUMBER"] == index
        assert server["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        assert server["WINDLASS_LISTEN"] == "tcp://$(POD_IP):7165"
        assert list(server).index("POD_IP") < list(server).index("WINDLASS_LISTEN")  # what is expanded comes first
        assert server["WINDLASS_THREADS"]["resourceFieldRef"]["resource"] == "requests.cpu"
        assert environment_of(documents, "scheduler")["WINDLASS_SERVERS"] == "2"
        for role in ("scheduler", "server", "worker"):
            assert pod_of(documents, role)["enableServiceLinks"] is False
            token = environment_of(documents, role)["WINDLASS_TOKEN"]
            assert token == {"secretKeyRef": {"name": "train-token", "key": "token"}}


def test_pods_are_nobody_in_particular_unless_the_image_says_who():
    for role in ("scheduler", "server", "worker"):
        pod = pod_of(made(), role)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert pod["automountServiceAccountToken"] is False
        image = pod_of(made(user=None), role)
        assert "runAsNonRoot" not in image["securityContext"]
        assert image["containers"][0]["securityContext"] == {"allowPrivilegeEscalation": False}


def test_the_grace_period_covers_a_last_checkpoint():
    from windlass._settings import SAVE_SECONDS

    for role in ("scheduler", "server", "worker"):
        assert pod_of(made(size="1Gi"), role)["terminationGracePeriodSeconds"] > SAVE_SECONDS + 10


def test_workers_are_restarted_by_index_and_their_success_is_the_sets():
    documents = made(jobset=True, restarts=5)
    assert [one["kind"] for one in documents] == ["Secret", "JobSet"]  # which makes the Service itself
    spec = documents[-1]["spec"]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["worker"]}
    assert spec["failurePolicy"]["maxRestarts"] == 5
    jobs = {one["name"]: one["template"]["spec"] for one in spec["replicatedJobs"]}
    assert "backoffLimitPerIndex" in jobs["worker"]
    assert jobs["server"]["backoffLimit"] == jobs["scheduler"]["backoffLimit"] == 0
    assert environment_of(documents, "worker")["WINDLASS_ADDRESS"] == "tcp://train-scheduler-0-0.train:7164"
    assert environment_of(made(), "worker")["WINDLASS_ADDRESS"] == "tcp://train-scheduler-0.train:7164"


def test_settings_of_a_run_pass_through_and_lost_workers_are_waited_for():
    flags = {"sync": "ssp:3", "checkpoint_every": "600s", "checkpoint_keep": 5, "allow": "rules", "threads": 3}
    documents = made(flags=flags, claim="disk", resume="newest")
    for role in ("scheduler", "server", "worker"):
        environment = environment_of(documents, role)
        assert environment["WINDLASS_CHECKPOINT_DIR"] == "/checkpoints/train"
        assert environment["WINDLASS_CHECKPOINT_EVERY"] == "600s"
        assert environment["WINDLASS_CHECKPOINT_KEEP"] == "5"
        assert environment["WINDLASS_THREADS"] == "3"
        assert float(environment["WINDLASS_START_TIMEOUT"]) >= 600  # nodes and images take their time
        pod = pod_of(documents, role)
        assert {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "disk"}} in pod["volumes"]
    worker, scheduler = environment_of(documents, "worker"), environment_of(documents, "scheduler")
    assert worker["WINDLASS_SYNC"].lower().startswith("ssp")
    assert worker["WINDLASS_ON_WORKER_LOSS"] == "wait"
    assert scheduler["WINDLASS_RESUME"] == "newest"
    assert scheduler["WINDLASS_RESUME_SINCE"] == "7"
    kept = environment_of(made(flags={"on_worker_loss": "continue"}), "worker")
    assert kept["WINDLASS_ON_WORKER_LOSS"] == "continue"


def test_resources_are_those_asked_for():
    documents = made(gpus=2, cpu="8", memory="32Gi", server_cpu="3500m", server_memory="20Gi", server_image="small:1")
    (worker,) = pod_of(documents, "worker")["containers"]
    assert worker["resources"] == {
        "requests": {"cpu": "8", "memory": "32Gi"},
        "limits": {"memory": "32Gi", "nvidia.com/gpu": 2},
    }
    (server,) = pod_of(documents, "server")["containers"]
    assert server["resources"] == {"requests": {"cpu": "3500m", "memory": "20Gi"}, "limits": {"memory": "20Gi"}}
    assert (worker["image"], server["image"]) == ("i:1", "small:1")
    assert environment_of(documents, "worker")["OMP_NUM_THREADS"]["resourceFieldRef"]["resource"] == "requests.cpu"


def test_what_the_user_writes_is_not_expanded_by_kubernetes():
    documents = made(command=["python", "x.py", "$(RANK)"], environment=("GREETING=$(HOME)=x",))
    assert pod_of(documents, "worker")["containers"][0]["command"] == ["python", "x.py", "$$(RANK)"]
    assert environment_of(documents, "server")["GREETING"] == "$$(HOME)=x"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "My_Train 2.py"], "my-train-2"),
        (["torchrun", "--nproc-per-node=2", "fit.py"], "fit"),
        (["./7.py"], "windlass"),
        (["serve"], "windlass"),
        (["x" * 80 + ".py"], "x" * 40),
    ],
)
def test_the_name_is_the_scripts_as_a_dns_label(command: list[str], name: str):
    documents = made(command=command, flags={"workers": 100_000, "servers": 1000}, jobset=True)
    assert documents[-1]["metadata"]["name"] == name
    assert len(f"{name}-scheduler-0-0-abcde") <= 63
    assert len(f"{name}-worker-0-99999-abcde") <= 63


@pytest.mark.parametrize(
    ("wanted", "flags", "complaint"),
    [
        ({"name": "Train"}, {}, "--name Train: expected at most 40 of a-z, 0-9 and -, with a letter first"),
        ({"name": "t" * 41}, {}, "--name ttt"),
        ({"name": "7up"}, {}, "with a letter first"),
        ({"namespace": "a.b"}, {}, "--namespace a.b: expected a-z"),
        ({"memory": "16 GB"}, {}, "--memory: expected a number of bytes, such as 16Gi, not '16 GB'"),
        ({"server_cpu": "0"}, {}, "--server-cpu: expected a number of cores, such as 4 or 500m, not '0'"),
        ({"environment": ("X",)}, {}, "--env X: expected NAME=VALUE"),
        ({"environment": ("RANK=1",)}, {}, "--env RANK: windlass kubernetes sets this variable itself"),
        ({"claim": "a", "size": "1Gi"}, {}, "give one"),
        ({"storage_class": "fast"}, {}, "--storage-class goes with --checkpoint-size"),
        ({}, {"checkpoint_dir": "/saved"}, "--checkpoint-dir /saved: pods share no folder; name a volume"),
        ({"claim": "a"}, {"checkpoint_dir": "s3://b/c"}, "--checkpoint-dir s3://b/c needs no volume"),
        ({"claim": "a"}, {"checkpoint_dir": "saved"}, "expected the path at which pods mount the volume"),
        ({"resume": "newest"}, {}, "there is no place to look for checkpoints"),
        ({"secret": "No!"}, {}, "--secret No!: expected the name of an object"),
        ({"server_image": "a b"}, {}, "--server-image: expected the name of an image, not 'a b'"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_first(wanted: dict[str, Any], flags: dict[str, Any], complaint: str):
    with pytest.raises(InvalidArgument, match=re.escape(complaint)):
        made(flags=flags, **wanted)


def test_a_secret_that_is_there_is_used_and_one_token_is_enough(command, tmp_path):
    done = command("--image=i", "--secret=mine", "--", "train.py")
    assert done.exit_code == 0
    assert "kind: Secret" not in done.stdout
    assert "name: mine" in done.stdout
    (tmp_path / "token").write_text("my own")
    (tmp_path / "token").chmod(0o600)
    given = command("--image=i", f"--token-file={tmp_path}/token", "--", "train.py")
    assert base64.b64encode(b"my own").decode() in given.stdout
    both = command("--image=i", "--secret=mine", f"--token-file={tmp_path}/token", "--", "train.py")
    assert both.exit_code == 2


def test_who_the_pods_run_as_is_a_number_or_the_images(command):
    assert "runAsUser: 7" in command("--image=i", "--user=7", "--", "train.py").stdout
    assert command("--image=i", "--user=root", "--", "train.py").exit_code == 2
    assert command("--image=i", "--user=0", "--", "train.py").exit_code == 2
    assert command("--", "train.py").exit_code == 2  # no image


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1, "b": [1, "x"], "c": {}}, "a: 1\nb:\n  - 1\n  - x\nc: {}\n"),
        ([{"a": True, "b": "yes"}], '- a: true\n  b: "yes"\n'),
        (
            {"a": "tcp://h:1", "b": "a: b", "c": "", "d": "1.5", "e": "x#y"},
            'a: tcp://h:1\nb: "a: b"\nc: ""\nd: "1.5"\ne: "x#y"\n',
        ),
        (["a\nb", None], '- "a\\nb"\n- null\n'),
    ],
)
def test_yaml_is_for_people_and_quotes_what_would_be_something_else(value: Any, text: str):
    assert to_yaml(value) == text


def test_yaml_refuses_what_it_cannot_say():
    with pytest.raises(TypeError, match="expected a mapping"):
        to_yaml({"a": 1.5})
