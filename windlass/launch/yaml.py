"""Writes YAML: mappings, lists, texts, whole numbers, booleans, for people to read and programs to parse."""

import json
import re
from collections.abc import Iterator
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/](?:[A-Za-z0-9_./@=+-]|:(?=[^\s]))*")  # no number begins so, and nothing here is syntax
_WORDS = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}  # that are no text to one parser or another
_HIDDEN = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\ufffe\uffff]")  # that YAML wants escaped


def to_yaml(value: Any) -> str:
    """One document, with a line's end at its end."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            if _is_nested(inner):
                yield f"{_scalar(key)}:"
                yield from (f"  {line}" for line in _lines(inner))
            else:
                yield f"{_scalar(key)}: {_scalar(inner)}"
    elif isinstance(value, list) and value:
        for inner in value:
            first, *rest = _lines(inner)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _scalar(value)


def _is_nested(value: Any) -> bool:
    return isinstance(value, (dict, list)) and bool(value)


def _scalar(value: Any) -> str:
    if isinstance(value, bool) or value is None or value in ({}, []) or isinstance(value, int):
        return json.dumps(value)
    if not isinstance(value, str):
        raise TypeError(f"expected a mapping, a list, a text, a whole number or a boolean, not {value!r}")
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
