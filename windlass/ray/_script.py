"""`windlass run --on ray`: the same command, with its processes on the nodes of a Ray cluster.

The working directory is copied to the nodes, and the script is started there. Inside a job of `ray job submit` the
job's own directory is used, which Ray has copied already.
"""

import json
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from windlass._errors import InvalidArgument
from windlass._extras import need
from windlass._settings import Settings
from windlass.launch import environment
from windlass.launch.failures import say
from windlass.launch.output import show
from windlass.ray._interrupts import Interrupts
from windlass.ray._job import Job
from windlass.ray._life import Life
from windlass.ray._room import checked
from windlass.ray._run import init, live, token_for

_WHO = "windlass run --on ray"
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # what a submitted job finds of itself


def run_script(
    settings: Settings,
    command: list[str],
    *,
    name: str | None = None,
    resources_per_server: Mapping[str, float] | None = None,
    resources_per_worker: Mapping[str, float] | None = None,
    strategy: str = "SPREAD",
    dry_run: bool = False,
    verbose: bool = False,
    resume: str | None = None,
    restarts: int = 0,
) -> int:
    """The exit code, as that of `windlass run`."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # read when ray is imported: lines that differ in numbers would go
    script, settings = within(command[0]), environment.with_whole_paths(settings)
    job = Job(
        _WHO,
        settings,
        token_for(settings),
        checked(resources_per_server, f"{_WHO}: --resources-per-server"),
        checked(resources_per_worker, f"{_WHO}: --resources-per-worker"),
        strategy,
        script.stem if name is None else name,
        resume,
        say,
        restarts,
        script=[str(script), *command[1:]],
        near=str(script.parent),
        log_dir=None if settings.log_dir is None else settings.log_dir.absolute(),
        verbose=verbose,
    )
    if dry_run:
        show_plan(job)
        return 0
    ray = need("ray", _WHO)
    init(ray, _WHO, runtime_env=runtime_env(os.environ), logging_level="WARNING")
    nodes = sum(node["Alive"] for node in ray.nodes())
    where = ray.get_runtime_context().gcs_address
    show(f"windlass run: {job.name!r} on Ray at {where}, {nodes} node{'' if nodes == 1 else 's'}", sys.stderr)
    interrupts = Interrupts()
    try:
        with interrupts.caught():
            life = live(ray, job, interrupts=interrupts, display=display_of(settings))
    except KeyboardInterrupt:
        life = None
    finally:
        ray.shutdown()  # after what is still printed there
    if interrupts.first is not None:
        say(f"ended by {interrupts.first.name}")
        return 128 + interrupts.first
    assert life is not None
    return life.exit_code()


def within(script: str) -> pathlib.Path:
    """A script's path in the working directory."""
    here, path = pathlib.Path.cwd().resolve(), pathlib.Path(script)
    if not path.is_file():
        raise InvalidArgument(f"windlass run: there is no script {script!r}")
    if not path.resolve().is_relative_to(here):
        raise InvalidArgument(
            f"{_WHO}: {path.resolve()} is not below {here}, which is copied to the nodes: start it from its folder"
        )
    return path.resolve().relative_to(here)


def runtime_env(environ: Mapping[str, str]) -> dict[str, Any]:
    """What Ray is to give the nodes: the working directory, unless the job that we are in has one."""
    job = json.loads(environ.get(_JOB) or "{}")
    return {} if (job.get("runtime_env") or {}).get("working_dir") else {"working_dir": "."}


def display_of(settings: Settings) -> "Callable[[Life], Any] | None":
    """What shows progress, if that was asked for."""
    if settings.progress == "off" or (settings.progress == "auto" and not sys.stdout.isatty()):
        return None
    from windlass.observe.display import Display

    return lambda life: Display(life.fetch)


def read_resources(text: str | None, option: str) -> dict[str, float] | None:
    """``CPU=4,GPU=1`` as amounts by name."""
    if text is None:
        return None
    found: dict[str, float] = {}
    for part in text.split(","):
        resource, equals, amount = part.partition("=")
        try:
            found[resource.strip()] = float(amount)
        except ValueError:
            equals = ""
        if not equals or not resource.strip():
            raise InvalidArgument(f"{option}: expected amounts such as CPU=4,GPU=1, not {text!r}")
    return found


def show_plan(job: Job) -> None:
    """What would be started, without Ray."""
    print(f"scheduler   beside server 0, takes nothing; {job.strategy}")
    for i in range(job.settings.servers):
        print(f"server {i:>3}  {said(job.of_server)}")
    for rank in range(job.workers):
        print(f"worker {rank:>3}  {said(job.of_worker)}: {' '.join(job.script or [])}")


def said(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={amount:g}" for name, amount in amounts.items())
