"""The commands that start clusters and look at them."""

import difflib
import enum
import functools
import logging
import os
import pathlib
import sys
from collections.abc import Callable
from secrets import token_hex
from typing import Annotated, Any

import typer

from windlass._errors import InvalidArgument, WindlassError
from windlass._settings import SETTINGS, Settings, given_token, load
from windlass.launch import STRATEGIES


class Engine(enum.StrEnum):
    """What starts the processes of a run."""

    LOCAL = "local"
    RAY = "ray"


def _option(name: str, *flags: str) -> Any:
    """A setting as an option: its type, what it is for, and its default."""
    setting = SETTINGS[name]
    if setting.kind == "flag" or name == "progress":  # a pair of flags
        off = "" if setting.default is None else f" Default: {'on' if setting.default in (True, 'on') else 'off'}."
        return typer.Option(*flags, help=setting.help + off, show_default=False)
    shown = setting.default not in (None, "") and f" Default: {setting.default}."
    kind = "|".join(setting.choices) or ("policy" if setting.kind == "sync" else setting.kind)
    return typer.Option(*flags, metavar=kind, help=setting.help + (shown or ""), show_default=False)


Address = Annotated[str | None, _option("address")]
AddressFile = Annotated[pathlib.Path | None, _option("address_file")]
Allow = Annotated[str | None, _option("allow")]
Advertise = Annotated[str | None, _option("advertise")]
App = Annotated[str | None, _option("app")]
ArenaBytesMax = Annotated[str | None, _option("arena_bytes_max")]
StagingBytesMax = Annotated[str | None, _option("staging_bytes_max")]
CheckpointBytesMax = Annotated[str | None, _option("checkpoint_bytes_max")]
CheckpointDir = Annotated[str | None, _option("checkpoint_dir")]
CheckpointEvery = Annotated[str | None, _option("checkpoint_every")]
CheckpointKeep = Annotated[str | None, _option("checkpoint_keep")]
CheckpointRate = Annotated[str | None, _option("checkpoint_rate")]
Config = Annotated[
    pathlib.Path | None, typer.Option(help="A TOML file with settings (default: WINDLASS_CONFIG).", show_default=False)
]
ExitWithStdin = Annotated[bool, typer.Option("--exit-with-stdin", help="Also end when stdin does.")]
FunctionSeconds = Annotated[str | None, _option("function_seconds")]
FailureTimeout = Annotated[str | None, _option("failure_timeout")]
Linger = Annotated[bool | None, _option("linger", "--linger/--no-linger")]
LogDir = Annotated[pathlib.Path | None, _option("log_dir")]
MemoryBytesMax = Annotated[str | None, _option("memory_bytes_max")]
NoToken = Annotated[bool | None, _option("no_token", "--no-token")]
OnServerLoss = Annotated[str | None, _option("on_server_loss")]
OnWorkerLoss = Annotated[str | None, _option("on_worker_loss")]
Progress = Annotated[bool | None, _option("progress", "--progress/--no-progress")]
RunName = Annotated[str | None, typer.Option("--run", metavar="NAME", help="The `windlass run` of this name.")]
Servers = Annotated[str | None, _option("servers")]
State = Annotated[pathlib.Path | None, _option("state")]
StartTimeout = Annotated[str | None, _option("start_timeout")]
Sync = Annotated[str | None, _option("sync")]
Threads = Annotated[str | None, _option("threads")]
TlsCa = Annotated[pathlib.Path | None, _option("tls_ca")]
TlsCert = Annotated[pathlib.Path | None, _option("tls_cert")]
TlsKey = Annotated[pathlib.Path | None, _option("tls_key")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume from the newest good checkpoint.")]
ResumeFrom = Annotated[
    str | None, typer.Option("--resume-from", metavar="ID", help="Resume from this one: its id, tag or folder.")
]
TokenFile = Annotated[pathlib.Path | None, _option("token_file")]
Transport = Annotated[str | None, _option("transport")]
UnfinishedCode = Annotated[str | None, _option("unfinished_code")]
Workers = Annotated[str | None, _option("workers")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]
PassThrough = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def _resources(kind: str) -> Any:
    """What Ray is to give each server or worker, as an option."""
    text = f"With --on ray: what each {kind} is to have, such as CPU=4,GPU=1. Default: CPU=1."
    return typer.Option(metavar="amounts", help=text, show_default=False)


def settings_of(given: dict[str, Any]) -> Settings:
    """From a command's arguments, by their names."""
    return load({name: value for name, value in given.items() if name in SETTINGS}, given["config"])


def plainly(function: Callable[..., None]) -> Callable[..., None]:
    """Our errors are the user's to read, without a traceback."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except InvalidArgument as error:
            raise typer.BadParameter(str(error)) from None
        except WindlassError as error:
            typer.echo(f"windlass: {error}", err=True)
            raise typer.Exit(1) from None

    return wrapped


def server(
    listen: Annotated[
        list[str] | None,
        typer.Option(help="tcp://HOST:PORT (port 0: a free one), unix://@NAME, or unix (a new name). May be repeated."),
    ] = None,
    address: Address = None,
    number: Annotated[str | None, _option("number")] = None,
    advertise: Advertise = None,
    address_file: AddressFile = None,
    threads: Threads = None,
    memory_bytes_max: MemoryBytesMax = None,
    arena_bytes_max: ArenaBytesMax = None,
    staging_bytes_max: StagingBytesMax = None,
    allow: Allow = None,
    function_seconds: FunctionSeconds = None,
    checkpoint_dir: CheckpointDir = None,
    checkpoint_rate: CheckpointRate = None,
    checkpoint_bytes_max: CheckpointBytesMax = None,
    token_file: TokenFile = None,
    no_token: NoToken = None,
    start_timeout: StartTimeout = None,
    linger: Linger = None,
    unfinished_code: UnfinishedCode = None,
    tls_ca: TlsCa = None,
    config: Config = None,
    exit_with_stdin: ExitWithStdin = False,
) -> None:
    """Runs a server, which holds tensors and tables, until Ctrl-C, SIGTERM, or the end of its cluster.

    With --address it joins the cluster of that scheduler. Listens on loopback unless told otherwise.
    """
    from windlass.launch.log import set_up_log
    from windlass.launch.roles import listen_address, run_server

    settings = settings_of({**locals(), "listen": None})
    if exit_with_stdin and sys.stdin is None:
        raise InvalidArgument("--exit-with-stdin: this process has no stdin")
    addresses = [listen_address(text) for text in listen or [settings.listen]]
    set_up_log(logging.WARNING if settings.address is None else logging.INFO)
    raise typer.Exit(run_server(settings, addresses, sys.stdin.fileno() if exit_with_stdin else None))


def scheduler(
    servers: Servers = None,
    listen: Annotated[str | None, _option("listen")] = None,
    advertise: Advertise = None,
    address_file: AddressFile = None,
    token_file: TokenFile = None,
    no_token: NoToken = None,
    failure_timeout: FailureTimeout = None,
    start_timeout: StartTimeout = None,
    linger: Linger = None,
    state: State = None,
    on_server_loss: OnServerLoss = None,
    unfinished_code: UnfinishedCode = None,
    checkpoint_dir: CheckpointDir = None,
    checkpoint_every: CheckpointEvery = None,
    checkpoint_keep: CheckpointKeep = None,
    app: App = None,
    resume: Resume = False,
    resume_from: ResumeFrom = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    config: Config = None,
    exit_with_stdin: ExitWithStdin = False,
) -> None:
    """Runs a scheduler, which knows members and shards. Ends when all workers have left, unless --linger.

    Without --token-file it uses your own token on this host, where your servers, workers and commands find it, and
    prints where that is. With --state FILE it may be killed and started again, with the same command and port: training
    goes on meanwhile.
    """
    from windlass.launch.log import set_up_log
    from windlass.launch.roles import run_scheduler

    which = resumed(resume, resume_from)
    settings = settings_of(locals())
    set_up_log()
    raise typer.Exit(run_scheduler(settings, None, sys.stdin.fileno() if exit_with_stdin else None, resume=which))


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, or another program, and its arguments.")],
    servers: Servers = None,
    workers: Workers = None,
    transport: Transport = None,
    app: App = None,
    sync: Sync = None,
    on_worker_loss: OnWorkerLoss = None,
    log_dir: LogDir = None,
    progress: Progress = None,
    failure_timeout: FailureTimeout = None,
    start_timeout: StartTimeout = None,
    threads: Threads = None,
    memory_bytes_max: MemoryBytesMax = None,
    arena_bytes_max: ArenaBytesMax = None,
    staging_bytes_max: StagingBytesMax = None,
    allow: Allow = None,
    function_seconds: FunctionSeconds = None,
    checkpoint_dir: CheckpointDir = None,
    checkpoint_every: CheckpointEvery = None,
    checkpoint_keep: CheckpointKeep = None,
    checkpoint_rate: CheckpointRate = None,
    resume: Resume = False,
    resume_from: ResumeFrom = None,
    restarts: Annotated[
        int,
        typer.Option(
            min=0, metavar="count", help="How often to start again from the last checkpoint when a server is lost."
        ),
    ] = 3,
    on: Annotated[Engine, typer.Option(help="Where its processes run.")] = Engine.LOCAL,
    resources_per_worker: Annotated[str | None, _resources("worker")] = None,
    resources_per_server: Annotated[str | None, _resources("server")] = None,
    strategy: Annotated[
        str | None,
        typer.Option(metavar="|".join(STRATEGIES), help="How Ray places them. Default: SPREAD.", show_default=False),
    ] = None,
    config: Config = None,
    name: Annotated[
        str | None, typer.Option(help="What others call this run. Default: the script's name.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be started.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also what servers and scheduler have to say.")
    ] = False,
) -> None:
    """Starts a scheduler, servers and workers on this machine, each worker running the script.

    What follows the script is passed on to it as it is. With --on ray they run on the nodes of a Ray cluster.
    """
    if script.startswith("-"):
        raise InvalidArgument(f"windlass run: there is no option {script}{_meant(context, script)}")
    shown = None if progress is None else "on" if progress else "off"
    settings = settings_of({**locals(), "progress": shown})
    which = resumed(resume, resume_from)
    command = [script, *context.args]
    options: dict[str, Any] = {"name": name, "dry_run": dry_run, "verbose": verbose, "resume": which}
    if on == Engine.RAY:
        from windlass.ray._script import read_resources, run_script

        options["resources_per_worker"] = read_resources(resources_per_worker, "--resources-per-worker")
        options["resources_per_server"] = read_resources(resources_per_server, "--resources-per-server")
        raise typer.Exit(
            run_script(settings, command, strategy=strategy or STRATEGIES[0], restarts=restarts, **options)
        )
    for option in ("resources_per_worker", "resources_per_server", "strategy"):
        if locals()[option] is not None:
            raise InvalidArgument(f"--{option.replace('_', '-')} is for --on ray")
    from windlass.launch.run import run as run_all

    raise typer.Exit(run_all(settings, command, restarts=restarts, **options))


def resumed(resume: bool, resume_from: str | None) -> str | None:
    """Which checkpoint is meant; None: none."""
    if resume and resume_from is not None:
        raise InvalidArgument("--resume takes the newest checkpoint, --resume-from the one that it names: give one")
    return "newest" if resume else resume_from


def _meant(context: typer.Context, option: str) -> str:
    """The option that was meant, if one looks like it."""
    known = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
    close = difflib.get_close_matches(option.partition("=")[0], known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def kubernetes(
    context: typer.Context,
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="The command, after --, and its arguments.")],
    image: Annotated[str, typer.Option(help="The image of the pods, with Windlass and the script.")],
    servers: Servers = None,
    workers: Workers = None,
    gpus: Annotated[int, typer.Option(min=0, metavar="count", help="GPUs of each worker. Default: 0.")] = 0,
    cpu: Annotated[str | None, typer.Option(metavar="CORES", help="Cores of each worker.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="BYTES", help="Memory of each worker, such as 16Gi.")] = None,
    server_cpu: Annotated[str, typer.Option(metavar="CORES", help="Cores of each server, and its threads.")] = "1",
    server_memory: Annotated[str, typer.Option(metavar="BYTES", help="Memory of each server.")] = "4Gi",
    server_image: Annotated[
        str | None, typer.Option(help="The image of servers and scheduler, if another.", show_default=False)
    ] = None,
    jobset: Annotated[bool, typer.Option("--jobset", help="A JobSet instead of three Jobs.")] = False,
    name: Annotated[
        str | None, typer.Option(help="What the objects are called. Default: the script's name.", show_default=False)
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Their namespace. Default: kubectl's.")] = None,
    app: App = None,
    sync: Sync = None,
    on_worker_loss: OnWorkerLoss = None,
    failure_timeout: FailureTimeout = None,
    start_timeout: StartTimeout = None,
    threads: Threads = None,
    memory_bytes_max: MemoryBytesMax = None,
    staging_bytes_max: StagingBytesMax = None,
    allow: Allow = None,
    function_seconds: FunctionSeconds = None,
    checkpoint_dir: CheckpointDir = None,
    checkpoint_claim: Annotated[
        str | None, typer.Option(metavar="NAME", help="A PersistentVolumeClaim for checkpoints.", show_default=False)
    ] = None,
    checkpoint_size: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Make one of this size, such as 100Gi.", show_default=False)
    ] = None,
    storage_class: Annotated[
        str | None, typer.Option(metavar="NAME", help="The storage class of that one.", show_default=False)
    ] = None,
    checkpoint_every: CheckpointEvery = None,
    checkpoint_keep: CheckpointKeep = None,
    checkpoint_rate: CheckpointRate = None,
    resume: Resume = False,
    resume_from: ResumeFrom = None,
    restarts: Annotated[
        int, typer.Option(min=0, metavar="count", help="How often all start again when a server is lost.")
    ] = 3,
    worker_restarts: Annotated[
        int, typer.Option(min=0, metavar="count", help="How often each worker is started again.")
    ] = 3,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A variable of all pods. May be repeated.")
    ] = None,
    env_from: Annotated[
        list[str] | None,
        typer.Option(metavar="SECRET", help="A Secret whose keys are variables of all pods. May be repeated."),
    ] = None,
    token_file: TokenFile = None,
    secret: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A Secret with the key `token`. Default: one is made.", show_default=False),
    ] = None,
    pull_secret: Annotated[
        str | None, typer.Option(metavar="NAME", help="The Secret to pull images with.", show_default=False)
    ] = None,
    user: Annotated[str, typer.Option(metavar="UID|image", help="Who the pods run as; image: whom it names.")] = "1000",
    config: Config = None,
) -> None:
    """Prints what `kubectl apply -f -` makes a scheduler, servers and workers of, each worker running the command."""
    from windlass.launch.kubernetes import KubernetesRun, print_documents

    settings = settings_of(locals())
    if user != "image" and not (user.isdecimal() and 0 < int(user) < 2**31):
        raise InvalidArgument(f"--user {user}: expected a user's number above 0, or image")
    wanted = KubernetesRun(
        image,
        [command, *context.args],
        name=name,
        namespace=namespace,
        server_image=server_image,
        gpus=gpus,
        cpu=cpu,
        memory=memory,
        server_cpu=server_cpu,
        server_memory=server_memory,
        jobset=jobset,
        restarts=restarts,
        worker_restarts=worker_restarts,
        claim=checkpoint_claim,
        size=checkpoint_size,
        storage_class=storage_class,
        secret=secret,
        pull_secret=pull_secret,
        user=None if user == "image" else int(user),
        environment=tuple(env or ()),
        environment_from=tuple(env_from or ()),
        resume=resumed(resume, resume_from),
    )
    token = given_token(settings)
    if secret is not None and token is not None:
        raise InvalidArgument(
            "--secret names a Secret that is there; --token-file and WINDLASS_TOKEN are for a new one"
        )
    typer.echo(print_documents(wanted, settings, token_hex(32).encode() if token is None else token), nl=False)


def worker(
    context: typer.Context,
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="The command, after --, and its arguments.")],
    address: Address = None,
    rank: Annotated[int | None, typer.Option(min=0, help="This worker's number. Default: RANK.")] = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="How many there are. Default: WORLD_SIZE.")] = None,
    app: App = None,
    sync: Sync = None,
    on_worker_loss: OnWorkerLoss = None,
    transport: Transport = None,
    token_file: TokenFile = None,
    no_token: NoToken = None,
    tls_ca: TlsCa = None,
    config: Config = None,
) -> None:
    """Runs a command as a worker of the cluster at --address, on this or another host."""
    settings = settings_of(locals())
    if settings.address is None:
        raise InvalidArgument("windlass worker needs --address, of the scheduler (or WINDLASS_ADDRESS)")
    environment = dict(os.environ)
    for name in ("address", "app", "sync", "on_worker_loss", "transport", "token_file", "no_token", "tls_ca"):
        if settings[name] not in (None, False):
            environment[f"WINDLASS_{name.upper()}"] = str(settings[name])
    if token_file is not None:
        environment.pop("WINDLASS_TOKEN", None)
    for variable, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        if value is not None:
            environment[variable] = str(value)
    try:
        os.execvpe(command, [command, *context.args], environment)
    except OSError as error:
        raise InvalidArgument(f"windlass worker: {command}: {error.strerror}") from error


def join(
    context: typer.Context,
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="The command, after --, and its arguments.")],
    servers: Servers = None,
    worker_restarts: Annotated[
        int, typer.Option(min=0, metavar="count", help="How often a worker that dies is started again in its task.")
    ] = 0,
    requeue: Annotated[
        bool,
        typer.Option(
            "--requeue",
            help="At SIGTERM, SIGUSR1 or SIGUSR2, after the last checkpoint, have Slurm start the job again.",
        ),
    ] = False,
    host: Annotated[
        str | None,
        typer.Option(help="The host of the first task. Default: what the engine says.", show_default=False),
    ] = None,
    transport: Transport = None,
    app: App = None,
    sync: Sync = None,
    on_worker_loss: OnWorkerLoss = None,
    log_dir: LogDir = None,
    failure_timeout: FailureTimeout = None,
    start_timeout: StartTimeout = None,
    linger: Linger = None,
    threads: Threads = None,
    memory_bytes_max: MemoryBytesMax = None,
    arena_bytes_max: ArenaBytesMax = None,
    staging_bytes_max: StagingBytesMax = None,
    allow: Allow = None,
    function_seconds: FunctionSeconds = None,
    checkpoint_dir: CheckpointDir = None,
    checkpoint_every: CheckpointEvery = None,
    checkpoint_keep: CheckpointKeep = None,
    checkpoint_rate: CheckpointRate = None,
    resume: Resume = False,
    resume_from: ResumeFrom = None,
    token_file: TokenFile = None,
    no_token: NoToken = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    config: Config = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also what servers and scheduler have to say.")
    ] = False,
) -> None:
    """A task of Slurm (srun) or Open MPI (mpirun) becomes a server, or a worker that runs the command.

    The first --servers tasks are servers, the first of them the scheduler as well; the others run the command.
    """
    from windlass.launch.join import run as run_task

    settings = settings_of(locals())
    raise typer.Exit(
        run_task(
            settings,
            [command, *context.args],
            host=host,
            worker_restarts=worker_restarts,
            requeue=requeue,
            resume=resumed(resume, resume_from),
            verbose=verbose,
        )
    )


Watch = Annotated[bool, typer.Option("--watch", "-w", help="Again every second, until Ctrl-C.")]


def status(
    address: Address = None,
    run: RunName = None,
    token_file: TokenFile = None,
    no_token: NoToken = None,
    tls_ca: TlsCa = None,
    config: Config = None,
    as_json: AsJson = False,
    watch: Watch = False,
) -> None:
    """Shows members, shards, objects and progress. With --watch, again every second, as `windlass top` does.

    Without --address and --run: of the `windlass run` on this machine. If there are several, it lists them.
    """
    from windlass._net.tls import client_tls
    from windlass.launch import rundir
    from windlass.observe import status as shown
    from windlass.observe.operator import find

    settings = settings_of(locals())
    if as_json and watch:
        raise InvalidArgument("either --json or --watch")
    if run is None and settings.address is None and not as_json and len(runs := rundir.runs()) > 1:
        return shown.show_runs(runs)
    where, token = find(settings, run)
    fetch = functools.partial(shown.fetch, where, token, client_tls(settings.tls_ca))
    if as_json:
        typer.echo(fetch())
    elif watch:
        shown.watch(fetch, str(where))
    else:
        shown.show(fetch(), str(where))


def top(
    address: Address = None,
    run: RunName = None,
    token_file: TokenFile = None,
    no_token: NoToken = None,
    tls_ca: TlsCa = None,
    config: Config = None,
) -> None:
    """The status again every second, until Ctrl-C or until the cluster ends: `windlass status --watch`."""
    status(address, run, token_file, no_token, tls_ca, config, watch=True)


def metrics(
    address: Address = None,
    run: RunName = None,
    token_file: TokenFile = None,
    no_token: NoToken = None,
    tls_ca: TlsCa = None,
    config: Config = None,
    for_prometheus: Annotated[
        bool, typer.Option("--prometheus", help="A scrape configuration, as YAML, instead.")
    ] = False,
) -> None:
    """Says how to read /metrics and the JSON of the status: lines for curl, or a configuration for Prometheus.

    Without --address and --run: of the `windlass run` on this machine. What lets one read lies in files that only you
    can read.
    """
    from windlass.launch import rundir
    from windlass.observe import scrape
    from windlass.observe.operator import find

    settings = settings_of(locals())
    where, token = find(settings, run)
    folder = scrape.folder_of(where, token)
    if for_prometheus:
        name = next((one.name for one in rundir.runs() if one.folder == folder), None)
        typer.echo(scrape.prometheus(where, folder, settings.tls_ca, name))
    else:
        for line in scrape.curl_lines(where, folder, settings.tls_ca):
            typer.echo(line)


def doctor(
    address: Address = None,
    token_file: TokenFile = None,
    no_token: NoToken = None,
    tls_ca: TlsCa = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Says what is wrong with this machine, these settings or the cluster at --address, and what to do about it."""
    from windlass.observe import doctor as says

    checks = says.examine(
        {"address": address, "token_file": token_file, "no_token": no_token, "tls_ca": tls_ca}, config
    )
    colours = {says.Verdict.OK: None, says.Verdict.WARNING: "yellow", says.Verdict.WRONG: "red"}
    if as_json:
        typer.echo(says.as_json(checks))
    else:
        for verdict, line in says.as_lines(checks):
            typer.secho(line, fg=colours[verdict])
    raise typer.Exit(1 if says.count(checks, says.Verdict.WRONG) else 0)


def move(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tensor or table, as app/name.")],
    shard: Annotated[int, typer.Argument(metavar="SHARD", min=0, help="The number of the shard, from 0.")],
    to: Annotated[int, typer.Argument(metavar="SERVER", min=0, help="The number of the server it goes to.")],
    address: Address = None,
    run: RunName = None,
    token_file: TokenFile = None,
    no_token: NoToken = None,
    tls_ca: TlsCa = None,
    config: Config = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds.")] = 60.0,
) -> None:
    """Moves a shard to another server during training."""
    from windlass._net.tls import client_tls
    from windlass.observe.operator import Operator, find

    settings = settings_of(locals())
    where, token = find(settings, run, changes=True)
    with Operator(where, token, timeout, client_tls(settings.tls_ca)) as operator:
        operator.move(name if "/" in name else f"default/{name}", shard, to, timeout)
    typer.echo(f"cluster at {where}: shard {shard} of {name} is on server {to}")


def drain(
    server: Annotated[int, typer.Argument(metavar="SERVER", min=0, help="The number of the server.")],
    address: Address = None,
    run: RunName = None,
    token_file: TokenFile = None,
    no_token: NoToken = None,
    tls_ca: TlsCa = None,
    config: Config = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds. It goes on after that.")] = 600.0,
) -> None:
    """Moves everything that a server has to the others during training, and ends the server. Nothing is lost."""
    from windlass._net.tls import client_tls
    from windlass.observe.operator import Operator, find

    settings = settings_of(locals())
    where, token = find(settings, run, changes=True)
    with Operator(where, token, timeout, client_tls(settings.tls_ca)) as operator:
        operator.drain(server, timeout)
    typer.echo(f"cluster at {where}: server {server} is empty, and has ended")


def add_to(app: typer.Typer) -> None:
    """Makes them commands of `windlass`."""
    app.command(context_settings=PassThrough)(plainly(run))
    for command in (server, scheduler, status, top, metrics, doctor, move, drain):
        app.command()(plainly(command))
    app.command(context_settings=PassThrough)(plainly(worker))
    app.command(context_settings=PassThrough)(plainly(kubernetes))
    app.command(context_settings=PassThrough)(plainly(join))
