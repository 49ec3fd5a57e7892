"""The user's functions that read: servers call them with their shards, and the results are merged here.

@wl.function
def far(part, limit):
    return part.keys[np.linalg.norm(part.weights, axis=1) > limit]

@far.merge
def far_keys(results):
    return np.concatenate(results)

keys = table.call(far, 3.0)
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from windlass._errors import InvalidArgument
from windlass._net.value_codec import pack, unpack

if TYPE_CHECKING:
    from windlass._rules.user_code import RunningCall


@dataclasses.dataclass(frozen=True)
class Part:
    """What a function gets: a private copy of some rows, as they were at one moment."""

    weights: "np.ndarray[Any, Any]"  #: (n, dim) of a table, (n, row) of a tensor; (n, 1) where rows are cut
    keys: "np.ndarray[Any, np.dtype[np.uint64]] | None"  #: (n,) of a table
    first: int  #: of a tensor: the number of its first element in the whole tensor, flat
    shard: int  #: which shard they are of


class Function:
    """What ``@wl.function`` makes of a function."""

    def __init__(self, function: Callable[..., Any], merge: Callable[[list[Any]], Any] | None) -> None:
        if not callable(function):
            raise InvalidArgument(f"function: expected a function, not {function!r}")
        if not inspect.signature(function).parameters:
            raise InvalidArgument(f"function {function.__qualname__!r}: expected a first parameter, some rows")
        self.__name__ = function.__name__
        self.__qualname__ = function.__qualname__
        self.__module__ = function.__module__
        self.__doc__ = function.__doc__
        self._function, self._merge = function, merge

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function itself, here."""
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<function {self.name} for servers>"

    @property
    def name(self) -> str:
        """Its module and name."""
        return f"{self.__module__}:{self.__qualname__}"

    def merge(self, merge: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Decorates the function that makes one result of many; it runs in the calling process."""
        self._merge = merge
        return merge

    def _gather(self, results: list[bytes], what: str) -> Any:
        found = [unpack(result, f"{what}: a result") for result in results]
        return found if self._merge is None else self._merge(found)

    def _run(self, running: "RunningCall") -> None:
        """Runs it, on a server."""
        call = running.native
        what = f"{call.what}: function {self.name!r}"
        args, kwargs = unpack(call.arguments, f"{what}: its arguments")
        numbers: Any = call.numbers
        keys: Any = call.keys
        part = Part(numbers, keys, call.first, call.shard)
        del call
        result = pack(self._function(part, *args, **kwargs), f"{what}: its result")
        running.native.give(result)


@overload
def function(function: Callable[..., Any]) -> Function: ...


@overload
def function(
    function: None = None, *, merge: Callable[[list[Any]], Any] | None = None
) -> Callable[[Callable[..., Any]], Function]: ...


def function(
    function: Callable[..., Any] | None = None, *, merge: Callable[[list[Any]], Any] | None = None
) -> Function | Callable[[Callable[..., Any]], Function]:
    """Makes a function of a ``Part`` one that servers can be asked to call: ``table.call(count, 0.5)``.

    It is called once per shard of a tensor, and on a table once per at most 16 MB of a shard's rows. What it returns
    travels: None, numbers, texts, lists, dicts and numpy arrays, at most 16 MB. `merge` makes one result of the list of
    them, in the order of shards; without it the list is the result. It runs on a copy: training goes on meanwhile.

    Servers in processes of their own import it: its module must be one that they allow (``--allow``).
    """

    def decorate(function: Callable[..., Any]) -> Function:
        return Function(function, merge)

    return decorate if function is None else decorate(function)
