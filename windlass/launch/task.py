"""Which of the tasks of an engine this process is, and where the first of them runs: from its environment alone.

    Slurm     srun tells every task of a step its number and the step's nodes; the first task is on the first node
    Open MPI  mpirun tells every rank its number, and where mpirun itself runs, in OMPI_MCA_orte_hnp_uri (version 4) or
              in PMIX_NAMESPACE (version 5): the first rank must run there, too

The mpirun of MPICH and Intel MPI says nothing of hosts: it is refused. --host names the first task's host where the
above does not hold. The same environment gives the same task: pure.
"""

import dataclasses
import hashlib
import random
import re
from collections.abc import Mapping, Sequence

from windlass._errors import InvalidArgument
from windlass.launch.hostlist import expand_counts, expand_hosts, expand_numbers

PORTS = range(20000, 32000)  # below those that a kernel gives to connections
PORTS_TRIED = 8  # by the scheduler, where the engine has reserved none
LOOKED_FOR = "SLURM_STEP_NUM_TASKS (srun) and OMPI_COMM_WORLD_SIZE (Open MPI's mpirun)"
_HNP = re.compile(r"tcp6?://([^;]+):[0-9]+")
_PRRTE = re.compile(r"(?:prterun|prte|orterun|mpirun)[-.](.+)-[0-9]+(?:@[0-9]+)?")


@dataclasses.dataclass(frozen=True)
class Task:
    """One process of several that an engine has started with the same command."""

    engine: str  #: for people
    index: int
    count: int
    run: str  #: the same for all tasks of this start, and for no others
    hosts: tuple[str, ...]  #: where the first task may be reached, the best first; empty: all tasks are on this host
    local: tuple[int, ...]  #: the tasks on this host
    several_hosts: bool = False
    own_host: str | None = None  #: this host, as the engine names it
    ports: tuple[int, ...] = ()  #: where the scheduler may listen, in this order
    master_port: int = 0  #: for torch.distributed of the workers
    restarts: int = 0  #: how often the engine has started this job again
    job: str | None = None  #: of Slurm, whom to ask to start it again
    nodes: tuple[str, ...] = ()  #: of the step
    tasks_per_node: tuple[int, ...] = ()
    distribution: str = ""

    @property
    def cluster(self) -> int:
        """The number of its cluster: a scheduler of another one refuses us."""
        return int.from_bytes(hashlib.sha256(f"windlass join {self.run}".encode()).digest()[:8], "little") or 1

    def check_workers(self, servers: int) -> None:
        """Raises unless a task is left to be a worker."""
        if self.count <= servers:
            needed = "1 is a server" if servers == 1 else f"{servers} are servers"
            raise InvalidArgument(
                f"windlass join: {self.engine} started {self.count} task{'s' if self.count > 1 else ''}; with "
                f"--servers {servers} at least {servers + 1} are needed: {needed}, the first of them the scheduler as "
                "well, and the rest are workers"
            )

    def host_of(self, index: int) -> str | None:
        """The host of another task, if that is known."""
        if not self.several_hosts:
            return "127.0.0.1"
        if index in self.local:
            return self.own_host
        if len(self.tasks_per_node) != len(self.nodes) or sum(self.tasks_per_node) != self.count:
            return None
        if self.distribution.partition(":")[0] == "block":
            for node, tasks in zip(self.nodes, self.tasks_per_node, strict=True):
                if index < tasks:
                    return node
                index -= tasks
        if self.distribution.partition(":")[0] == "cyclic" and len(set(self.tasks_per_node)) == 1:
            return self.nodes[index % len(self.nodes)]
        return None


def ports_of(run: str) -> tuple[int, ...]:
    """Of a run: the same for all of its tasks, others for other runs."""
    return tuple(random.Random(f"windlass {run}").sample(PORTS, PORTS_TRIED + 1))


