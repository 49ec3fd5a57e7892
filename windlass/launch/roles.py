"""A process that is a server or the scheduler, from the command line or because WINDLASS_ROLE says so."""

import contextlib
import json
import logging
import os
import pathlib
import secrets
import ssl
import sys
from typing import TYPE_CHECKING

from windlass import _core
from windlass._cgroup import usable_cores
from windlass._errors import CorruptCheckpoint, InvalidArgument, NotFound, WindlassError
from windlass._net.address import Address
from windlass._net.serve import Stop, check_reach, serve
from windlass._net.token import own_token_file
from windlass._settings import Settings, every, load, token_of, uses_own_token, with_memory_cap
from windlass.launch import CANNOT_BEGIN, WORKERS_LOST, rundir
from windlass.launch.log import set_up_log
from windlass.launch.output import show

if TYPE_CHECKING:
    from windlass.control import kept
    from windlass.control.journal import Journal
    from windlass.control.server import ServerMember

_log = logging.getLogger("windlass")


def run_role(role: str) -> int:
    """For a script that calls connect() in every role. The exit code."""
    settings = load()
    set_up_log()
    try:
        if role == "server":
            return run_server(settings, [listen_address(settings.listen)])
        return run_scheduler(settings)
    except WindlassError as error:
        print(f"windlass {role}: {error}", file=sys.stderr)
        return 1


def listen_address(text: str) -> Address:
    """What --listen says; ``unix`` alone is a new name."""
    if text in ("unix", "unix:", "unix://"):
        return Address("unix", name=f"windlass-{secrets.token_hex(8)}")
    return Address.parse(text)


def advertised(bound: Address, advertise: str | None, what: str) -> Address:
    """What others are told: what was bound, unless that is every interface or the user says otherwise."""
    if advertise is not None:
        host, colon, port = advertise.removeprefix("tcp://").rpartition(":")
        if not colon or not port.isdecimal():  # a host alone has the port that was bound
            return Address.parse(f"tcp://{advertise.removeprefix('tcp://')}:{bound.port}")
        return Address.parse(f"tcp://{host}:{port}")
    if bound.kind == "tcp" and bound.host in ("0.0.0.0", "::"):
        raise InvalidArgument(
            f"{what} listens on every interface, {bound}: say with --advertise at which address others reach it"
        )
    return bound


def announce(role: str, addresses: list[Address], settings: Settings) -> None:
    """Says where it listens, a line for each on stdout and the first in a file, and where its token is."""
    for address in addresses:
        show(f"windlass {role} listening on {address}")
    if settings.no_token:
        show(f"windlass {role}: without a token: everybody on this machine gets in")
    elif uses_own_token(settings):
        where = f"its token is in {own_token_file()}, where your processes on this host find it"
        show(f"windlass {role}: {where}; others need it with --token-file")
    file: pathlib.Path | None = settings.address_file
    if file is not None:
        beside = file.with_name(file.name + f".{os.getpid()}")
        try:
            beside.write_text(f"{addresses[0]}\n")
            beside.replace(file)  # whoever waits for the file reads all of it
        except OSError as error:
            raise InvalidArgument(f"address file {file}: {error.strerror or error}") from error


_STAGING_BYTES = 512 << 20


