"""How a task of Slurm or MPI finds the others of its cluster, and what its processes are told.

    task 0           the scheduler and server 0
    tasks 1 to S-1   servers
    the others       workers

Nothing is shared but the token. All tasks derive from what the engine tells them where the scheduler is: the host of
task 0, and a port that the engine has reserved or one of a short list. Whoever answers there without knowing the token,
or as the scheduler of another run, is passed by.

Each task stays connected to the scheduler, as an operator, for as long as it lives. So the scheduler knows when no
worker can come any more, even if scripts end without having come, or come twice; and a task that gives up can say so.
"""

import os
import pathlib
import socket
import time
from collections.abc import Callable, Sequence

from windlass._errors import AccessDenied, Closed, InvalidArgument, ProtocolError, ServerLost, Timeout
from windlass._net.address import Address, is_here
from windlass._net.address import listen as listen_on
from windlass._net.tls import client_tls
from windlass._settings import Settings, given_token, token_of, with_memory_cap
from windlass.control import messages as m
from windlass.control.member import here, new_incarnation
from windlass.launch import environment
from windlass.launch.hosts import address_of, address_towards
from windlass.launch.run import newest_checkpoint
from windlass.launch.task import Task
from windlass.observe.operator import Operator

UNFINISHED = 75  #: the exit code of a scheduler where it helps to start the job again
_BACKLOG = 1024
_ATTEMPT_SECONDS = 2.0  # to reach the scheduler at one of its possible ports
_PAUSE_SECONDS = (0.05, 0.5)


