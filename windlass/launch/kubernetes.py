"""`windlass kubernetes`: a scheduler, servers and workers as pods of a Kubernetes cluster, as YAML to be applied.

    Secret   the token                         Indexed Jobs   scheduler, server, worker: one pod per index
    Service  headless: names for the pods      or a JobSet    of the same three, which succeeds with its workers

A pod's index is its rank or its server's number, so whoever replaces it is the same worker or server. The scheduler is
reached by its pod's name, which stays; servers tell it their pods' addresses, which do not. Nobody waits for anybody to
be up: members dial until `start_timeout`.

Jobs know nothing of each other. So what ends a cluster early must end every pod of it with an exit code that has it
replaced: the scheduler ends the cluster when a server is lost (`on_server_loss`) and tells all members that it is
unfinished; scheduler and servers end with `unfinished_code`. The pods that replace them meet at a new scheduler, which
goes on from the newest checkpoint of this run (WINDLASS_RESUME_SINCE).
"""

import base64
import dataclasses
import pathlib
import re
import time
from typing import Any

from windlass._errors import InvalidArgument
from windlass._settings import SAVE_SECONDS, Settings
from windlass.launch import WORKERS_LOST
from windlass.launch.environment import OF_SERVICES
from windlass.launch.yaml import to_yaml

