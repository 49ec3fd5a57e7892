"""connect(): checks what a process was told of its cluster, and makes the cluster."""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

from windlass import _core
from windlass._cgroup import default_memory_bytes_max, usable_cores
from windlass._client.cluster import Cluster
from windlass._client.near import Near, SaveTerms
from windlass._client.remote import Remote, Transport
from windlass._errors import InvalidArgument
from windlass._net.address import Address
from windlass._net.token import check_token
from windlass._objects.arrays import is_whole
from windlass._rules.sync import ASP, OVERDUE_SECONDS, Sync, parse_sync
from windlass._settings import Settings, every, token_of
from windlass._settings import load as load_settings

_THREADS_MAX = 256
_CALL_SECONDS = 60.0
#: What launchers that know nothing of us tell each of the processes that they start: how many there are.
_OTHER_WORLDS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
OnWorkerLoss = Literal["continue", "wait"]
Arrays = Literal["numpy", "torch"]


def connect(
    address: str | None = None,
    *,
    servers: Sequence[str] | None = None,
    app: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    reader: bool = False,
    token: str | bytes | None = None,
    run: str | None = None,
    timeout: float | None = None,
    failure_timeout: float | None = None,
    checksums: bool | None = None,
    transport: Transport | None = None,
    sync: Sync | str | None = None,
    on_worker_loss: OnWorkerLoss | None = None,
    arrays: Arrays = "numpy",
    threads: int | None = None,
    memory_bytes_max: int | None = None,
    checkpoint_dir: "str | os.PathLike[str] | None" = None,
    resume: bool | str = False,
) -> Cluster:
    """Connects to a cluster, or starts a server inside this process.

    timeout: seconds that calls may take unless they say otherwise, and how long to wait for all members to come
        (default: 60 for calls, and WINDLASS_START_TIMEOUT, else 60, for the members).

    With ``address``, or WINDLASS_ADDRESS as ``windlass run`` sets it, the scheduler there says where servers are. With
    ``servers=["tcp://host:port", ...]``, as ``windlass server`` prints them, there is no scheduler: every client gives
    the same list in the same order.

    app: the group of workers that trains together; names of tensors and tables are the app's own (default:
        WINDLASS_APP, else "default").
    rank, world_size: this worker's number and how many there are (default: RANK and WORLD_SIZE, else 0 of 1).
    reader: a client that changes nothing and that nobody waits for, for evaluation or publishing.
    token: the secret that lets a process in (default: WINDLASS_TOKEN, or the file WINDLASS_TOKEN_FILE, or the token
        that this user's processes share on this host).
    run: the name of a `windlass run` of this user on this machine, instead of its address and token; `windlass status`
        lists them.
    failure_timeout: seconds after which a server that cannot be reached is given up (default:
        WINDLASS_FAILURE_TIMEOUT, else 10). Where there is a scheduler, its own counts for all.
    checksums: whether numbers carry checksums (default: on TCP, but not on Unix sockets).
    transport: "auto" shares memory with servers on this host instead of sending numbers; "arena" is an error if that is
        not possible; "socket" sends everything (default: WINDLASS_TRANSPORT, else "auto").
    sync: the policy of the app's objects, such as BSP(), SSP(3) or "ssp:3" (default: WINDLASS_SYNC, else ASP(),
        and BSP() for optimizers).
    on_worker_loss: whether the others "continue" without a worker that is lost, or "wait" for a replacement; the same
        for all workers of an app (default: WINDLASS_ON_WORKER_LOSS, else "continue").
    arrays: "torch" for torch's wherever this cluster makes new arrays; otherwise torch comes out only where it goes in.

    checkpoint_dir: where checkpoints are kept, a folder or any URL that fsspec knows (default:
        WINDLASS_CHECKPOINT_DIR). Where there is a scheduler, ``load()`` looks there; servers write to their own.

    Without servers, the one inside this process has more settings.

    threads: how many work on one large request at once (default: the cores that this process may use).
    memory_bytes_max: what tensors and tables may take on the server (default: 80 % of the memory of the machine or
        its cgroup).
    resume: goes on from the newest good checkpoint (True), or from one by its id or tag (default: as WINDLASS_RESUME
        says, "newest" or which one; else not). WINDLASS_CHECKPOINT_EVERY, _KEEP and _RATE count, too.

    Every call makes its own engine; ``cluster.worker(rank, world_size)`` gives further workers on the same one.
    """
    if timeout is not None and not timeout >= 0:
        raise InvalidArgument(f"connect: timeout must be at least 0 seconds, not {timeout}")
    if complaint := _core.isa_complaint():
        raise InvalidArgument(complaint)
    if transport not in (None, "auto", "arena", "socket"):
        raise InvalidArgument(f'connect: transport must be "auto", "arena" or "socket", not {transport!r}')
    if on_worker_loss not in (None, "continue", "wait"):
        raise InvalidArgument(f'connect: on_worker_loss must be "continue" or "wait", not {on_worker_loss!r}')
    if arrays not in ("numpy", "torch"):
        raise InvalidArgument(f'connect: arrays must be "numpy" or "torch", not {arrays!r}')
    if arrays == "torch":
        _import_torch()
    if run is not None:
        if address is not None or servers is not None:
            raise InvalidArgument(f"connect: either run={run!r}, or an address, or servers")
        from windlass.launch import rundir

        found = rundir.named(run)
        address, token = found.address, found.token() if token is None else token
    where = None if checkpoint_dir is None else os.fspath(checkpoint_dir)
    settings = load_settings(
        {
            "address": address,
            "app": app,
            "transport": transport,
            "on_worker_loss": on_worker_loss,
            "checkpoint_dir": where,
        }
    )
    start_seconds = settings.start_timeout if timeout is None else timeout
    timeout = _CALL_SECONDS if timeout is None else timeout
    given = settings.sync if sync is None else sync
    policy = None if given is None else parse_sync(given, ASP(), "connect: sync")
    if servers is None and settings.role != "worker":
        become_role(settings.role)
    if servers is None and settings.address is not None:
        if threads is not None or memory_bytes_max is not None:
            raise InvalidArgument("connect: threads and memory_bytes_max are settings of the servers here")
        if resume:
            raise InvalidArgument("connect: where there is a scheduler, it goes on from a checkpoint: --resume")
        from windlass._client.scheduler_client import Scheduled, join
        from windlass._net.tls import client_tls

        if rank is None and world_size is None and not reader:
            rank, world_size = _from_environment("RANK", None), _from_environment("WORLD_SIZE", 1)
        scheduled = Scheduled(
            _scheduler_address(settings.address),
            settings.app,
            _secret_of(token, settings),
            checksums,
            settings.transport,
            reader,
            int(os.environ.get("WINDLASS_CLUSTER") or "0", 16),
            client_tls(settings.tls_ca),
            policy,
            settings.on_worker_loss,
        )
        world = 1 if world_size is None else world_size
        return _with(arrays, join(scheduled, rank, world, timeout, start_seconds=start_seconds), settings)
    if address is not None:
        raise InvalidArgument("connect: either address, of a scheduler, or servers")
    if reader and servers is None:
        raise InvalidArgument(
            "connect: a reader needs a cluster: its address, the name of its run, or servers=[...]; inside a process "
            "cluster.reader() reads what the others made"
        )
    if on_worker_loss is not None:
        raise InvalidArgument("connect: on_worker_loss needs the address of a scheduler, who knows of losses")
    if servers is not None:
        if threads is not None or memory_bytes_max is not None:
            raise InvalidArgument("connect: threads and memory_bytes_max are settings of `windlass server` here")
        if resume:
            raise InvalidArgument("connect: servers=[...] have no scheduler, who could go on from a checkpoint")
        if rank is None and world_size is None and not reader:
            rank, world_size = _from_environment("RANK", 0), _from_environment("WORLD_SIZE", 1)
        remote = Remote.of(
            servers,
            settings.app,
            _secret_of(token, settings),
            settings.failure_timeout if failure_timeout is None else failure_timeout,
            checksums,
            settings.transport,
            policy,
        )
        if reader:
            return _with(arrays, remote.cluster(0, 0, timeout), settings)
        if world_size == 0:
            raise InvalidArgument(f"connect: rank {rank!r} is not in a world of 0")
        return _with(arrays, remote.cluster(rank or 0, 1 if world_size is None else world_size, timeout), settings)
    if (rank, world_size, token, checksums, transport, app) != (None,) * 6:
        raise InvalidArgument(
            "connect: app, rank, world_size, token, checksums and transport go with an address or servers=[...]"
        )
    if told := world_told(os.environ):
        name, count = told
        advice = "start the script with `windlass run`"
        if name != "WORLD_SIZE":
            advice += ", or `windlass join -- python SCRIPT` behind srun or mpirun, or set WORLD_SIZE=1 to mean it"
        raise InvalidArgument(
            f"{name}={count} without a cluster's address would be {count} trainings that know nothing of each other; "
            f"{advice}"
        )
    threads = usable_cores() if threads is None else threads
    if not is_whole(threads) or not 1 <= threads <= _THREADS_MAX:
        raise InvalidArgument(f"connect: threads must be between 1 and {_THREADS_MAX}, not {threads}")
    if memory_bytes_max is not None and not (is_whole(memory_bytes_max) and 0 <= memory_bytes_max < 2**64):
        raise InvalidArgument(f"connect: memory_bytes_max must be a whole number of bytes, not {memory_bytes_max!r}")
    engine = _core.Engine(threads, default_memory_bytes_max() if memory_bytes_max is None else memory_bytes_max)
    engine.set_overdue(OVERDUE_SECONDS)
    near = Near(_save_terms(settings))
    which = resume or os.environ.get("WINDLASS_RESUME")
    if which:
        if near.terms.where is None:
            raise InvalidArgument(
                "connect: there is no place to look for checkpoints; give checkpoint_dir= (WINDLASS_CHECKPOINT_DIR)"
            )
        near.saves(engine).resume_from(near.terms.where, None if which in (True, "newest") else str(which))
    cluster = Cluster(engine, _core.Session(engine, 0, 1), None, timeout, near=near, sync=policy)
    if near.terms.where is not None:
        from windlass._client.hold import watch

        watch(cluster)
    return _with(arrays, cluster, settings)


