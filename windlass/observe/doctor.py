"""`windlass doctor`: what is wrong with this machine, these settings or that cluster, and what to do about it.

    versions, settings, token -> the machine -> the scheduler -> its members -> every server, as reached from here

What cannot be known because something before it failed is left out. What is wrong keeps a cluster from working;
warnings are about speed and safety.
"""

import dataclasses
import enum
import http.client
import os
import pathlib
import platform
import socket
import ssl
import stat
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from windlass._cgroup import default_memory_bytes_max
from windlass._client.connect import world_told
from windlass._errors import AccessDenied, InvalidArgument, ProtocolError, Timeout, WindlassError
from windlass._net.address import Address, dial, is_here, why
from windlass._net.handshake import greet
from windlass._net.tls import client_tls
from windlass._net.token import check_own, own_token_file
from windlass._settings import OTHER_VARIABLES, SETTINGS, Settings, load, token_of, uses_own_token
from windlass.launch import rundir
from windlass.observe.machine import Machine, look
from windlass.observe.operator import Operator, find
from windlass.observe.status import fetch

WAIT_SECONDS = 3.0  # for one connection or one answer
FILES_FEW = 1024
PROCESSES_FEW = 1024
MEMORY_LITTLE_BYTES = 1 << 30
SHM_LITTLE_BYTES = 256 << 20
_SERVERS_AT_ONCE = 16
_AS_PRINTED = "expected tcp://HOST:PORT, as the scheduler printed it"
_COLLAPSE_KERNEL = (6, 1)  # the first with MADV_COLLAPSE


class Verdict(enum.StrEnum):
    """Of one check."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    seen: str
    advice: str = ""  #: what to do, unless all is well


def ok(name: str, seen: str) -> Check:
    """All is well."""
    return Check(name, Verdict.OK, seen)


def warning(name: str, seen: str, advice: str) -> Check:
    """It works, but not as well or as safely as it could."""
    return Check(name, Verdict.WARNING, seen, advice)


def wrong(name: str, seen: str, advice: str) -> Check:
    """It does not work."""
    return Check(name, Verdict.WRONG, seen, advice)


def examine(flags: Mapping[str, Any], config: pathlib.Path | None) -> list[Check]:
    """Everything, in the order in which it is shown."""
    settings, checks = check_settings(flags, config, os.environ)
    return [
        *check_versions(),
        *checks,
        *check_token(settings, os.environ),
        *check_machine(look(), settings),
        *examine_cluster(settings),
    ]


# -- versions, settings, token ---------------------------------------------------------------------------------------


def check_versions() -> list[Check]:
    """What runs here."""
    import numpy as np

    import windlass
    from windlass import _core

    text = f"windlass {windlass.__version__}, Python {platform.python_version()}, numpy {np.__version__}"
    checks = [ok("versions", f"{text}, Linux {platform.release()}")]
    if complaint := _core.isa_complaint():
        checks.append(wrong("instruction set", complaint, "unset WINDLASS_ISA: the best there is will be used"))
    else:
        checks.append(ok("instruction set", _core.isa()))
    return checks


def check_settings(
    flags: Mapping[str, Any], config: pathlib.Path | None, environ: Mapping[str, str]
) -> tuple[Settings, list[Check]]:
    """The settings, less whatever is wrong with them, and what that is: each source is read by itself."""
    good: dict[str, str] = {}
    checks = []
    for variable in sorted(name for name in environ if name.startswith("WINDLASS_")):
        try:
            load(None, None, {variable: environ[variable]})
            good[variable] = environ[variable]
        except InvalidArgument as error:
            known = variable in OTHER_VARIABLES or variable.removeprefix("WINDLASS_").lower() in SETTINGS
            checks.append(wrong("settings", str(error), f"{'correct' if known else 'rename or unset'} {variable}"))
    if config is not None:
        try:
            load(None, config, {})
        except InvalidArgument as error:
            checks.append(wrong("settings", str(error), "correct the file"))
            config = None
    settings = load(flags, config, good)
    changed = [
        f"{name}={settings[name]} ({source})" for name, source in settings.sources.items() if source != "default"
    ]
    return settings, checks or [ok("settings", ", ".join(changed) or "all have their defaults")]


def check_token(settings: Settings, environ: Mapping[str, str]) -> list[Check]:
    """Whether we can read it and other users cannot. Whether it is the right one, the scheduler says."""
    file: pathlib.Path | None = settings.token_file
    named = file is not None and ("WINDLASS_TOKEN" not in environ or settings.sources["token_file"] == "flag")
    if uses_own_token(settings):
        return check_own_token()
    try:
        token = token_of(settings)
        mode = stat.S_IMODE(file.stat().st_mode) if named and file is not None else 0
    except (InvalidArgument, OSError) as error:
        return [wrong("token", str(error), "give every process the token that the scheduler has")]
    if token is None:
        seen = f"none (no_token, {settings.sources['no_token']}): everybody on this machine gets in"
        return [warning("token", seen, "leave it out: processes of yours on one host share a token by themselves")]
    if not named:
        return [ok("token", "from environment, WINDLASS_TOKEN")]
    seen = f"{file} ({settings.sources['token_file']})"
    if mode & 0o077:
        return [warning("token", f"{seen} has mode {mode:o}: other users can read it", f"chmod 600 {file}")]
    return [ok("token", f"{seen}, which only its owner can read")]


def check_own_token() -> list[Check]:
    """The one that this user's processes share on this host. Makes none."""
    file = own_token_file()
    try:
        check_own(file.parent)
        check_own(file)
    except FileNotFoundError:
        return [ok("token", f"none yet: the first of your processes that needs one makes {file}")]
    except (InvalidArgument, OSError) as error:
        return [wrong("token", str(error), "see who has made it, and what for")]
    return [ok("token", f"{file}, your own on this host")]


