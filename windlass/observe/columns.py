"""Tables for people that fit the width they have: nothing in them is cut.

A table that is too wide goes on under itself, with its first columns again:

    servers   server  address                pid   memory     shards
              0       tcp://127.0.0.1:43211  4711  1.2 of 8 GB     3

              server  requests  in      out
              0           9710  1.2 MB  3.4 GB

A column that is text may be broken over lines, as may names and whatever else is wider than all there is.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

_GAP = 2
_TEXT_WIDTH_MIN = 24  # a text that is broken over lines has at least this
_KEY_WIDTH_MIN = 8


@dataclasses.dataclass(frozen=True)
class Column:
    """Its name, and how it is shown."""

    name: str
    number: bool = False  #: aligned to the right
    text: bool = False  #: may be broken over lines


@dataclasses.dataclass(frozen=True)
class _Sized:
    column: Column
    cells: list[str]
    width: int


def tables(
    title: str, columns: Sequence[Column], rows: Sequence[Sequence[object]], width: int, keys: int = 1
) -> list["RenderableType"]:
    """The table, in as many parts as it takes; nothing if it has no rows. keys: how many first columns come again.

    A column all of whose cells are empty is left out.
    """
    from rich.text import Text

    all_cells = [[str(cell) for cell in cells] for cells in zip(*rows, strict=True)] if rows else []
    sized = [_sized(column, cells) for column, cells in zip(columns, all_cells, strict=False) if any(cells)]
    parts: list[RenderableType] = []
    for part in _parts(sized, width, keys):
        parts += [Text(""), *([] if parts else [Text(title, style="bold")]), _table(part)]
    return parts


def _sized(column: Column, cells: list[str]) -> _Sized:
    from rich.cells import cell_len

    return _Sized(column, cells, max(map(cell_len, [column.name, *cells])))


def _parts(columns: list[_Sized], width: int, keys: int) -> list[list[_Sized]]:
    first = columns[:keys]
    while sum(one.width for one in first) > max(width // 2, keys * _KEY_WIDTH_MIN):
        at = max(range(len(first)), key=lambda i: first[i].width)  # the widest is broken over lines
        first = [dataclasses.replace(one, width=one.width - (i == at)) for i, one in enumerate(first)]
    room = width - sum(one.width + _GAP for one in first)
    parts: list[list[_Sized]] = []
    left = 0
    for one in columns[keys:]:
        least = min(one.width, _TEXT_WIDTH_MIN if one.column.text else one.width)
        if not parts or left < least:
            parts.append(list(first))
            left = room
        used = min(one.width, left)
        parts[-1].append(dataclasses.replace(one, width=used))
        left -= used + _GAP
    return parts or ([first] if first else [])


def _table(columns: list[_Sized]) -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for one in columns:
        made.add_column(Text(one.column.name, style="dim"), width=one.width, overflow="fold")
        made.columns[-1].justify = "right" if one.column.number else "left"
    for row in zip(*(one.cells for one in columns), strict=True):
        made.add_row(*map(Text, row))
    return made
