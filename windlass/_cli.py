"""The command ``windlass``."""

import pathlib
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Windlass, a parameter server for machine learning.")
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


@bench.callback()
def _bench() -> None:
    """Our figures beside limits and peers taken in the same run."""


@bench.command()
def core(
    json: Json = None,
    rows: Annotated[int, typer.Option(min=200_000, help="Rows in the tables; the bars are for 5 million.")] = 5_000_000,
) -> None:
    """Tensors, tables and rules inside one process."""
    from windlass.bench import core as suite_core

    if json is not None and not json.parent.is_dir():
        raise typer.BadParameter(f"no such folder: {json.parent}", param_hint="--json")
    console = Console()
    suite = suite_core.run(rows, console if console.is_terminal else Console(width=120))
    suite.show()
    if json is not None:
        suite.save(json)


def main() -> None:
    """The entry point."""
    app()