# -- the machine -----------------------------------------------------------------------------------------------------


def check_machine(machine: Machine, settings: Settings) -> list[Check]:
    """Everything about this host that needs nobody else."""
    return [
        *check_memory(machine, settings),
        *check_limits(machine),
        *check_shared_memory(machine),
        *check_huge_pages(machine),
        *check_cores(machine, settings.threads),
    ]


def check_memory(machine: Machine, settings: Settings) -> list[Check]:
    """What there is, what was asked for, and whether reserving takes."""
    where = "limit of the cgroup" if machine.contained else "no limit by a cgroup"
    seen = f"{_bytes(machine.available_bytes)} of {_bytes(machine.memory_bytes)} available ({where})"
    checks = [ok("memory", seen)]
    if machine.available_bytes < MEMORY_LITTLE_BYTES:
        advice = "free some, or raise the container's limit; --memory-bytes-max makes servers refuse before it is gone"
        checks = [warning("memory", seen, advice)]
    asked = settings.memory_bytes_max
    if asked is None:
        checks.append(
            ok("memory_bytes_max", f"{_bytes(default_memory_bytes_max())}, unless servers are told otherwise")
        )
    elif asked <= machine.memory_bytes:
        checks.append(ok("memory_bytes_max", f"{_bytes(asked)} ({settings.sources['memory_bytes_max']})"))
    else:
        seen = f"{_bytes(asked)} ({settings.sources['memory_bytes_max']}), but there are {_bytes(machine.memory_bytes)}"
        advice = f"at most {machine.memory_bytes}: the kernel would end the server before it could refuse anything"
        checks.append(warning("memory_bytes_max", seen, advice))
    if machine.overcommit == "2":
        seen = "vm.overcommit_memory=2: memory that is only reserved counts as taken"
        advice = "sysctl vm.overcommit_memory=0, or raise vm.overcommit_ratio far above what servers will hold"
        return [*checks, warning("overcommit", seen, advice)]
    return [*checks, ok("overcommit", f"vm.overcommit_memory={machine.overcommit or '?'}")]


def check_limits(machine: Machine) -> list[Check]:
    """Files, processes with their threads, address space, and memory that may be locked."""
    soft, hard = machine.files
    seen = f"{'any number' if soft < 0 else soft} at once"
    checks = [ok("open files", seen)]
    if 0 <= soft < FILES_FEW:
        enough = hard < 0 or hard >= FILES_FEW
        how = f"ulimit -n {FILES_FEW}" if enough else "LimitNOFILE= of its unit, or docker's --ulimit"
        seen = f"{seen}; a server has several for each worker"
        checks = [warning("open files", seen, f"raise the limit: {how}")]
    count = machine.processes
    if 0 <= count < PROCESSES_FEW:
        seen = f"at most {count}; a server has a thread for each connection, and refuses whom it has none for"
        checks.append(warning("processes", seen, "ulimit -u, TasksMax= of the unit, or docker's --pids-limit"))
    else:
        checks.append(ok("processes", "any number" if count < 0 else f"at most {count}, threads included"))
    if machine.address_bytes >= 0:
        seen = f"{_bytes(machine.address_bytes)}: memory that is only reserved counts"
        checks.append(warning("address space", seen, "ulimit -v unlimited; --memory-bytes-max limits what is used"))
    else:
        checks.append(ok("address space", "no limit"))
    locked = "any amount" if machine.locked_bytes < 0 else _bytes(machine.locked_bytes)
    return [*checks, ok("locked memory", f"{locked} may be; Windlass locks none")]


