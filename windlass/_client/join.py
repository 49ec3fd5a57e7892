"""join(): what `windlass join` does, for a process that an engine has started and that is a Python program already."""

import os
from typing import TYPE_CHECKING, Any

from windlass._errors import InvalidArgument, WindlassError

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster
    from windlass._client.connect import Arrays, OnWorkerLoss
    from windlass._client.remote import Transport
    from windlass._rules.sync import Sync


def join(
    servers: int = 1,
    *,
    app: str | None = None,
    sync: "Sync | str | None" = None,
    on_worker_loss: "OnWorkerLoss | None" = None,
    transport: "Transport | None" = None,
    arrays: "Arrays" = "numpy",
    timeout: float | None = None,
    failure_timeout: float | None = None,
    checkpoint_dir: "str | os.PathLike[str] | None" = None,
    checkpoint_every: str | int | None = None,
    checkpoint_keep: int | None = None,
    resume: bool | str = False,
    threads: int | None = None,
    memory_bytes_max: int | str | None = None,
    allow: str | None = None,
    host: str | None = None,
) -> "Cluster | None":
    """Makes this task of Slurm or Open MPI a member of its job's cluster: a server, or a worker that is connected.

    The first ``servers`` tasks serve until the cluster ends, and get None; the first of them runs the scheduler, too.
    The other tasks are workers and get their cluster, as from ``connect()``. All tasks must call it alike.
    `windlass join` does the same for a command, and starts workers again.

    app, sync, on_worker_loss, transport, arrays, timeout: as in ``connect()``.
    checkpoint_dir, checkpoint_every, checkpoint_keep: where and how often servers take them, as by `windlass run`.
    resume: goes on from the newest good checkpoint (True), or from one by its id or tag. A job that Slurm has started
        again does so by itself.
    failure_timeout, threads, memory_bytes_max, allow: settings of the servers.
    host: where the first task runs, where the engine does not say it.

    What is not given counts as set by WINDLASS_*. On several hosts WINDLASS_TOKEN must be set, the same in all tasks.
    """
    from windlass._client.connect import connect
    from windlass._settings import load
    from windlass.launch.join import serve
    from windlass.launch.joining import Joining
    from windlass.launch.task import find_task

    if os.environ.get("WINDLASS_TASKS"):
        raise InvalidArgument("join: `windlass join` has made this process a worker already: call connect()")
    given: dict[str, Any] = {
        "servers": servers,
        "app": app,
        "sync": None if sync is None else str(sync),
        "on_worker_loss": on_worker_loss,
        "transport": transport,
        "failure_timeout": failure_timeout,
        "checkpoint_dir": None if checkpoint_dir is None else os.fspath(checkpoint_dir),
        "checkpoint_every": checkpoint_every,
        "checkpoint_keep": checkpoint_keep,
        "threads": threads,
        "memory_bytes_max": memory_bytes_max,
        "allow": allow,
    }
    settings = load(given)
    which = "newest" if resume is True else resume or None
    if which is not None and not isinstance(which, str):
        raise InvalidArgument(f"join: resume must be True, or the id or tag of a checkpoint, not {resume!r}")
    joining = Joining(settings, find_task(os.environ, host), requeue=False, resume=which)
    if not joining.is_worker:
        if code := serve(joining):
            raise WindlassError(f"join: the servers of task {joining.task.index} ended with exit code {code}")
        return None
    operator = joining.meet()
    try:
        cluster = connect(
            str(operator.address),
            app=settings.app,
            rank=joining.rank,
            world_size=joining.workers,
            token=joining.token,
            timeout=timeout,
            transport=settings.transport,
            sync=settings.sync,
            on_worker_loss=settings.on_worker_loss,
            arrays=arrays,
            checkpoint_dir=settings.checkpoint_dir,
        )
    except BaseException:
        operator.close()
        raise
    assert cluster._attendance is not None
    cluster._attendance.also_closed.append(operator.close)
    return cluster