def find_task(environ: Mapping[str, str], host: str | None = None) -> Task:
    """Raises InvalidArgument that says what is missing. host: where the first task runs, if not as the engine says."""
    if environ.get("OMPI_COMM_WORLD_SIZE"):  # before Slurm: mpirun starts its daemons by srun, whose variables we see
        return _open_mpi(environ, host)
    if environ.get("SLURM_STEP_NUM_TASKS"):
        return _slurm(environ, host)
    if environ.get("PMI_SIZE"):
        raise InvalidArgument(
            f"windlass join: the mpirun of MPICH or Intel MPI started this process (PMI_SIZE={environ['PMI_SIZE']}); "
            "it does not tell ranks on which host the first of them is: use srun or Open MPI's mpirun, or start "
            "`windlass scheduler` and `windlass server` yourself and run the script with WINDLASS_ADDRESS"
        )
    if environ.get("SLURM_JOB_ID"):
        raise InvalidArgument(
            f"windlass join: this is the batch script of Slurm's job {environ['SLURM_JOB_ID']}, not a task of a step: "
            "write `srun --kill-on-bad-exit=0 windlass join ...`"
        )
    raise InvalidArgument(
        "windlass join: no engine has started this process; looked for "
        f"{LOOKED_FOR} in the environment. On one machine, `windlass run` starts a cluster by itself"
    )


def _slurm(environ: Mapping[str, str], host: str | None) -> Task:
    what = "srun"
    count, index = _number(environ, "SLURM_STEP_NUM_TASKS", what), _number(environ, "SLURM_PROCID", what)
    nodes = tuple(expand_hosts(_text(environ, "SLURM_STEP_NODELIST", what)))
    restarts = int(environ.get("SLURM_RESTART_COUNT") or 0)
    job, step = _text(environ, "SLURM_JOB_ID", what), _text(environ, "SLURM_STEP_ID", what)
    run = f"slurm {environ.get('SLURM_CLUSTER_NAME', '')} {job}.{step} {restarts}"
    several = len(nodes) > 1
    local = environ.get("SLURM_GTIDS")
    reserved = environ.get("SLURM_STEP_RESV_PORTS")
    held = expand_numbers(reserved, "SLURM_STEP_RESV_PORTS") if reserved else []
    *free, last = ports_of(run)
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE")
    return Task(
        engine="Slurm",
        index=index,
        count=count,
        run=run,
        hosts=_named(host, nodes[:1] if several else ()),
        local=tuple(expand_numbers(local, "SLURM_GTIDS") if local else ([index] if several else range(count))),
        several_hosts=several,
        own_host=environ.get("SLURMD_NODENAME"),
        ports=(*held[:1], *free),  # for steps alone are they reserved: another process may have one
        master_port=held[-1] if len(held) > 1 else last,
        restarts=restarts,
        job=job,
        nodes=nodes,
        tasks_per_node=tuple(expand_counts(counts, "SLURM_STEP_TASKS_PER_NODE") if counts else ()),
        distribution=environ.get("SLURM_DISTRIBUTION") or "block",
    )


def _open_mpi(environ: Mapping[str, str], host: str | None) -> Task:
    what = "Open MPI's mpirun"
    count, index = _number(environ, "OMPI_COMM_WORLD_SIZE", what), _number(environ, "OMPI_COMM_WORLD_RANK", what)
    here = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", what)
    first = index - _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", what)
    several = here < count
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    hosts: Sequence[str] = ()
    if several and host is None:
        if uri_hosts := _HNP.findall(uri):
            hosts = uri_hosts[0].split(",")
        elif match := _PRRTE.fullmatch(environ.get("PMIX_NAMESPACE", "")):
            hosts = [match[1]]
        else:
            raise InvalidArgument(
                f"windlass join: {what} started {count} ranks on several hosts, and says neither in "
                "OMPI_MCA_orte_hnp_uri nor in PMIX_NAMESPACE where it runs: name the first rank's host with --host"
            )
    run = f"open mpi {environ.get('PMIX_NAMESPACE') or environ.get('OMPI_MCA_ess_base_jobid', '')} {uri}"
    *free, last = ports_of(run)
    return Task(
        engine="Open MPI",
        index=index,
        count=count,
        run=run,
        hosts=_named(host, hosts),
        local=tuple(range(max(0, first), min(count, max(0, first) + here))),
        several_hosts=several,
        ports=tuple(free),
        master_port=last,
        restarts=int(environ.get("SLURM_RESTART_COUNT") or 0),
        job=environ.get("SLURM_JOB_ID"),
    )


def _named(host: str | None, found: Sequence[str]) -> tuple[str, ...]:
    return tuple(found) if host is None else (host,)


def _text(environ: Mapping[str, str], name: str, what: str) -> str:
    if not (value := environ.get(name)):
        raise InvalidArgument(f"windlass join: {what} has not set {name}, which tells a task of the others")
    return value


def _number(environ: Mapping[str, str], name: str, what: str) -> int:
    value = _text(environ, name, what)
    if not value.isascii() or not value.isdecimal():
        raise InvalidArgument(f"windlass join: {name}={value}: expected a whole number")
    return int(value)