def check_shared_memory(machine: Machine) -> list[Check]:
    """What workers share with servers on the same host, and what torch shares with its data loaders."""
    name, advice = "shared memory", "allow memfd_create (seccomp, SELinux); until then run with --transport socket"
    checks = [ok(name, "workers can share memory with servers on this host")]
    if machine.memfd_trouble:
        checks = [wrong(name, f"no sealed memfd can be made: {machine.memfd_trouble}", advice)]
    free = machine.shm_free_bytes
    seen = "not there" if free is None else f"{_bytes(free)} free"
    if free is not None and free >= SHM_LITTLE_BYTES:
        return [*checks, ok("/dev/shm", seen)]
    advice = "docker run --shm-size=1g: Windlass does without, but worker processes of torch's DataLoader do not"
    return [*checks, warning("/dev/shm", seen, advice)]


def check_huge_pages(machine: Machine) -> list[Check]:
    """Of tables and tensors, and of memory that is shared."""
    here, shared = machine.huge_pages, machine.huge_pages_shared
    folder, small = "/sys/kernel/mm/transparent_hugepage", "pages of 4 KiB, which take longer to find"
    if here in ("always", "madvise"):
        checks = [ok("huge pages", f"{here}: tables and tensors get them")]
    else:
        seen = f"{here or 'the kernel has none'}: tables and tensors have {small}"
        checks = [warning("huge pages", seen, f"echo madvise > {folder}/enabled")]
    if shared in ("always", "within_size", "advise", "force"):
        return [*checks, ok("huge pages, shared", f"{shared}: shared memory gets them")]
    if shared == "never" and machine.kernel >= _COLLAPSE_KERNEL:
        return [*checks, ok("huge pages, shared", "never, but this kernel makes them when it is asked (MADV_COLLAPSE)")]
    seen = f"{shared or 'the kernel has none'}: shared memory has {small}"
    return [*checks, warning("huge pages, shared", seen, f"echo advise > {folder}/shmem_enabled")]


def check_cores(machine: Machine, threads: int | None) -> list[Check]:
    """threads: what a server was told to have."""
    cores, quota = machine.cores, machine.cores_quota
    seen = f"{cores}" if cores == machine.cores_there else f"{cores} of {machine.cores_there}"
    if quota is not None and quota < (threads or cores):
        seen += f", but the cgroup lets us use {quota:g} at a time"
        advice = f"--threads {max(1, int(quota))} for servers, or a cpuset instead of a quota: what is throttled stalls"
        return [warning("cores", seen, advice)]
    if threads is not None and threads > cores:
        return [warning("cores", f"{seen}, but threads={threads}", f"--threads {cores}: more are in each other's way")]
    return [ok("cores", seen)]


# -- the scheduler ---------------------------------------------------------------------------------------------------


def examine_cluster(settings: Settings) -> list[Check]:
    """The cluster that is named, or that of the only run on this machine."""
    try:
        runs = rundir.alive() if settings.address is None else []
    except InvalidArgument as error:
        return [wrong("scheduler", str(error), "see who has made it, and what for")]
    if settings.address is None and len(runs) != 1:
        count = f"{len(runs)} `windlass run` on" if runs else "no `windlass run` on"
        checks = [ok("scheduler", f"no address is set, and there is {count} this machine: no cluster was looked at")]
        return [*checks, *check_world(os.environ)]
    try:
        if settings.address is not None:
            Address.parse(settings.address)
    except InvalidArgument as error:
        return [wrong("scheduler", str(error), _AS_PRINTED)]
    try:
        tls = client_tls(settings.tls_ca)
    except InvalidArgument as error:
        return [wrong("tls_ca", str(error), "give the certificate that signed the scheduler's, as a PEM file")]
    try:
        address, token = find(settings)
    except InvalidArgument:
        return []  # the token, of which it has been said what is wrong with it
    except OSError as error:
        return [ok("scheduler", f"the `windlass run` on this machine has just ended ({why(error)})")]
    return examine_scheduler(address, token, tls)


def check_world(environ: Mapping[str, str]) -> list[Check]:
    """A script that is one of several must know where the others are. For where no address is set."""
    told = world_told(environ)
    if told is None:
        return []
    name, count = told
    advice = (
        "start scripts with `windlass run`, or `windlass join` behind srun or mpirun, or set WINDLASS_ADDRESS to what "
        "the scheduler printed"
    )
    return [wrong(name, f"{name}={count} without a cluster's address: connect() will refuse", advice)]