def run_server(settings: Settings, listen: list[Address], until_eof: int | None = None) -> int:
    """Serves until it is told to end; as a member of a cluster where there is a scheduler's address. The exit code."""
    if complaint := _core.isa_complaint():
        raise InvalidArgument(complaint)
    token = token_of(settings)
    check_reach(listen, token)  # before the host takes threads
    settings = with_memory_cap(settings, 1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    host = _core.Host(
        settings.threads or usable_cores(),
        settings.memory_bytes_max,
        memory if settings.arena_bytes_max is None else settings.arena_bytes_max,
        _STAGING_BYTES if settings.staging_bytes_max is None else settings.staging_bytes_max,
    )
    scheduler = None if settings.address is None else Address.parse(settings.address)
    with contextlib.ExitStack() as stack:
        if modules := [name.strip() for name in settings.allow.split(",") if name.strip()]:
            from windlass._rules.user_code import Allowed, Calls

            calls = Calls(Allowed(modules), settings.function_seconds)
            host.set_user_code(calls.core)
            calls.start()
            stack.callback(calls.close)

        members: list[ServerMember] = []

        def ready(bound: list[Address], stop: Stop) -> None:
            told = [advertised(address, settings.advertise, "the server") for address in bound]
            if scheduler is not None:
                from windlass.control.server import ServerMember as Member

                member = Member(scheduler, token or b"", told, host, settings, stop)
                members.append(member)
                stack.callback(member.close)
                member.start()
            announce("server", told, settings)

        code = serve(listen, token, host, ready, until_eof, lambda: any(one.stays() for one in members))
        unfinished = any(not member.finished for member in members)
        return settings.unfinished_code if unfinished and code == 0 else code


def run_scheduler(
    settings: Settings, listen_fd: int | None = None, until_eof: int | None = None, *, resume: str | None = None
) -> int:
    """Runs the scheduler until its cluster ends. The exit code."""
    listen = Address.parse(settings.listen)
    if listen.kind != "tcp":
        raise InvalidArgument(f"the scheduler listens on tcp://HOST:PORT, not on {settings.listen}")
    token = token_of(settings)
    if listen_fd is None:
        check_reach([listen], token)
    with contextlib.ExitStack() as stack:
        journal = None
        if settings.state is not None:
            from windlass.control.journal import Journal  # few have one

            journal = Journal(settings.state)
            stack.callback(journal.close)
        return _schedule(settings, listen, token, journal, listen_fd, until_eof, resume)


def _before(journal: "Journal | None", settings: Settings) -> "tuple[kept.Cluster | None, str | None]":
    """The cluster that the journal is of, if it goes on, and the checkpoint that it began with."""
    from windlass.control import kept

    if journal is None:
        return None, None
    try:
        before = kept.cluster_of(journal.rows)
        resumed = kept.resumed_of(journal.rows)
    except kept.Unreadable as error:
        raise InvalidArgument(f"state {journal.path}: {error}") from None
    if before is None and journal.rows:
        raise InvalidArgument(f"state {journal.path}: the journal is damaged: it has rows, and does not say of what")
    if before is None or before.ended:
        journal.clear()
        return None, None
    if before.servers != settings.servers:
        raise InvalidArgument(
            f"state {journal.path}: it is of a cluster that was started for servers={before.servers}, "
            f"not {settings.servers}"
        )
    return before, None if resumed is None else resumed.id


def _schedule(
    settings: Settings,
    listen: Address,
    token: bytes | None,
    journal: "Journal | None",
    listen_fd: int | None,
    until_eof: int | None,
    resume: str | None,
) -> int:
    from windlass.control.kept import Unreadable
    from windlass.control.model import Terms
    from windlass.control.scheduler import run

    before, resumed = _before(journal, settings)
    named = int(os.environ.get("WINDLASS_CLUSTER") or "0", 16)
    cluster = before.cluster if before is not None else named or secrets.randbelow(2**64 - 1) + 1
    seconds, iterations = (None, None) if settings.checkpoint_every is None else every(settings.checkpoint_every)
    checkpoints = None
    which = resume or os.environ.get("WINDLASS_RESUME") or None
    if settings.checkpoint_dir is not None:
        from windlass.control.manifests import Checkpoints

        since = _seconds_of("WINDLASS_RESUME_SINCE")
        kept_at = settings.checkpoint_dir, settings.checkpoint_keep
        try:
            checkpoints = Checkpoints(*kept_at, which if before is None else resumed, settings.app, since)
        except (NotFound, CorruptCheckpoint):
            if before is None:
                raise
            checkpoints = Checkpoints(*kept_at)  # the state says whether it can do without
    elif which is not None:
        raise InvalidArgument("resume: there is no checkpoint_dir (--checkpoint-dir DIR)")
    terms = Terms(
        cluster,
        settings.servers,
        settings.failure_timeout,
        settings.start_timeout,
        linger=settings.linger,
        on_server_loss=settings.on_server_loss,
        quotas=settings.quotas,
        saves=settings.checkpoint_dir is not None,
        save_seconds=seconds,
        save_iterations=iterations,
        tasks=int(os.environ.get("WINDLASS_TASKS") or 0),
    )

    def ready(bound: Address) -> None:
        announce("scheduler", [advertised(bound, settings.advertise, "the scheduler")], settings)

    try:
        end = run(
            terms,
            listen,
            token,
            ready,
            tls=server_tls(settings),
            settings=json.loads(os.environ.get("WINDLASS_RUN_SETTINGS") or "null") or settings.describe(),
            checkpoints=checkpoints,
            journal=journal,
            listen_fd=listen_fd,
            until_eof=until_eof,
        )
    except Unreadable as error:
        raise InvalidArgument(f"state {settings.state}: {error}") from None
    if end.again and settings.unfinished_code:
        return int(settings.unfinished_code)
    return 1 if end.failed else WORKERS_LOST if end.workers_lost else 0


def _seconds_of(variable: str) -> float | None:
    text = os.environ.get(variable)
    try:
        return float(text) if text else None
    except ValueError:
        raise InvalidArgument(f"{variable}={text}: expected a number of seconds") from None


def server_tls(settings: Settings) -> ssl.SSLContext | None:
    """What the control port speaks."""
    if settings.tls_cert is None:
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
        return context
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(f"tls_cert {settings.tls_cert}: {error}") from error


def main() -> int:
    """For children of the launcher: the role is the argument, everything else is in the environment."""
    role, folder, launcher = sys.argv[1], os.environ.get("WINDLASS_RUN_DIR"), os.getppid()
    settings = load()
    set_up_log()
    try:
        if role == "server":
            return run_server(settings, [listen_address(settings.listen)], sys.stdin.fileno())
        try:
            return run_scheduler(settings, int(os.environ["WINDLASS_LISTEN_FD"]), sys.stdin.fileno())
        finally:
            if folder is not None and os.getppid() != launcher:  # it was killed; otherwise servers may yet look there
                rundir.remove(pathlib.Path(folder))
    except InvalidArgument as error:
        print(f"ERROR {error}", file=sys.stderr)
        return CANNOT_BEGIN
    except WindlassError as error:
        print(f"ERROR {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
