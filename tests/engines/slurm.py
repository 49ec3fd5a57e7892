"""Slurm on one host: a controller, three nodes and munge, all below one folder, on ports of their own."""

import contextlib
import os
import pathlib
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator

from helpers import PATIENCE_S

NODES = 3
_COMMANDS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "scancel", "munged")

CONF = """
ClusterName=windlass{id}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=100000
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MpiParams=ports={first}-{last}
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=30
InactiveLimit=0
MessageTimeout=60
NodeName=n1 NodeHostname={host} NodeAddr=127.0.1.1 Port={ports[1]} CPUs=64 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.1.2 Port={ports[2]} CPUs=64 State=UNKNOWN
NodeName=n3 NodeHostname={host} NodeAddr=127.0.1.3 Port={ports[3]} CPUs=64 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=FORCE:4 State=UP
"""


def check_commands() -> None:
    """Raises with what is missing: a test that cannot run must not look as if it had."""
    missing = [command for command in _COMMANDS if shutil.which(command) is None]
    if missing:
        raise RuntimeError(f"these commands are missing, {', '.join(missing)}: `make test-slurm` installs slurm-wlm")


class Slurm:
    """A context manager that ends all it has started, by pid."""

    def __init__(self, folder: pathlib.Path) -> None:
        check_commands()
        self.folder = folder
        self._started: list[subprocess.Popen[bytes]] = []
        self._sruns: list[subprocess.Popen[str]] = []
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "WINDLASS"))
        }
        self.environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "PYTHONUNBUFFERED": "1"}

    def __enter__(self) -> "Slurm":
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        folder = self.folder
        for name in ("state", *(f"spool-n{i + 1}" for i in range(NODES))):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o400)
        folder.chmod(0o755)  # munge insists that others can look into the folder of its socket
        with contextlib.ExitStack() as held:
            sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(NODES + 1)]
            ports = [one.getsockname()[1] for one in sockets]
        first = 13000 + secrets.randbelow(60) * 100
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        conf = CONF.format(
            id=os.getpid(),
            host=socket.gethostname(),
            ports=ports,
            user=user,
            folder=folder,
            first=first,
            last=first + 99,
        )
        (folder / "slurm.conf").write_text(conf)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        munge = ["--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"]
        munge += [f"--{what}-file={folder}/munge.{what}" for what in ("pid", "log", "seed")]
        self._run("munged", *munge)
        self._until(lambda: (folder / "munge.socket").exists(), "munged has its socket")
        self._run("slurmctld", "-D", "-c")
        for i in range(NODES):
            self._run("slurmd", "-D", "-N", f"n{i + 1}")
        self._until(lambda: self.states() == ["idle"] * NODES, "all nodes are idle")

    def _run(self, command: str, *arguments: str) -> None:
        with (self.folder / f"{command}-{len(self._started)}.out").open("wb") as output:
            process = subprocess.Popen(
                [command, *arguments], env=self.environment, stdout=output, stderr=output, start_new_session=True
            )
        self._started.append(process)

    def _until(self, true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            for process in self._started:
                if process.poll() is not None:
                    raise RuntimeError(f"{process.args} ended with {process.returncode} before {what}:\n{self.logs()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {PATIENCE_S:g} s: {what}:\n{self.logs()}")
            time.sleep(0.05)

    def states(self) -> list[str]:
        """Of the nodes."""
        said = self.call("sinfo", "-h", "-N", "-o", "%T", check=False)
        return said.split()

    def call(self, command: str, *arguments: str, check: bool = True, **environment: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            [command, *arguments],
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{command} {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}")
        return done.stdout

    def submit(self, script: str, folder: pathlib.Path, *options: str, **environment: str) -> "Job":
        """A batch job; `script` is what its shell does."""
        folder.mkdir(parents=True, exist_ok=True)
        file, output = folder / "job.sh", folder / "output"
        file.write_text(f"#!/bin/bash\n{script}\n")
        where = [f"--output={output}", f"--chdir={folder}", "--open-mode=append"]
        said = self.call("sbatch", "--parsable", *where, *options, str(file), **environment)
        return Job(self, said.strip().splitlines()[-1].partition(";")[0], output)

    def direct(self, command: str, folder: pathlib.Path, *options: str) -> subprocess.Popen[str]:
        """An srun that allocates its nodes itself; `close()` ends it. Its output is in the file `direct`."""
        with (folder / "direct").open("w") as output:
            process = subprocess.Popen(
                ["srun", "--kill-on-bad-exit=0", *options, *command.split()],
                env=self.environment | {"WINDLASS_TOKEN": "of-these-tests", "WINDLASS_START_TIMEOUT": "300"},
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self._sruns.append(process)
        return process

    def logs(self) -> str:
        """What everybody has logged."""
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out"), *self.folder.glob("munge.log")])
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-4000:]}" for file in files)

    def close(self) -> None:
        """Jobs first, then the daemons."""
        if len(self._started) > 1 and self._started[1].poll() is None:
            with contextlib.suppress(Exception):
                self.call("scancel", "--full", "--signal=KILL", "-u", str(os.getuid()), check=False)
                deadline = time.monotonic() + 20
                while self.call("squeue", "-h", check=False).strip() and time.monotonic() < deadline:
                    time.sleep(0.1)
        for srun in self._sruns:
            if srun.poll() is None:
                srun.kill()
            srun.wait()
        for process in reversed(self._started):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in reversed(self._started):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __exit__(self, *error: object) -> None:
        self.close()


class Job:
    """One job."""

    def __init__(self, slurm: Slurm, number: str, output: pathlib.Path) -> None:
        self.slurm = slurm
        self.number = number
        self._output = output

    def output(self) -> str:
        """What it has printed so far, in all of its starts."""
        return self._output.read_text() if self._output.exists() else ""

    def show(self) -> dict[str, str]:
        """What scontrol says of it."""
        said = self.slurm.call("scontrol", "show", "job", self.number, "--oneliner", check=False)
        return dict(re.findall(r"(\w+)=(\S*)", said))

    def until(self, text: str, count: int = 1) -> None:
        """Waits until it has printed this so often."""
        deadline = time.monotonic() + PATIENCE_S
        while self.output().count(text) < count:
            state = self.show().get("JobState", "gone")
            assert state in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED"), (
                f"{state} without {text!r}:\n{self.told()}"
            )
            assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {text!r}\n{self.told()}"
            time.sleep(0.1)

    def wait(self) -> str:
        """Its state once it is over."""
        deadline = time.monotonic() + PATIENCE_S
        while (state := self.show().get("JobState", "gone")) in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            assert time.monotonic() < deadline, f"still {state} after {PATIENCE_S:g} s:\n{self.told()}"
            time.sleep(0.1)
        return state

    def told(self) -> str:
        """For a test that fails."""
        return f"{self.output()}\n{self.show()}\n{self.slurm.logs()}"


@contextlib.contextmanager
def slurm_in(folder: pathlib.Path) -> Iterator[Slurm]:
    """In a folder whose path is short enough for a socket's name."""
    with Slurm(folder) as slurm:
        yield slurm
