"""`windlass checkpoint`: has a cluster take one, and what lies in a folder of them. Only `save` needs a cluster.

What they use is imported when they run: the command line is to begin at once.
"""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass._errors import CorruptCheckpoint, InvalidArgument
from windlass.launch.commands import Address, AsJson, Config, NoToken, RunName, TlsCa, TokenFile, plainly, settings_of

if TYPE_CHECKING:
    from windlass._checkpoint.folder import Folder
    from windlass._checkpoint.names import Place

Where = Annotated[str, typer.Argument(metavar="FOLDER", help="A directory, or a URL such as s3://bucket/runs.")]
App = Annotated[str | None, typer.Option(help="Only of this app.", show_default=False)]
TheApp = Annotated[str | None, typer.Option(help="Of this app. Default: the only one there.", show_default=False)]
SaveApp = Annotated[str | None, typer.Option(help="Of this app. Default: default.", show_default=False)]
ID = "Its id, its tag, or the name of its folder."


def save(
    tag: Annotated[
        str | None, typer.Argument(metavar="NAME", help="What to call it. One that has a name is kept.")
    ] = None,
    app: SaveApp = None,
    address: Address = None,
    run: RunName = None,
    token_file: TokenFile = None,
    no_token: NoToken = None,
    tls_ca: TlsCa = None,
    config: Config = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until it is complete.")] = 600.0,
) -> None:
    """Has a cluster take a checkpoint, and waits until it is complete.

    It is cut between two iterations of the app's lowest rank.
    """
    from windlass._checkpoint.names import check_tag
    from windlass._net.tls import client_tls
    from windlass.observe.operator import Operator, find
    from windlass.observe.saving import wait

    if tag is not None:
        check_tag(tag)
    settings = settings_of(locals())
    where, token = find(settings, run, changes=True)
    tls = client_tls(settings.tls_ca)
    with Operator(where, token, tls=tls) as operator:
        id = wait(operator, where, token, tls, settings.app, tag, timeout)
    typer.echo(f"cluster at {where}: checkpoint {id} of app {settings.app!r} is complete")


def ls(folder: Where, app: App = None, as_json: AsJson = False) -> None:
    """Which checkpoints there are: their age, clock and size, and whether they are complete."""
    from windlass._checkpoint.folder import Folder

    at = Folder(folder)
    found = [_row(at, place) for name in _apps(at, app) for place in at.places(name)]
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(found))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from windlass.observe.picture import seconds, size

    table = Table("app", "id", "clock", "age", "bytes", "objects", "state", "tag", box=None)
    for row in found:
        age = "" if row["created"] is None else seconds(max(0.0, time.time() - row["created"]))
        objects = "" if row["objects"] is None else str(len(row["objects"]))
        cells = [row["app"], row["id"], str(row["clock"]), age, size(row["bytes"]), objects, row["state"]]
        table.add_row(*map(Text, cells), Text(row["tag"] or ""))
    console = Console()
    console.print(table) if found else console.print(f"{at.store.url}: no checkpoints", highlight=False, markup=False)
    for row in found:
        if row["why"]:
            typer.echo(row["why"])


def verify(
    folder: Where,
    which: Annotated[str | None, typer.Argument(metavar="ID", help=ID + " Default: all.")] = None,
    app: App = None,
) -> None:
    """Reads every byte of a checkpoint, or of all, and compares the checksums. The status is 1 if one is damaged."""
    from windlass._checkpoint.folder import Folder
    from windlass._checkpoint.reader import Checkpoint
    from windlass.observe.picture import size

    at = Folder(folder)
    places = [_find(at, app, which)] if which is not None else [p for name in _apps(at, app) for p in at.places(name)]
    damaged = 0
    for place in places:
        if which is None and not at.entry(place).complete:
            typer.echo(f"{place.path}: half-written")
            continue
        try:
            n = Checkpoint.open(at, place).verify()
            typer.echo(f"{place.path}: good, {size(n)}")
        except CorruptCheckpoint as error:
            damaged += 1
            typer.echo(f"{place.path}: damaged: {error}", err=True)
    raise typer.Exit(1 if damaged else 0)


def export(
    folder: Where,
    which: Annotated[str | None, typer.Argument(metavar="ID", help=ID + " Default: the newest.")] = None,
    to: Annotated[
        str, typer.Option("--to", metavar="FILE", help="A file that ends in .safetensors, or a URL of one.")
    ] = "",
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Without the state of rules.")] = False,
    names: Annotated[
        list[str] | None, typer.Option("--name", help="Of a tensor or table; may be repeated. Default: all.")
    ] = None,
    app: TheApp = None,
) -> None:
    """Writes a checkpoint as plain safetensors, under the names that the script knows."""
    from windlass._checkpoint.export import export as write
    from windlass._checkpoint.folder import Folder
    from windlass._checkpoint.reader import Checkpoint, newest

    if not to:
        raise InvalidArgument("windlass checkpoint export needs --to FILE")
    at = Folder(folder)
    if which is not None:
        checkpoint = Checkpoint.open(at, _find(at, app, which))
    else:
        name = _only_app(at, app)
        good, passed = newest(at, name)
        for one in passed:
            typer.echo(f"passed over {one.place.path}: {one.why}", err=True)
        if good is None:
            raise InvalidArgument(f"{at.store.url}: app {name!r} has no good checkpoint of all its objects")
        checkpoint = good
    for file in write(checkpoint, to, weights_only=weights_only, names=names or None):
        typer.echo(f"{checkpoint.place.path}: {file}")


def rm(
    folder: Where,
    which: Annotated[str, typer.Argument(metavar="ID", help=ID)],
    app: TheApp = None,
) -> None:
    """Removes a checkpoint."""
    from windlass._checkpoint.folder import Folder

    at = Folder(folder)
    place = _find(at, app, which)
    at.remove(place)
    typer.echo(f"{place.path}: removed")


def _row(at: "Folder", place: "Place") -> dict[str, Any]:
    from windlass._checkpoint.reader import Checkpoint

    entry = at.entry(place)
    row: dict[str, Any] = {"app": place.app, "id": place.id, "clock": place.clock, "bytes": entry.bytes}
    row |= {"created": None, "objects": None, "tag": None, "state": "half-written", "why": None}
    if entry.complete:
        try:
            manifest = at.manifest(entry)
            row |= {"created": manifest.created, "tag": manifest.tag}
            row["objects"] = [one.name for one in manifest.objects]
            Checkpoint(at, entry, manifest)
            row["state"] = "some objects" if manifest.partial else "complete"
        except CorruptCheckpoint as error:
            row |= {"state": "damaged", "why": str(error)}
    return row


def _apps(at: "Folder", app: str | None) -> list[str]:
    return at.apps() if app is None else [app]


def _only_app(at: "Folder", app: str | None) -> str:
    if app is not None:
        return app
    apps = at.apps()
    if len(apps) != 1:
        raise InvalidArgument(f"{at.store.url}: name one of its {len(apps)} apps with --app: {', '.join(apps)}")
    return apps[0]


def _find(at: "Folder", app: str | None, which: str) -> "Place":
    from windlass._checkpoint.reader import find

    return find(at, _only_app(at, app), which)


def add_to(app: typer.Typer) -> None:
    """Makes them commands of `windlass checkpoint`."""
    for command in (save, ls, verify, export, rm):
        app.command()(plainly(command))
