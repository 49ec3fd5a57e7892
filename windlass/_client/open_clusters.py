"""The clusters that are open in this process: which one is the default, and how all of them end with the process."""

import contextlib
import os
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING

from windlass._errors import InvalidArgument, WindlassError

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster

_open: "weakref.WeakSet[Cluster]" = weakref.WeakSet()
_made_by_default: "list[Cluster]" = []
_lock = threading.RLock()  # of both; whoever makes the default cluster has it while that is noted


def note(cluster: "Cluster") -> None:
    """Remembers a cluster for as long as somebody refers to it."""
    with _lock:
        _open.add(cluster)


def default_cluster() -> "Cluster":
    """The cluster of this process: the one that connect() made and that is open, or one made now."""
    with _lock:
        found = [one for one in _open if not (one._further or one._engine.forked or one._engine.closed)]
        if len(found) > 1:
            raise InvalidArgument(f"cluster: this process has {len(found)} open clusters; say which one with cluster=")
        if not found:
            from windlass._client.connect import connect

            _made_by_default[:] = found = [connect()]
        return found[0]


def _others_inside() -> bool:
    """Whether another thread is in one of our calls."""
    here, me = os.path.dirname(os.path.dirname(__file__)), threading.get_ident()
    frames = sys._current_frames().items()
    return any(frame.f_code.co_filename.startswith(here) for thread, frame in frames if thread != me)


def close_all(failed: bool | None = None) -> None:
    """Ends requests under way before the interpreter frees their memory.

    failed: whether the worker has; None: if there was a traceback.

    Waits for daemon threads to leave our calls, too: the interpreter ends a thread that returns to it too late, and
    leaving a C++ function that way ends the process.
    """
    with _lock:
        clusters = list(_open)
        _made_by_default.clear()
    if failed is None:
        failed = hasattr(sys, "last_value") and not hasattr(sys, "ps1")  # a traceback, and no interactive session
    for cluster in clusters:
        with contextlib.suppress(WindlassError):
            cluster._close(5.0, failed=failed)
    control = sys.modules.get("windlass.control.member")  # only where there is a scheduler
    dropped = control is not None and control.close_all(failed, 5.0)  # clusters that nobody refers to any more
    deadline = time.monotonic() + 1.0
    while (clusters or dropped) and _others_inside() and time.monotonic() < deadline:
        time.sleep(0.001)