def examine_scheduler(address: Address, token: bytes, tls: ssl.SSLContext | None) -> list[Check]:
    """Step by step from its name to its members."""
    if address.kind != "tcp" or address.port == 0:
        return [wrong("scheduler", f"{address} is nobody's", _AS_PRINTED)]
    try:
        dial(address, time.monotonic() + WAIT_SECONDS).close()
        if trouble := _no_scheduler(address, tls):
            return [trouble]
        text = fetch(address, token, tls)
        with Operator(address, token, WAIT_SECONDS, tls):  # it is let in only if it speaks the same version
            pass
        status: dict[str, Any] = msgspec.json.decode(text)
    except AccessDenied as error:
        advice = "give this process the scheduler's own token, with --token-file, WINDLASS_TOKEN_FILE or WINDLASS_TOKEN"
        return [ok("scheduler", f"{address} is one"), wrong("token", str(error), advice)]
    except (ProtocolError, msgspec.DecodeError) as error:
        advice = "install the same version of windlass everywhere, and restart what is older"
        return [wrong("scheduler", str(error), advice)]
    except WindlassError as error:
        return [wrong("scheduler", str(error), _how_to_reach(error))]
    age = f"cluster {status['cluster']}, {status['seconds']:.0f} s old"
    return [
        ok("scheduler", f"{address} can be reached, has our token and speaks our version: {age}"),
        *check_members(status),
        *check_caps(status, look(), socket.gethostname()),
        *examine_servers(status, token, scheduler_is_here=is_here(address)),
    ]


def _no_scheduler(address: Address, tls: ssl.SSLContext | None) -> Check | None:
    """What it is instead, going by the answer to /healthz."""
    make = http.client.HTTPConnection if tls is None else http.client.HTTPSConnection
    more: dict[str, Any] = {} if tls is None else {"context": tls}
    connection = make(address.host, address.port, timeout=WAIT_SECONDS, **more)
    advice = "look at the line that the scheduler printed, or at its --address-file"
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        if (answer.status, answer.read(16)) == (200, b"ok\n"):
            return None
        seen = f"it answered {answer.status} to /healthz"
    except ssl.SSLCertVerificationError as error:
        advice = f"--tls-ca must have signed the scheduler's certificate, and that must be for {address.host}"
        return wrong("scheduler", f"{address} has another certificate: {error.verify_message}", advice)
    except ssl.SSLError as error:
        seen, advice = f"it speaks no TLS ({error.reason})", "start the scheduler with --tls-cert, or unset tls_ca"
    except TimeoutError:
        advice = "it stands still or is overloaded: look at that process; or it is no scheduler, which would answer"
        return wrong("scheduler", f"{address} lets us connect, but does not answer", advice)
    except (OSError, http.client.HTTPException) as error:
        seen = why(error) if isinstance(error, OSError) else str(error)
        if "WINDLASS" in seen:
            return wrong("scheduler", f"{address} is a server of Windlass, not a scheduler", advice)
        if tls is None and _speaks_tls(address):
            advice = "set --tls-ca (WINDLASS_TLS_CA) to the certificate that signed the scheduler's"
            return wrong("scheduler", f"{address} speaks TLS, which is not expected here", advice)
        seen = f"it speaks no HTTP ({seen[:60]!r})"
    finally:
        connection.close()
    return wrong("scheduler", f"{address} is no scheduler: {seen}", advice)


