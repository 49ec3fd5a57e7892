"""Kubernetes as far as pods of `windlass kubernetes` rely on it, with processes of this machine for pods.

Of the documents it reads Secrets, Services, Jobs and JobSets. A pod is its container's command with the variables that
its `env` says, none of ours, and an address of loopback of its own. Names of pods lead where the rules of Kubernetes
say: of an Indexed Job's pod with a subdomain, where there is a headless Service of that name that selects it.

Not as there: back-off is short, a volume is a folder whose path replaces the mount's, and a name that the rules give a
pod is written as its address before the process starts, so a pod that has a name keeps its address.
"""

import base64
import collections
import contextlib
import dataclasses
import math
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import yaml
from helpers import PATIENCE_S

from windlass.launch.child import die_with

BACKOFF_SECONDS = 0.5
INDEX = "batch.kubernetes.io/job-completion-index"


@dataclasses.dataclass
class Pod:
    """One container's process."""

    job: "Job"
    index: int
    attempt: int
    ip: str
    command: list[str]
    environment: dict[str, str]
    log: pathlib.Path
    process: subprocess.Popen[bytes]
    disrupted: bool = False
    kill_at: float | None = None

    @property
    def name(self) -> str:
        return f"{self.job.name}-{self.index}"

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """As the kernel does where there is no memory left."""
        self.process.kill()

    def drain(self) -> None:
        """As the cluster does with what runs on a node that it wants back."""
        self.disrupted = True
        self.terminate()

    def terminate(self) -> None:
        if self.runs and self.kill_at is None:
            self.kill_at = time.monotonic() + self.job.pod["terminationGracePeriodSeconds"]
            self.process.send_signal(signal.SIGTERM)


