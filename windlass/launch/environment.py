"""What the processes of a run find of its settings in their environment, wherever they are started.

Where they are, and what lets them in, is added by whoever starts them: windlass/launch/run.py on this machine,
windlass/ray on the nodes of a Ray cluster.
"""

import dataclasses
import json
import pathlib

from windlass._settings import Settings

#: Of servers and the scheduler where somebody has set them, wherever they run.
OF_SERVICES = (
    "failure_timeout",
    "start_timeout",
    "threads",
    "memory_bytes_max",
    "staging_bytes_max",
    "allow",
    "function_seconds",
    "checkpoint_every",
    "checkpoint_keep",
    "checkpoint_rate",
    "checkpoint_bytes_max",
)


def of_all(settings: Settings, address: str, cluster: int) -> dict[str, str]:
    """Of every process."""
    return {
        "WINDLASS_ADDRESS": address,
        "WINDLASS_CLUSTER": f"{cluster:016x}",
        "WINDLASS_NO_TOKEN": "0",
        "WINDLASS_TRANSPORT": settings.transport,
        "WINDLASS_ROLE": "worker",  # what each is, its command says; a file may say otherwise, for another day
        "PYTHONUNBUFFERED": "1",
    }


def of_services(settings: Settings) -> dict[str, str]:
    """Of servers and the scheduler."""
    return settings.as_environment((*OF_SERVICES, "arena_bytes_max", "checkpoint_dir"))


def of_scheduler(settings: Settings, resume: str | None) -> dict[str, str]:
    """Of the scheduler alone, which stays until it is told to end."""
    return {
        "WINDLASS_SERVERS": str(settings.servers),
        "WINDLASS_LINGER": "1",
        "WINDLASS_APP": settings.app,
        "WINDLASS_RESUME": resume or "",
        "WINDLASS_RUN_SETTINGS": json.dumps(settings.describe()),
    }


def of_worker(settings: Settings, rank: int) -> dict[str, str]:
    """Of a worker."""
    theirs = {
        "RANK": str(rank),
        "WORLD_SIZE": str(settings.workers),
        "WINDLASS_APP": settings.app,
        "WINDLASS_ON_WORKER_LOSS": settings.on_worker_loss,
    }
    if settings.sync is not None:
        theirs["WINDLASS_SYNC"] = settings.sync
    if settings.checkpoint_dir is not None:
        theirs["WINDLASS_CHECKPOINT_DIR"] = settings.checkpoint_dir
    if settings.sources["start_timeout"] != "default":
        theirs["WINDLASS_START_TIMEOUT"] = str(settings.start_timeout)
    return theirs


def with_whole_paths(settings: Settings) -> Settings:
    """The same, with the folder of checkpoints named so that processes elsewhere find it."""
    if settings.checkpoint_dir is None or "://" in settings.checkpoint_dir:
        return settings
    values = {**settings.values, "checkpoint_dir": str(pathlib.Path(settings.checkpoint_dir).absolute())}
    return dataclasses.replace(settings, values=values)