class Joining:
    """What this task is, and how it reaches the others."""

    def __init__(self, settings: Settings, task: Task, *, requeue: bool, resume: str | None) -> None:
        task.check_workers(settings.servers)
        if requeue and task.job is None:
            raise InvalidArgument("--requeue: there is no SLURM_JOB_ID; only Slurm can start this job again")
        if requeue and settings.checkpoint_dir is None:
            raise InvalidArgument(
                "--requeue: there is no place for checkpoints to go on from; name it with --checkpoint-dir"
            )
        if resume is not None and settings.checkpoint_dir is None:
            raise InvalidArgument(
                "--resume: there is no place to look for checkpoints; name it with --checkpoint-dir DIR"
            )
        if task.several_hosts and given_token(settings) is None:
            how = " and mpirun -x WINDLASS_TOKEN" if task.engine == "Open MPI" else ""
            raise InvalidArgument(
                f"windlass join: {task.engine} started tasks on several hosts, which need a token in common: `export "
                f"WINDLASS_TOKEN=$(openssl rand -hex 32)`{how} before the command, or --token-file"
            )
        self.settings = settings
        self.task = task
        self.token = token_of(settings) or b""
        self.requeues = requeue
        self.resume = resume
        self.workers = task.count - settings.servers
        self.rank = task.index - settings.servers  #: of a worker

    @property
    def is_worker(self) -> bool:
        """Whether this task is none of the servers."""
        return self.task.index >= int(self.settings.servers)

    # -- where -------------------------------------------------------------------------------------------------------

    def own_address(self, scheduler: Address | None) -> str:
        """Of this host, for a server to bind. scheduler: where it is, unless this is the first task."""
        task = self.task
        if not task.several_hosts:
            return "127.0.0.1"
        if scheduler is None:
            return self._first_address()
        found = None if task.own_host is None else address_of(task.own_host, beyond=True)
        found = found or address_towards(str(address_of(scheduler.host, beyond=True)))
        if found is None:
            raise InvalidArgument(f"windlass join: task {task.index} cannot find out at which address others reach it")
        return found

    def _first_address(self) -> str:
        """Of the host of the first task, which this is: as others resolve it, or by the way to them."""
        task = self.task
        if task.own_host is not None and task.hosts == task.nodes[:1] != (task.own_host,):
            raise InvalidArgument(
                f"windlass join: the first task is on {task.own_host}, and others look for it on {task.nodes[0]}, the "
                "first of SLURM_STEP_NODELIST: name the host with --host"
            )
        for host in task.hosts:
            if (found := address_of(host, beyond=True)) is not None and is_here(Address("tcp", found)):
                return found
        for other in task.nodes[1:]:
            if (there := address_of(other, beyond=True)) and (found := address_towards(there)):
                return found
        names = ", ".join(task.hosts)
        raise InvalidArgument(
            f"windlass join: the first task is on {socket.gethostname()}, and others look for it on {names}, which is "
            "not an address of that host: name the first task's host with --host"
        )

    def places(self) -> list[Address]:
        """Where the scheduler may be, for the other tasks."""
        hosts = ["127.0.0.1"]
        if self.task.several_hosts:
            hosts = [found for host in self.task.hosts if (found := address_of(host, beyond=True)) is not None]
        if not hosts:
            raise InvalidArgument(
                f"windlass join: the name of the first task's host, {', '.join(self.task.hosts)}, leads to no address "
                "here: name it with --host"
            )
        return [Address("tcp", host, port) for host in hosts[:1] for port in self.task.ports]

    def listen(self) -> socket.socket:
        """The scheduler's socket, in the first task."""
        host, failures = self.own_address(None), []
        for port in self.task.ports:
            try:
                return listen_on(Address("tcp", host, port), _BACKLOG)
            except InvalidArgument as error:
                failures.append(str(error))
        raise InvalidArgument(f"windlass join: no port for the scheduler: {'; '.join(failures)}")

    def meet(self, given_up: Callable[[], bool] = lambda: False) -> Operator:
        """A connection to the scheduler, once it is there. Raises what it refuses with, and Closed if asked to."""
        places, deadline = self.places(), time.monotonic() + self.settings.start_timeout
        join = m.Join(
            "operator",
            new_incarnation(),
            rank=self.rank if self.is_worker else None,
            cluster=self.task.cluster,
            tasks=self.workers,
            **here(),
        )
        tls, pause, others = client_tls(self.settings.tls_ca), _PAUSE_SECONDS[0], dict[Address, str]()
        while True:
            for place in places:
                try:
                    return Operator(place, self.token, _ATTEMPT_SECONDS, tls, join=join, once=True)
                except (AccessDenied, ProtocolError) as error:
                    others[place] = str(error)  # somebody else's, or ours is yet to come
                except (ServerLost, Timeout):
                    pass
            if given_up():
                raise Closed("windlass join: ended before the scheduler was there")
            if time.monotonic() + pause > deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECONDS[1])
        ports = ", ".join(str(place.port) for place in places)
        strangers = "".join(f"; {text}" for text in others.values())
        raise Timeout(
            f"windlass join: task {self.task.index} of {self.task.count} found no scheduler of this run on "
            f"{places[0].host}, ports {ports}, within {self.settings.start_timeout:g} s{strangers}"
        )

    # -- with what ---------------------------------------------------------------------------------------------------

    def _environment(self, address: str) -> dict[str, str]:
        """For all processes of this task."""
        settings = self.settings
        given = (name for name, source in settings.sources.items() if source == "flag" and name != "servers")
        told = settings.as_environment(given) | environment.of_all(settings, address, self.task.cluster)
        told["WINDLASS_NO_TOKEN"] = str(settings.no_token)
        if settings.sources["token_file"] == "flag":
            told["WINDLASS_TOKEN"] = ""
        if settings.config is not None:
            told["WINDLASS_CONFIG"] = str(settings.config.resolve())
        return told | {"WINDLASS_TASKS": str(self.workers), "WINDLASS_ADVERTISE": "", "WINDLASS_RESUME": ""}

    def scheduler_environment(self, address: str) -> dict[str, str]:
        """Of the process that is the scheduler."""
        settings = self.settings
        resume = self.resume
        if resume is None and self.task.restarts and settings.checkpoint_dir is not None:
            resume = newest_checkpoint(settings)
        told = self._environment(address) | environment.of_scheduler(settings, resume)
        told["WINDLASS_LINGER"] = str(settings.linger)
        if self.requeues:  # what a lost server held is in the last checkpoint
            told |= {"WINDLASS_ON_SERVER_LOSS": "end", "WINDLASS_UNFINISHED_CODE": str(UNFINISHED)}
        return told

    def server_environment(self, address: Address, command: Sequence[str]) -> dict[str, str]:
        """Of the process that is this task's server."""
        settings, task = self.settings, self.task
        beside = sum(index < settings.servers for index in task.local)
        settings = with_memory_cap(settings, max(1, beside))
        told = self._environment(str(address)) | {
            "WINDLASS_NUMBER": str(task.index),
            "WINDLASS_LISTEN": str(Address("tcp", self.own_address(None if task.index == 0 else address))),
            "WINDLASS_MEMORY_BYTES_MAX": str(settings.memory_bytes_max),
            "WINDLASS_LINGER": str(settings.linger),
        }
        if settings.allow:  # modules beside the script are found, as the script finds them
            script = next((part for part in command if part.endswith(".py")), None)
            paths = [
                None if script is None else str(pathlib.Path(script).parent.resolve()),
                os.environ.get("PYTHONPATH"),
            ]
            told["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return told

    def worker_environment(self, address: Address, *, on_worker_loss: str) -> dict[str, str]:
        """Of the script."""
        task, settings = self.task, self.settings
        local = [index for index in task.local if index >= settings.servers]
        told = self._environment(str(address)) | environment.of_worker(settings, self.rank)
        told |= {
            "WORLD_SIZE": str(self.workers),
            "LOCAL_RANK": str(local.index(task.index) if task.index in local else 0),
            "LOCAL_WORLD_SIZE": str(max(1, len(local))),
            "MASTER_PORT": str(task.master_port),
            "WINDLASS_ON_WORKER_LOSS": on_worker_loss,
        }
        if (master := task.host_of(settings.servers)) is not None:
            told["MASTER_ADDR"] = address_of(master, beyond=task.several_hosts) or master
        return told | {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ}