@dataclasses.dataclass
class Job:
    """An Indexed Job, and what has become of its indices."""

    name: str
    spec: dict[str, Any]
    subdomain: str
    pods: dict[int, Pod] = dataclasses.field(default_factory=dict)
    ended: list[Pod] = dataclasses.field(default_factory=list)
    succeeded: set[int] = dataclasses.field(default_factory=set)
    failures: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    starts: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    due: dict[int, float] = dataclasses.field(default_factory=dict)  # when an index gets its next pod
    failed: str = ""

    @property
    def pod(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.spec["template"]["spec"]
        return spec

    @property
    def complete(self) -> bool:
        return len(self.succeeded) == self.spec["completions"]


class Kubelet:
    """Runs what was printed. A context manager that ends all of it."""

    def __init__(self, text: str, folder: pathlib.Path) -> None:
        self._folder = folder
        self._volume = folder / "volume"
        self._volume.mkdir(exist_ok=True)
        self._secrets: dict[str, dict[str, str]] = {}
        self._services: dict[str, dict[str, Any]] = {}
        self._set: dict[str, Any] | None = None
        self.jobs: dict[str, Job] = {}
        self.restarts = 0  #: of a JobSet
        self.over = ""  #: of a JobSet: how it ended
        self._taken: set[str] = set()
        self._named: dict[str, str] = {}  # addresses of pods that have a name
        self.apply(text)

    def apply(self, text: str) -> None:
        for document in yaml.safe_load_all(text):
            name = document["metadata"]["name"]
            match document["kind"]:
                case "Secret":
                    data = {key: base64.b64decode(value).decode() for key, value in document["data"].items()}
                    self._secrets[name] = data
                case "Service":
                    self._services[name] = document["spec"]
                case "Job":
                    self._begin(Job(name, document["spec"], document["spec"]["template"]["spec"]["subdomain"]))
                case "JobSet":
                    self._set = document
                    self._begin_set()
                case "PersistentVolumeClaim":
                    assert document["spec"]["accessModes"] == ["ReadWriteMany"]
                case kind:
                    raise AssertionError(f"a document of kind {kind!r}")

    def _begin_set(self) -> None:
        assert self._set is not None
        spec, name = self._set["spec"], self._set["metadata"]["name"]
        network = spec["network"]
        assert network["enableDNSHostnames"]
        for one in spec["replicatedJobs"]:
            assert one["replicas"] == 1
            self._begin(Job(f"{name}-{one['name']}-0", one["template"]["spec"], network["subdomain"]))

    def _begin(self, job: Job) -> None:
        self.jobs[job.name] = job
        assert job.spec["completionMode"] == "Indexed"
        assert job.spec["parallelism"] == job.spec["completions"]
        job.due = dict.fromkeys(range(job.spec["completions"]), time.monotonic())

    def __enter__(self) -> "Kubelet":
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            for pod in self.all_pods():
                print(f"-- {pod.name}, attempt {pod.attempt}: {pod.process.poll()}\n{pod.output}", file=sys.stderr)
        for pod in self.all_pods():
            if pod.runs:
                pod.kill()
            pod.process.wait()

    # -- what tests ask ----------------------------------------------------------------------------------------------

    def all_pods(self) -> list[Pod]:
        return [pod for job in self.jobs.values() for pod in (*job.ended, *job.pods.values())]

    def job(self, role: str) -> Job:
        (job,) = (job for job in self.jobs.values() if job.pod["containers"][0]["name"] == role)
        return job

    def pod(self, role: str, index: int = 0) -> Pod:
        self.until(lambda: index in self.job(role).pods, f"{role} {index} runs")
        return self.job(role).pods[index]

    def until(self, true: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.turn()
            if true():
                return
            assert time.monotonic() < deadline, f"not in time: {what}"
            time.sleep(0.02)

    def says(self, pod: Pod, text: str) -> None:
        def said() -> bool:
            assert pod.runs or text in pod.output, f"{pod.name} ended with {pod.process.poll()}:\n{pod.output}"
            return text in pod.output

        self.until(said, f"{pod.name} says {text!r}")

    def complete(self) -> bool:
        """Whether all have done what they are for."""
        if self._set is not None:
            assert not self.over.startswith("Failed"), self.over
            return bool(self.over)
        failed = [f"{job.name}: {job.failed}" for job in self.jobs.values() if job.failed]
        assert not failed, failed
        return all(job.complete for job in self.jobs.values())

    def terminate(self) -> None:
        """As `kubectl delete` does: all pods at once, and none is replaced."""
        for job in self.jobs.values():
            self._end(job)
        self.until(lambda: not any(pod.runs for pod in self.all_pods()), "all pods have ended")

    def probe(self) -> int:
        """Asks every pod what its liveness probe asks; how many were asked."""
        asked = 0
        for job in self.jobs.values():
            for pod in job.pods.values():
                look = job.pod["containers"][0].get("livenessProbe")
                if look is None or not pod.runs:
                    continue
                asked += 1
                if "tcpSocket" in look:
                    socket.create_connection((pod.ip, look["tcpSocket"]["port"]), 30).close()
                else:
                    url = f"http://{pod.ip}:{look['httpGet']['port']}{look['httpGet']['path']}"
                    with urllib.request.urlopen(url, timeout=30) as answer:
                        assert 200 <= answer.status < 400
        return asked

    # -- Jobs --------------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """What the controllers do."""
        now = time.monotonic()
        for job in list(self.jobs.values()):
            for index, pod in list(job.pods.items()):
                if pod.kill_at is not None and now > pod.kill_at:
                    pod.kill()
                if not pod.runs:
                    job.ended.append(job.pods.pop(index))
                    self._ended(job, index, pod)
            for index, due in list(job.due.items()):
                if now >= due:
                    del job.due[index]
                    job.starts[index] += 1
                    job.pods[index] = self._start(job, index)
        if self._set is not None and not self.over:
            self._turn_set()

    def _ended(self, job: Job, index: int, pod: Pod) -> None:
        if pod.process.poll() == 0:
            job.succeeded.add(index)
            return
        if job.failed:
            return
        rules = job.spec.get("podFailurePolicy", {}).get("rules", [])
        ignored = pod.disrupted and any(
            rule["action"] == "Ignore" and {"type": "DisruptionTarget", "status": "True"} in rule["onPodConditions"]
            for rule in rules
        )
        codes = [rule["onExitCodes"] for rule in rules if rule["action"] == "FailJob"]
        if not ignored and any(pod.process.poll() in one["values"] for one in codes):
            self._end(job)
            job.failed = f"index {index} ended with {pod.process.poll()}"
            return
        if not ignored:
            job.failures[index] += 1
        if "backoffLimit" in job.spec:
            over = sum(job.failures.values()) > job.spec["backoffLimit"]
        else:
            over = job.failures[index] > job.spec["backoffLimitPerIndex"]
        if not over:
            job.due[index] = time.monotonic() + BACKOFF_SECONDS
        elif "backoffLimit" in job.spec or job.spec.get("maxFailedIndexes") == 0:
            self._end(job)
            job.failed = f"index {index}"

    def _end(self, job: Job) -> None:
        job.due.clear()
        job.failed = job.failed or "deleted"
        for pod in job.pods.values():
            pod.terminate()

    def _turn_set(self) -> None:
        assert self._set is not None
        spec = self._set["spec"]
        assert spec["successPolicy"]["operator"] == "All"
        wanted = spec["successPolicy"]["targetReplicatedJobs"]
        if all(self.job(role).complete for role in wanted):
            self.over = "Completed"
        failed = [job for job in self.jobs.values() if job.failed]
        if failed and not self.over:
            role = failed[0].pod["containers"][0]["name"]
            rule = next((one for one in spec["failurePolicy"]["rules"] if role in one["targetReplicatedJobs"]), None)
            if rule is not None and rule["action"] == "FailJobSet":
                self.over = f"Failed: {failed[0].name}"
            elif self.restarts == spec["failurePolicy"]["maxRestarts"]:
                self.over = "Failed: restarts"
            else:
                self.restarts += 1
                for job in self.jobs.values():
                    self._end(job)
                self.until_gone()
                self._begin_set()
        if self.over:
            for job in self.jobs.values():
                self._end(job)

    def until_gone(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        for pod in self.all_pods():
            with contextlib.suppress(subprocess.TimeoutExpired):
                pod.process.wait(max(0.1, deadline - time.monotonic()))
            assert not pod.runs

    # -- pods --------------------------------------------------------------------------------------------------------

    def _start(self, job: Job, index: int) -> Pod:
        (container,) = job.pod["containers"]
        name = self._name_of(job, index)
        ip = self._address_of(name) if name is not None and container["name"] != "server" else self._new_address()
        environment = self._environment(job, index, container, ip)
        command = [self._placed(job, self._expanded(word, environment)) for word in container["command"]]
        log = self._folder / f"{job.name}-{index}.{job.starts[index]}.{self.restarts}.log"
        path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"  # the image's
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                env={"PATH": path, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with(os.getpid()),
            )
        return Pod(job, index, job.starts[index], ip, command, environment, log, process)

    def _name_of(self, job: Job, index: int) -> str | None:
        """The name that leads to a pod, if one does."""
        host = f"{job.name}-{index}"
        assert len(host) <= 63
        if self._set is not None:
            return f"{host}.{job.subdomain}"
        service = self._services.get(job.subdomain)
        labels = job.spec["template"]["metadata"]["labels"]
        selected = service is not None and service["selector"].items() <= labels.items()
        if not selected or service is None or service["clusterIP"] != "None" or not service["publishNotReadyAddresses"]:
            return None
        return f"{host}.{job.subdomain}"

    def _address_of(self, name: str) -> str:
        if name not in self._named:
            self._named[name] = self._new_address()
        return self._named[name]

    def _new_address(self) -> str:
        while True:
            ip = f"127.{random.randint(2, 250)}.{random.randint(0, 250)}.{random.randint(1, 250)}"
            if ip not in self._taken:
                self._taken.add(ip)
                return ip

    def _environment(self, job: Job, index: int, container: dict[str, Any], ip: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for source in container.get("envFrom", []):
            found |= self._secrets[source["secretRef"]["name"]]
        for one in container["env"]:
            if "value" in one:
                found[one["name"]] = self._placed(job, self._expanded(one["value"], found))
                continue
            ((kind, where),) = one["valueFrom"].items()
            if kind == "secretKeyRef":
                found[one["name"]] = self._secrets[where["name"]][where["key"]]
            elif kind == "resourceFieldRef":
                assert where["containerName"] == container["name"]
                which, resource = where["resource"].split(".")
                amount = container["resources"][which][resource]
                cores = float(amount[:-1]) / 1000 if amount.endswith("m") else float(amount)
                found[one["name"]] = str(math.ceil(cores))
            else:
                assert kind == "fieldRef"
                known = {"status.podIP": ip, f"metadata.annotations['{INDEX}']": str(index)}
                found[one["name"]] = known[where["fieldPath"]]
        return found

    @staticmethod
    def _expanded(text: str, known: dict[str, str]) -> str:
        """$(NAME) becomes the variable of that name, if there is one before it; $$( becomes $(."""

        def replaced(found: re.Match[str]) -> str:
            return "$(" if found[0] == "$$(" else known.get(found[1], found[0])

        return re.sub(r"\$\$\(|\$\(([A-Za-z0-9_]+)\)", replaced, text)

    def _placed(self, job: Job, text: str) -> str:
        """With addresses for names, and our folder for the volume's."""
        for other in self.jobs.values():
            for i in range(other.spec["completions"]):
                if (name := self._name_of(other, i)) is not None and name in text:
                    text = text.replace(name, self._address_of(name))
        for mount in job.pod["containers"][0].get("volumeMounts", []):
            if mount["name"] == "checkpoints" and text.startswith(mount["mountPath"]):
                text = f"{self._volume}{text.removeprefix(mount['mountPath'])}"
        return text