def _speaks_tls(address: Address) -> bool:
    """Whoever it is; nothing is said to it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with dial(address, time.monotonic() + WAIT_SECONDS) as sock:
            sock.settimeout(WAIT_SECONDS)
            context.wrap_socket(sock).close()
        return True
    except (OSError, WindlassError):
        return False


def _how_to_reach(error: WindlassError) -> str:
    """Advice, going by how a connection failed."""
    text = str(error)
    if isinstance(error, Timeout) or "timed out" in text:
        return "a firewall drops what we send, or the address is of another network: try `nc -vz HOST PORT` from here"
    if "refused" in text:
        return "nobody listens there: see whether it runs, and on which port (port 0 gives another at every start)"
    if "resol" in text or "Name or service" in text or "No address" in text:
        return "this host does not know the name: correct it, or give the IP address"
    return "see whether it runs, and whether `ping HOST` reaches it from here"


# -- members ---------------------------------------------------------------------------------------------------------


def check_members(status: dict[str, Any]) -> list[Check]:
    """status: what the scheduler says."""
    checks = []
    for index, reason in status["servers_lost"].items():
        advice = "what it held since the last checkpoint is gone: restart the job, and see in its log why it went"
        checks.append(wrong("members", f"server {index} is lost: {reason}", advice))
    if status["missing"]:
        advice = "start them, or see in their output why they have not come; --servers says how many are expected"
        checks.append(warning("members", f"still missing: {', '.join(status['missing'])}", advice))
    for one in status["members"]:
        if one["heard_seconds"] > status["timeouts"]["failure_timeout"] / 2:
            who = f"{one['role']} {one['index']} (process {one['pid']} on {one['host']})"
            advice = "it or its host stands still, or the network between does"
            checks.append(warning("members", f"{who}: not heard of for {one['heard_seconds']:.1f} s", advice))
    count = {role: sum(one["role"] == role for one in status["members"]) for role in ("server", "worker", "reader")}
    seen = f"{count['server']} of {status['servers_expected']} servers, {count['worker']} workers"
    return checks or [ok("members", f"{seen}, {count['reader']} readers")]


def check_caps(status: dict[str, Any], machine: Machine, host: str) -> list[Check]:
    """Whether the servers on this host refuse before its memory is gone, which one by one they may well do."""
    caps = [one["memory_bytes_max"] for one in status["members"] if one["role"] == "server" and one["host"] == host]
    if sum(caps) <= machine.memory_bytes:
        return []
    seen = f"{len(caps)} servers here may take {_bytes(sum(caps))} together, of {_bytes(machine.memory_bytes)}"
    each = int(machine.memory_bytes * 0.8) // len(caps)
    return [warning("memory_bytes_max", seen, f"start each with --memory-bytes-max {each}, or use `windlass run`")]


def examine_servers(status: dict[str, Any], token: bytes, *, scheduler_is_here: bool) -> list[Check]:
    """Whether each can be reached from here, at the address that it tells others."""
    servers = [one for one in status["members"] if one["role"] == "server"]
    if not servers:
        return []
    with ThreadPoolExecutor(min(len(servers), _SERVERS_AT_ONCE)) as pool:
        return list(pool.map(lambda one: _examine_server(one, token, scheduler_is_here), servers))


def _examine_server(one: dict[str, Any], token: bytes, scheduler_is_here: bool) -> Check:
    name, address = f"server {one['index']}", Address.parse(one["address"])
    where = f"{address} (process {one['pid']} on {one['host']})"
    if address.loopback and not scheduler_is_here:
        advice = "start it with --listen tcp://ITS-IP:0, or with --listen tcp://0.0.0.0:0 --advertise ITS-NAME"
        return wrong(name, f"{where} is an address of its own host, and of nobody else's", advice)
    deadline = time.monotonic() + WAIT_SECONDS
    try:
        with dial(address, deadline) as sock:
            greet(sock, token, None, deadline)
    except AccessDenied as error:
        return wrong(name, f"{where}: {error}", "start it with the token that the scheduler has")
    except ProtocolError as error:
        return wrong(name, f"{where}: {error}", "expected a server of this version of windlass: see what listens there")
    except WindlassError as error:
        return wrong(name, f"{where}: {error}", f"{_how_to_reach(error)}; it tells others what --advertise says")
    return ok(name, f"{where} can be reached from here")


# -- for people and programs -----------------------------------------------------------------------------------------


def as_json(checks: list[Check]) -> str:
    """One object with a list."""
    found = [dataclasses.asdict(check) for check in checks]
    return msgspec.json.encode({"wrong": count(checks, Verdict.WRONG), "checks": found}).decode()


def as_lines(checks: list[Check]) -> list[tuple[Verdict, str]]:
    """A line for each, and under it what to do."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append((check.verdict, f"{check.verdict:<8} {check.name:<{width}}  {check.seen}"))
        if check.advice:
            lines.append((check.verdict, f"{'':<8} {'':<{width}}  -> {check.advice}"))
    warnings, errors = count(checks, Verdict.WARNING), count(checks, Verdict.WRONG)
    worst = Verdict.WRONG if errors else Verdict.WARNING if warnings else Verdict.OK
    return [*lines, (worst, f"{errors} wrong, {warnings} warnings, {len(checks) - errors - warnings} ok")]


def count(checks: list[Check], verdict: Verdict) -> int:
    """How many there are of a kind."""
    return sum(check.verdict == verdict for check in checks)


def _bytes(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.4g} MiB"
