"""The end of a process: whoever still owns a native object lets go of it.

C++ code can keep Python objects where the collector does not look. The usual case is torch's graph: ::

    loss (a global) -> nodes of the graph, in C++ -> ctx of an autograd.Function -> table
                                                  -> the function's module -> all its globals -> loss

Such a circle is never freed, and what it reaches is there when the interpreter has ended; nanobind reports native
objects among it as leaked, and rightly. The circle is not ours to cut. So the last thing that we do in a process is to
take the native objects away from those who own them: they are freed as usual, and calls raise Closed from then on.

Owners are found by going through what the collector knows, once: a register of them would cost every future and every
``tensor[rows]`` as much as the rest of the call.
"""

import atexit
import gc
from collections.abc import Callable
from typing import Any, TypeVar

from windlass._errors import Closed

C = TypeVar("C", bound=type)
_owners: dict[type, tuple[str, ...]] = {}  # classes, and the attributes in which they have native objects


def owns_native(*attributes: str) -> Callable[[C], C]:
    """A decorator: objects of this class have native objects in these attributes, and nowhere else."""

    def note(owner: C) -> C:
        _owners[owner] = attributes
        return owner

    return note


class Released:
    """Stands where a native object was."""

    closed = True
    forked = False

    def done(self) -> bool:
        """Of a future: nothing is under way any more."""
        return True

    def __getattr__(self, name: str) -> Any:
        raise Closed("the cluster has been closed: the process is ending")


_RELEASED = Released()


@atexit.register  # before those of our other modules, which use this one; so it is called after them
def release_all() -> None:
    """Takes all native objects from their owners."""
    gc.unfreeze()  # what was frozen would not be found
    for thing in [thing for thing in gc.get_objects() if type(thing) in _owners]:
        for attribute in _owners[type(thing)]:
            if getattr(thing, attribute, None) is not None:
                setattr(thing, attribute, _RELEASED)
