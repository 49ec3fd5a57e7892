"""Windlass: a parameter server for machine learning.

import windlass as wl

cluster = wl.connect()
w = cluster.tensor("w", (784, 10), rule=wl.SGD(lr=0.1))
weights = w.push_pull(gradient)
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from windlass._public import *  # noqa: F403
    from windlass._public import __all__ as __all__

__version__ = "0.1.0"


def __getattr__(name: str) -> _Any:
    """All names are imported when the first is used: servers and the scheduler begin without, in half the time.
    ``windlass.data`` is apart, and so are ``windlass.ray`` and ``windlass.torch``, which are extras."""
    if name in ("data", "ray", "torch"):
        return _importlib.import_module(f"windlass.{name}")
    if name == "__all__" or not name.startswith("_"):
        public = _importlib.import_module("windlass._public")
        if name in ("__all__", *public.__all__, "types"):
            found = globals()[name] = getattr(public, name)
            return found
    raise AttributeError(f"module 'windlass' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__"), "data", "ray", "torch", "types"})
