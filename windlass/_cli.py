"""The command ``windlass``."""

import enum
import importlib
import pathlib
import signal
import sys
from typing import Annotated, Any

import typer

from windlass._checkpoint import commands as checkpoint_commands
from windlass.launch import commands

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # a token may be among them
    help="Windlass, a parameter server for machine learning.",
)
bench = typer.Typer(no_args_is_help=True, help="Our figures beside limits and peers taken in the same run.")
app.add_typer(bench, name="bench")
checkpoint = typer.Typer(
    no_args_is_help=True, help="Checkpoints in a folder: which there are, and what to do with them."
)
app.add_typer(checkpoint, name="checkpoint")

Json = Annotated[
    pathlib.Path | None, typer.Option("--json", help="Also write the figures to this file.", dir_okay=False)
]
Rows = Annotated[int, typer.Option(min=200_000, help="Rows in the tables; the bars are for 5 million.")]
Short = Annotated[bool, typer.Option("--short", help="To see that it works, not how fast.")]
ROWS = 5_000_000


class Device(enum.StrEnum):
    """Where the suite that measures embeddings has its models."""

    CPU = "cpu"
    CUDA = "cuda"


class RulesPart(enum.StrEnum):
    """The parts of the suite that measures rules; it has a function of this name for each."""

    DENSE = "dense"
    PER_ROW = "per_row"
    CHECKED = "checked"
    IN_PYTHON = "in_python"
    TOP_K = "top_k"


@app.callback()
def root() -> None:
    """Windlass, a parameter server for machine learning."""


@app.command()
def version() -> None:
    """Prints the version and the instruction set in use."""
    import windlass
    from windlass import _core

    typer.echo(f"windlass {windlass.__version__} ({_core.isa()}, {_core.cores()} cores)")


commands.add_to(app)
checkpoint_commands.add_to(checkpoint)


@bench.callback()
def _bench() -> None:
    """Our figures beside limits and peers taken in the same run."""


def _measure(suite: str, rows: int, json: pathlib.Path | None, short: bool, **of_suite: str) -> None:
    if json is not None and not json.parent.is_dir():
        raise typer.BadParameter(f"no such folder: {json.parent}", param_hint="--json")
    from rich.console import Console

    _end_orderly()
    console = Console()
    run = importlib.import_module(f"windlass.bench.{suite}").run
    figures = run(console if console.is_terminal else Console(width=160), rows, short, **of_suite)
    figures.show()
    if json is not None:
        figures.save(json)


def _end_orderly() -> None:
    """SIGTERM ends a measurement as Ctrl-C does: with all that it has started."""

    def end(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


@bench.command()
def core(json: Json = None, rows: Rows = ROWS, short: Short = False) -> None:
    """Tensors, tables and rules inside one process."""
    _measure("core", rows, json, short)


@bench.command()
def wire(json: Json = None, rows: Rows = ROWS, short: Short = False) -> None:
    """A server process over TCP loopback and Unix sockets."""
    _measure("wire", rows, json, short)


@bench.command()
def local(json: Json = None, rows: Rows = ROWS, short: Short = False) -> None:
    """Servers on the same host that share memory with workers: bare ones, and those of `windlass run`."""
    _measure("local", rows, json, short)


@bench.command()
def control(json: Json = None, short: Short = False) -> None:
    """Starting a cluster, gathering in it, and doing nothing in it."""
    _measure("control", 0, json, short)


@bench.command()
def sync(json: Json = None, short: Short = False) -> None:
    """Policies of consistency: uneven workers, the gate itself, and two workers in step."""
    _measure("sync", 0, json, short)


@bench.command()
def train(json: Json = None, short: Short = False) -> None:
    """A network of two convolutions by two workers, beside DistributedDataParallel and plain torch."""
    _measure("train", 0, json, short)


@bench.command()
def embed(json: Json = None, rows: Rows = ROWS, short: Short = False, device: Device = Device.CPU) -> None:
    """Embedding tables as modules of torch, beside torch's own, fbgemm's and TorchRec's."""
    _measure("embed", rows, json, short, device=device.value)


@bench.command()
def rules(
    json: Json = None,
    short: Short = False,
    part: Annotated[RulesPart | None, typer.Option(help="Only this part; `checked`: reject_nonfinite.")] = None,
) -> None:
    """Every rule on a tensor and on a table, beside its kernel on plain arrays."""
    _measure("rules", 0, json, short, part=part.value if part else "")


@bench.command(name="checkpoint")
def checkpoint_suite(
    json: Json = None,
    short: Short = False,
    where: Annotated[
        str, typer.Option("--dir", help="A folder on the disk to measure. Default: that for temporary files.")
    ] = "",
) -> None:
    """Saving and loading beside plain writes and reads, training meanwhile, and starting again."""
    if where and not pathlib.Path(where).is_dir():
        raise typer.BadParameter(f"no such folder: {where}", param_hint="--dir")
    _measure("checkpoint", 0, json, short, where=where)


@bench.command()
def ray(json: Json = None, short: Short = False) -> None:
    """A run on Ray, on two nodes of this machine, beside the same without Ray."""
    _measure("ray", 0, json, short)


@bench.command(name="all")
def all_suites(
    json: Annotated[pathlib.Path, typer.Option("--json", help="A folder for one file per suite.", file_okay=False)],
    rows: Rows = ROWS,
    short: Short = False,
) -> None:
    """Every suite, one after the other; the status is 1 if one of them failed."""
    from windlass.bench.suites import run_all

    _end_orderly()
    failed = run_all(json, rows, short, typer.echo)
    if failed:
        typer.echo(f"windlass bench all: failed: {', '.join(failed)}", err=True)
        raise typer.Exit(1)


@bench.command()
def compare(
    old: Annotated[pathlib.Path, typer.Argument(help="A file of a suite, or a folder of `bench all`.")],
    new: Annotated[pathlib.Path, typer.Argument(help="The same, measured later.")],
) -> None:
    """What moved between two measurements by more than the noise that they saw."""
    from windlass._errors import InvalidArgument
    from windlass.bench.compare import compare as say_what_moved

    try:
        say_what_moved(old, new, typer.echo)
    except InvalidArgument as error:
        raise typer.BadParameter(str(error)) from None


def main() -> None:
    """The entry point."""
    app()
