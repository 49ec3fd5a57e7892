"""The command ``windlass``."""

import importlib
import os
import pathlib
import secrets
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from windlass._address import Address

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # a token may be among them
    help="Windlass, a parameter server for machine learning.",
)
bench = typer.Typer(no_args_is_help=True, help="Our figures beside limits and peers taken in the same run.")
app.add_typer(bench, name="bench")

Json = Annotated[
    pathlib.Path | None, typer.Option("--json", help="Also write the figures to this file.", dir_okay=False)
]


@app.callback()
def root() -> None:
    """Windlass, a parameter server for machine learning."""


@app.command()
def version() -> None:
    """Prints the version and the instruction set in use."""
    import windlass
    from windlass import _core

    typer.echo(f"windlass {windlass.__version__} ({_core.isa()}, {_core.cores()} cores)")


@app.command()
def server(
    listen: Annotated[
        list[str] | None,
        typer.Option(help="tcp://HOST:PORT (port 0: a free one), unix://@NAME, or unix (a new name). May be repeated."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=256, help="Threads that work. Default: the cores.")] = None,
    memory_bytes_max: Annotated[
        int | None, typer.Option(min=0, max=2**64 - 1, help="What tensors and tables may take. Default: no limit.")
    ] = None,
    arena_bytes_max: Annotated[
        int | None,
        typer.Option(min=0, max=2**64 - 1, help="What a client on the same host may share. Default: the memory."),
    ] = None,
    token_file: Annotated[
        pathlib.Path | None, typer.Option(help="The file with the token. Without it, WINDLASS_TOKEN is read.")
    ] = None,
    exit_with_stdin: Annotated[bool, typer.Option("--exit-with-stdin", help="Also end when stdin does.")] = False,
) -> None:
    """Holds tensors and tables for clients, until Ctrl-C or SIGTERM. Listens on loopback unless told otherwise."""
    from windlass import _core
    from windlass._address import Address
    from windlass._errors import InvalidArgument
    from windlass._handshake import load_token
    from windlass._serve import check_reach, serve

    def ready(addresses: list[Address]) -> None:
        for address in addresses:
            typer.echo(f"windlass server listening on {address}")
        sys.stdout.flush()

    try:
        if complaint := _core.isa_complaint():
            raise InvalidArgument(complaint)
        if exit_with_stdin and sys.stdin is None:
            raise InvalidArgument("--exit-with-stdin: this process has no stdin")
        addresses = [_listen_address(text) for text in listen or ["tcp://127.0.0.1:0"]]
        token = load_token(token_file)
        check_reach(addresses, token)  # before the host takes threads
        host = _core.Host(
            threads or _core.cores(),
            2**64 - 1 if memory_bytes_max is None else memory_bytes_max,
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if arena_bytes_max is None else arena_bytes_max,
        )
        serve(addresses, token, host, ready, sys.stdin.fileno() if exit_with_stdin else None)
    except InvalidArgument as error:
        raise typer.BadParameter(str(error)) from None


def _listen_address(text: str) -> "Address":
    from windlass._address import Address

    if text in ("unix", "unix:", "unix://"):
        return Address("unix", name=f"windlass-{secrets.token_hex(8)}")
    return Address.parse(text)


@bench.callback()
def _bench() -> None:
    """Our figures beside limits and peers taken in the same run."""


Rows = Annotated[int, typer.Option(min=200_000, help="Rows in the tables; the bars are for 5 million.")]


def _measure(suite: str, rows: int, json: pathlib.Path | None) -> None:
    if json is not None and not json.parent.is_dir():
        raise typer.BadParameter(f"no such folder: {json.parent}", param_hint="--json")
    console = Console()
    run = importlib.import_module(f"windlass.bench.{suite}").run
    figures = run(console if console.is_terminal else Console(width=120), rows)
    figures.show()
    if json is not None:
        figures.save(json)


@bench.command()
def core(json: Json = None, rows: Rows = 5_000_000) -> None:
    """Tensors, tables and rules inside one process."""
    _measure("core", rows, json)


@bench.command()
def wire(json: Json = None, rows: Rows = 5_000_000) -> None:
    """A server process over TCP loopback and Unix sockets."""
    _measure("wire", rows, json)


@bench.command()
def local(json: Json = None, rows: Rows = 5_000_000) -> None:
    """A server process on the same host that shares memory with the worker."""
    _measure("local", rows, json)


def main() -> None:
    """The entry point."""
    app()
