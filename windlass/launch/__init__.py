"""Starting clusters: one machine by `windlass run`, several by an engine, by hand or by environment."""

import os
import time

#: The exit code of a server or scheduler that cannot begin as it is told to: nor could another.
CANNOT_BEGIN = 2
ENDING = "ending"  # a file in a run's folder, since its launcher ends what is left: workers hold for nothing

#: The exit code of a scheduler whose workers are done, but some were lost and nobody came in their place.
WORKERS_LOST = 3

#: The exit code of a worker that ends because another one is lost, without which it could only wait: all must end.
GROUP_LOST = 76

#: How Ray places servers and workers, the usual one first.
STRATEGIES = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")

_ECHO_SECONDS = 1.0


def is_echo(first: float) -> bool:
    """Whether a signal that comes now is the one that came at `first`, a time of ``time.monotonic()``.

    A task of an engine passes SIGTERM on to the processes that it has started. Some engines have sent it to these, too.
    """
    return bool(os.environ.get("WINDLASS_TASKS")) and time.monotonic() - first < _ECHO_SECONDS
