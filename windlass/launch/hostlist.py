"""How Slurm writes lists of hosts: ``gpu[01-03,7],login,r[1-2]n[1-4]``. And, alike, lists of numbers."""

import itertools
import re
from collections.abc import Iterator

from windlass._errors import InvalidArgument

HOSTS_MAX = 1 << 17  # of one list
_PARTS = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_TIMES = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand_hosts(text: str) -> list[str]:
    """All hosts, in the order in which the list names them."""
    what = f"list of hosts {text!r}"
    hosts: list[str] = []
    for item in _split(text, what):
        parts = []
        for inside, plain in (match.groups() for match in _PARTS.finditer(item)):
            parts.append([plain] if plain is not None else list(_numbers(inside, what)))
        count = 1
        for part in parts:
            count *= len(part)
        if len(hosts) + count > HOSTS_MAX:
            raise InvalidArgument(f"{what}: more than {HOSTS_MAX} hosts")
        hosts += map("".join, itertools.product(*parts))
    return hosts


def expand_numbers(text: str, what: str) -> list[int]:
    """Of ``12000-12003,12007``."""
    return [int(number) for number in _numbers(text, f"{what}={text!r}")]


def expand_counts(text: str, what: str) -> list[int]:
    """Of ``2(x3),1``: how many tasks are on each node."""
    counts: list[int] = []
    for item in text.split(","):
        if (match := _TIMES.fullmatch(item)) is None or int(match[2] or 1) > HOSTS_MAX:
            raise InvalidArgument(f"{what}={text!r}: expected counts such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _split(text: str, what: str) -> list[str]:
    """At the commas that are outside of brackets."""
    items, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            break
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    if depth or not all(items):
        raise InvalidArgument(f"{what}: expected names such as node[01-03,7],login")
    return items


def _numbers(text: str, what: str) -> Iterator[str]:
    """With the zeros in front that the first of a range has."""
    for item in text.split(","):
        match = _RANGE.fullmatch(item)
        first, last = (match[1], match[2] or match[1]) if match is not None else ("1", "0")
        if not int(first) <= int(last) < int(first) + HOSTS_MAX:
            raise InvalidArgument(f"{what}: expected numbers and ranges of them such as 01-03, not {item!r}")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))