SCHEDULER_PORT, SERVER_PORT, MASTER_PORT = 7164, 7165, 29500
GRACE_SECONDS = int(SAVE_SECONDS) + 15  # from SIGTERM to SIGKILL: a last checkpoint, and the goodbyes after it
START_SECONDS = 1800.0  # nodes are waited for, and images are large
UNFINISHED_CODE = 75  # EX_TEMPFAIL
NAME_CHARS_MAX = 40  # with role, indices and what Kubernetes adds, a pod's name is a DNS label of at most 63
_MOUNT = "/checkpoints"
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_CPU = re.compile(r"[0-9]+(\.[0-9]+)?|[0-9]+m")
_MEMORY = re.compile(r"[0-9]+(\.[0-9]+)?([kMGTP]|[KMGTP]i)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
#: A pod that the cluster itself takes away is replaced, and that does not count as a failure.
_DISRUPTED = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
_SERVICE, _WORKER = ("scheduler", "server"), "worker"
Body = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class KubernetesRun:
    """What is asked for, beside the settings that any run has."""

    image: str
    command: list[str]
    name: str | None = None
    namespace: str | None = None
    server_image: str | None = None  #: of servers and scheduler
    gpus: int = 0  #: of each worker
    cpu: str | None = None
    memory: str | None = None
    server_cpu: str = "1"
    server_memory: str = "4Gi"
    jobset: bool = False
    restarts: int = 3  #: of all, when a server is lost
    worker_restarts: int = 3  #: of each worker
    claim: str | None = None  #: a volume for checkpoints that is there
    size: str | None = None  #: of one that is made
    storage_class: str | None = None
    secret: str | None = None  #: one that is there, with the key "token"
    pull_secret: str | None = None
    user: int | None = 1000  #: None: the image's own
    environment: tuple[str, ...] = ()  #: of all pods, NAME=VALUE
    environment_from: tuple[str, ...] = ()  #: Secrets whose keys are variables of all pods
    resume: str | None = None


def print_documents(run: KubernetesRun, settings: Settings, token: bytes, now: float | None = None) -> str:
    """What `kubectl apply -f -` reads. token: for the Secret, if one is made. now: seconds since 1970."""
    made = _Made(run, settings, time.time() if now is None else now)
    about = made.comment()
    return about + "".join(f"---\n{to_yaml(body)}" for body in made.documents(token))


class _Made:
    """The documents of one run."""

    def __init__(self, run: KubernetesRun, settings: Settings, now: float) -> None:
        _check(run, settings)
        self._run = run
        self._settings = settings
        self._now = now
        self._command = ["python", *run.command] if run.command[0].endswith(".py") else run.command
        self._name = run.name or _name_of(self._command)
        self._has_volume = run.claim is not None or run.size is not None
        self._where = settings.checkpoint_dir or (f"{_MOUNT}/{self._name}" if self._has_volume else None)
        self._secret = run.secret or f"{self._name}-token"

    def comment(self) -> str:
        """How to look at it, and how to remove it."""
        name, kinds = self._name, "jobset,secret" if self._run.jobset else "job,service,secret"
        space = f" --namespace {self._run.namespace}" if self._run.namespace else ""
        instance = f"-l app.kubernetes.io/instance={name}"
        scheduler = f"job/{name}-scheduler{'-0' if self._run.jobset else ''}"
        lines = [
            f"windlass run {name!r}: {self._settings.servers} servers, {self._settings.workers} workers.",
            f"output      kubectl logs{space} -f --prefix {instance},app.kubernetes.io/component=worker",
            f"status      kubectl exec{space} {scheduler} -- windlass status",
            f"remove      kubectl delete{space} {kinds} {instance}",
        ]
        if self._run.size is not None:
            lines.append(f"checkpoints kubectl delete{space} pvc {name}-checkpoints   (removes them, too)")
        return "".join(f"# {line}\n" for line in lines)

    def documents(self, token: bytes) -> list[Body]:
        """In the order in which they are to be made."""
        run, found = self._run, []
        if run.secret is None:
            # To apply another token under the same name is refused: pods that are replaced would not get in any more.
            data = {"token": base64.b64encode(token).decode()}
            found.append({**self._head("v1", "Secret", self._secret), "immutable": True, "data": data})
        if run.size is not None:
            claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": run.size}}}
            if run.storage_class is not None:
                claim["storageClassName"] = run.storage_class
            found.append({**self._head("v1", "PersistentVolumeClaim", f"{self._name}-checkpoints"), "spec": claim})
        if run.jobset:
            return [*found, self._jobset()]
        service = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # members find the scheduler before it says that it is ready
            "selector": self._labels(),
            "ports": [{"name": "control", "port": SCHEDULER_PORT}, {"name": "server", "port": SERVER_PORT}],
        }
        found.append({**self._head("v1", "Service", self._name), "spec": service})
        for role in (*_SERVICE, _WORKER):
            job = self._head("batch/v1", "Job", f"{self._name}-{role}", role)
            found.append({**job, "spec": self._job(role)})
        return found

    def _head(self, version: str, kind: str, name: str, role: str | None = None) -> Body:
        metadata: Body = {"name": name}
        if self._run.namespace is not None:
            metadata["namespace"] = self._run.namespace
        return {"apiVersion": version, "kind": kind, "metadata": {**metadata, "labels": self._labels(role)}}

    def _labels(self, role: str | None = None) -> dict[str, str]:
        labels = {"app.kubernetes.io/name": "windlass", "app.kubernetes.io/instance": self._name}
        return labels if role is None else {**labels, "app.kubernetes.io/component": role}

    # -- jobs --------------------------------------------------------------------------------------------------------

    def _count(self, role: str) -> int:
        counts: dict[str, int] = {"server": self._settings.servers, _WORKER: self._settings.workers}
        return counts.get(role, 1)

    def _job(self, role: str) -> Body:
        run, count = self._run, self._count(role)
        spec: Body = {"completionMode": "Indexed", "completions": count, "parallelism": count}
        if run.jobset and role != _WORKER:
            spec["backoffLimit"] = 0  # the JobSet starts all of them again
        else:
            # A worker also fails with every server that is lost; a JobSet then makes all Jobs anew.
            own = run.worker_restarts if role == _WORKER else 0
            spec["backoffLimitPerIndex"] = own + (min(1, run.restarts) if run.jobset else run.restarts)
            if role != _WORKER or self._on_worker_loss == "wait":
                spec["maxFailedIndexes"] = 0  # the others would wait for it in vain
            spec["podFailurePolicy"] = {"rules": [_DISRUPTED, *self._hopeless(role)]}
        return {**spec, "template": {"metadata": {"labels": self._labels(role)}, "spec": self._pod(role)}}

    @staticmethod
    def _hopeless(role: str) -> list[Body]:
        """What to start again would be in vain: nobody came within `start_timeout`, a setting is wrong, all is over."""
        if role == _WORKER:
            return []  # its exit codes are the script's
        in_vain = [1, 2, WORKERS_LOST] if role == "scheduler" else [1, 2]
        codes = {"containerName": role, "operator": "In", "values": in_vain}
        return [{"action": "FailJob", "onExitCodes": codes}]

    def _jobset(self) -> Body:
        """One set, which takes its workers' success for its own and ends the others then."""
        spec = {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": self._name},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [_WORKER]},
            "failurePolicy": {
                "maxRestarts": self._run.restarts,
                "rules": [{"name": "workers", "action": "FailJobSet", "targetReplicatedJobs": [_WORKER]}],
            },
            "replicatedJobs": [
                {"name": role, "replicas": 1, "template": {"spec": self._job(role)}} for role in (*_SERVICE, _WORKER)
            ],
        }
        return {**self._head("jobset.x-k8s.io/v1alpha2", "JobSet", self._name), "spec": spec}

    def _host(self, role: str, index: int) -> str:
        """The name of a pod in its namespace, which its replacement has, too."""
        of_job = f"{self._name}-{role}-0" if self._run.jobset else f"{self._name}-{role}"
        return f"{of_job}-{index}.{self._name}"

    # -- pods --------------------------------------------------------------------------------------------------------

    def _pod(self, role: str) -> Body:
        run = self._run
        pod: Body = {} if run.jobset else {"subdomain": self._name}  # the JobSet sets it
        pod |= {
            "restartPolicy": "Never",  # a failed pod stays with its output, and its index gets another
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "shareProcessNamespace": True,  # nobody is process 1, to whom signals mean something else
            "securityContext": self._security(),
        }
        if run.pull_secret is not None:
            pod["imagePullSecrets"] = [{"name": run.pull_secret}]
        if role == "server":
            pod["topologySpreadConstraints"] = [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": self._labels(role)},
                }
            ]
        volumes: list[Body] = []
        mounts: list[Body] = []
        if self._has_volume:
            claim = {"claimName": run.claim or f"{self._name}-checkpoints"}
            volumes.append({"name": "checkpoints", "persistentVolumeClaim": claim})
            mounts.append({"name": "checkpoints", "mountPath": self._settings.checkpoint_dir or _MOUNT})
        if role == _WORKER:  # 64 MB otherwise, too little for torch's data loaders
            volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
            mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        container: Body = {
            "name": role,
            "image": run.image if role == _WORKER else run.server_image or run.image,
            "command": [_literal(word) for word in self._command] if role == _WORKER else ["windlass", role],
            "env": self._environment(role),
            "resources": self._resources(role),
            "securityContext": self._container_security(),
            **self._probes(role),
        }
        if run.environment_from:
            container["envFrom"] = [{"secretRef": {"name": name}} for name in run.environment_from]
        if mounts:
            container["volumeMounts"] = mounts
        pod["containers"] = [container]
        if volumes:
            pod["volumes"] = volumes
        return pod

    def _security(self) -> Body:
        seccomp = {"seccompProfile": {"type": "RuntimeDefault"}}
        user = self._run.user
        if user is None:
            return seccomp
        return {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user, **seccomp}

    def _container_security(self) -> Body:
        drop = {} if self._run.user is None else {"capabilities": {"drop": ["ALL"]}}
        return {"allowPrivilegeEscalation": False, **drop}

    def _resources(self, role: str) -> Body:
        """Memory is a limit, by which a server knows what it may take. Cores are none, which would only hold it up."""
        run = self._run
        if role == "scheduler":
            return {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
        cpu, memory = (run.cpu, run.memory) if role == _WORKER else (run.server_cpu, run.server_memory)
        requests = {"cpu": cpu, "memory": memory}
        limits = {"memory": memory, "nvidia.com/gpu": run.gpus if role == _WORKER and run.gpus else None}
        found = {"requests": _given(requests), "limits": _given(limits)}
        return {name: values for name, values in found.items() if values}

    def _probes(self, role: str) -> Body:
        if role == _WORKER:
            return {}
        port, name = (SCHEDULER_PORT, "control") if role == "scheduler" else (SERVER_PORT, "server")
        look = {"tcpSocket": {"port": port}} if role == "server" else {"httpGet": {"path": "/healthz", "port": port}}
        return {
            "ports": [{"name": name, "containerPort": port, "protocol": "TCP"}],
            "startupProbe": {**look, "periodSeconds": 2, "failureThreshold": 150},
            "readinessProbe": {**look, "periodSeconds": 10, "timeoutSeconds": 5},
            "livenessProbe": {**look, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        }

    # -- environments ------------------------------------------------------------------------------------------------

    @property
    def _on_worker_loss(self) -> str:
        """Lost workers are replaced here, so they are waited for unless somebody says otherwise."""
        settings = self._settings
        return "wait" if settings.sources["on_worker_loss"] == "default" else str(settings.on_worker_loss)

    def _environment(self, role: str) -> list[Body]:
        ours = self._of_role(role)
        names = {one["name"] for one in ours}
        theirs = [_text(name, value) for name, _, value in (one.partition("=") for one in self._run.environment)]
        for one in theirs:
            if one["name"] in names:
                raise InvalidArgument(f"--env {one['name']}: windlass kubernetes sets this variable itself")
        return ours + theirs

    def _of_role(self, role: str) -> list[Body]:
        settings, run = self._settings, self._run
        found: list[Body] = [
            {"name": "WINDLASS_TOKEN", "valueFrom": {"secretKeyRef": {"name": self._secret, "key": "token"}}},
            _text("WINDLASS_ADDRESS", f"tcp://{self._host('scheduler', 0)}:{SCHEDULER_PORT}"),
            _text("WINDLASS_APP", settings.app),
            *(_text(name, value) for name, value in self._passed_on().items()),
            _text("PYTHONUNBUFFERED", "1"),
        ]
        if run.user is not None:  # the image may not know this user
            found += [_text("HOME", "/tmp"), _text("USER", "windlass")]
        if role == _WORKER:
            return found + self._of_worker()
        port = SCHEDULER_PORT if role == "scheduler" else SERVER_PORT
        found += [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "WINDLASS_LISTEN", "value": f"tcp://$(POD_IP):{port}"},
            _text("WINDLASS_UNFINISHED_CODE", str(UNFINISHED_CODE)),
        ]
        if role == "server":
            found.append({"name": "WINDLASS_NUMBER", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}})
            if settings.threads is None:
                found.append(_cores("WINDLASS_THREADS", role))
            return found
        found += [_text("WINDLASS_SERVERS", str(settings.servers)), _text("WINDLASS_ON_SERVER_LOSS", "end")]
        if self._where is not None:
            found.append(_text("WINDLASS_RESUME_SINCE", str(int(self._now))))
            if run.resume is not None:
                found.append(_text("WINDLASS_RESUME", run.resume))
        return found

    def _passed_on(self) -> dict[str, str]:
        """Settings of the run, to every pod: what does not concern one is ignored there."""
        found = self._settings.as_environment(OF_SERVICES)
        found.setdefault("WINDLASS_START_TIMEOUT", str(START_SECONDS))
        if self._where is not None:
            found["WINDLASS_CHECKPOINT_DIR"] = self._where
        return found

    def _of_worker(self) -> list[Body]:
        settings, run = self._settings, self._run
        found: list[Body] = [
            {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
            _text("WORLD_SIZE", str(settings.workers)),
            _text("LOCAL_RANK", "0"),
            _text("LOCAL_WORLD_SIZE", "1"),
            _text("MASTER_ADDR", self._host(_WORKER, 0)),
            _text("MASTER_PORT", str(MASTER_PORT)),
            _text("WINDLASS_ON_WORKER_LOSS", self._on_worker_loss),
        ]
        if settings.sync is not None:
            found.append(_text("WINDLASS_SYNC", settings.sync))
        if run.cpu is not None:
            found.append(_cores("OMP_NUM_THREADS", _WORKER))
        return found


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _literal(text: str) -> str:
    """Kubernetes expands $(NAME) in commands and values; what the user wrote stays as it is."""
    return text.replace("$(", "$$(")


def _text(name: str, value: str) -> Body:
    return {"name": name, "value": _literal(value)}


def _cores(name: str, container: str) -> Body:
    """The cores that a container has asked for, rounded up."""
    return {"name": name, "valueFrom": {"resourceFieldRef": {"containerName": container, "resource": "requests.cpu"}}}


def _name_of(command: list[str]) -> str:
    """By its script."""
    script = next((word for word in command if word.endswith(".py")), "")
    name = re.sub(r"[^a-z0-9]+", "-", pathlib.Path(script).stem.lower()).lstrip("-0123456789")
    return name[:NAME_CHARS_MAX].strip("-") or "windlass"


# -- checks ----------------------------------------------------------------------------------------------------------


def _check(run: KubernetesRun, settings: Settings) -> None:
    """Raises on what Kubernetes would refuse later, or would accept and never start."""
    if run.name is not None and not (_LABEL.fullmatch(run.name) and len(run.name) <= NAME_CHARS_MAX):
        raise InvalidArgument(
            f"--name {run.name}: expected at most {NAME_CHARS_MAX} of a-z, 0-9 and -, with a letter first and no - last"
        )
    if run.namespace is not None and not _NAMESPACE.fullmatch(run.namespace):
        raise InvalidArgument(f"--namespace {run.namespace}: expected a-z, 0-9 and -, and no - first or last")
    for option, name in (
        ("--secret", run.secret),
        ("--checkpoint-claim", run.claim),
        ("--storage-class", run.storage_class),
        ("--pull-secret", run.pull_secret),
        *(("--env-from", name) for name in run.environment_from),
    ):
        if name is not None and not _SUBDOMAIN.fullmatch(name):
            raise InvalidArgument(f"{option} {name}: expected the name of an object: a-z, 0-9, - and .")
    for option, quantity, form, such in (
        ("--cpu", run.cpu, _CPU, "a number of cores, such as 4 or 500m"),
        ("--server-cpu", run.server_cpu, _CPU, "a number of cores, such as 4 or 500m"),
        ("--memory", run.memory, _MEMORY, "a number of bytes, such as 16Gi"),
        ("--server-memory", run.server_memory, _MEMORY, "a number of bytes, such as 16Gi"),
        ("--checkpoint-size", run.size, _MEMORY, "a number of bytes, such as 100Gi"),
    ):
        if quantity is not None and not (form.fullmatch(quantity) and quantity.strip("0.mkKMGTPi")):
            raise InvalidArgument(f"{option}: expected {such}, not {quantity!r}")
    for image, option in ((run.image, "--image"), (run.server_image, "--server-image")):
        if image is not None and (not image or re.search(r"\s", image)):
            raise InvalidArgument(f"{option}: expected the name of an image, not {image!r}")
    for one in run.environment:
        name, equals, _ = one.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            raise InvalidArgument(f"--env {one}: expected NAME=VALUE")
    _check_volume(run, settings.checkpoint_dir)


def _check_volume(run: KubernetesRun, where: str | None) -> None:
    if run.claim is not None and run.size is not None:
        raise InvalidArgument("--checkpoint-claim is a volume that is there, --checkpoint-size makes one: give one")
    if run.storage_class is not None and run.size is None:
        raise InvalidArgument("--storage-class goes with --checkpoint-size")
    has_volume = run.claim is not None or run.size is not None
    if where is not None and "://" in where and has_volume:
        raise InvalidArgument(
            f"--checkpoint-dir {where} needs no volume: leave --checkpoint-claim or --checkpoint-size"
        )
    if where is not None and "://" not in where:
        if not has_volume:
            raise InvalidArgument(
                f"--checkpoint-dir {where}: pods share no folder; name a volume with --checkpoint-claim, make one with "
                "--checkpoint-size, or give a URL such as s3://bucket/run"
            )
        if not where.startswith("/"):
            raise InvalidArgument(f"--checkpoint-dir {where}: expected the path at which pods mount the volume")
    if where is None and not has_volume and run.resume is not None:
        raise InvalidArgument("--resume: there is no place to look for checkpoints; see --checkpoint-dir")