def _save_terms(settings: Settings) -> SaveTerms:
    """For the servers inside this process."""
    seconds, iterations = (None, None) if settings.checkpoint_every is None else every(settings.checkpoint_every)
    return SaveTerms(
        settings.checkpoint_dir,
        settings.app,
        settings.checkpoint_keep,
        settings.checkpoint_rate,
        seconds,
        iterations,
    )


def world_told(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The variable that says that this process is one of several, and how many; None: it is alone.

    WORLD_SIZE=1 is somebody's word that it is meant to be.
    """
    if world := environ.get("WORLD_SIZE"):
        return None if world == "1" else ("WORLD_SIZE", world)
    told = ((name, environ.get(name)) for name in _OTHER_WORLDS)
    return next(((name, world) for name, world in told if world and world != "1"), None)


def _with(arrays: Arrays, cluster: Cluster, settings: Settings) -> Cluster:
    cluster._torch = arrays == "torch"
    cluster._near.terms.where = settings.checkpoint_dir
    return cluster


def _import_torch() -> None:
    try:
        importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise ImportError("connect: arrays=\"torch\" needs torch: pip install 'windlass[torch]'") from error


def _secret_of(token: str | bytes | None, settings: Settings) -> bytes:
    """The token that connect() was given, checked, or the process's own; empty where there is none."""
    if token is None:
        return token_of(settings) or b""
    if not isinstance(token, (str, bytes)):
        raise InvalidArgument(f"connect: token must be a string or bytes, not {type(token).__name__}")
    return check_token(token.encode() if isinstance(token, str) else token, "connect: token")


def _scheduler_address(text: str) -> Address:
    address = Address.parse(text)
    if address.kind != "tcp":
        raise InvalidArgument(f"connect: a scheduler is at tcp://HOST:PORT, not {text!r}")
    return address


def become_role(role: str) -> NoReturn:
    """Turns the process into a server or the scheduler, and exits with it: one script for every role."""
    from windlass.launch.roles import run_role

    sys.exit(run_role(role))


def _from_environment(name: str, default: Any) -> Any:
    text = os.environ.get(name)
    if not text:
        return default
    if not text.isdecimal():
        raise InvalidArgument(f"{name}={text} is not a whole number")
    return int(text)
