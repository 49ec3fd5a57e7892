"""Every error that Windlass raises.

WindlassError
├── InvalidArgument (ValueError)        a value that can never be right
├── ShapeMismatch (TypeError)           an array of another shape or layout than the object's
├── SpecMismatch (ValueError)           an object opened with another spec than it was created with
├── NotFound (KeyError)                 no such object
│   └── Deleted                         an object that somebody has deleted since it was opened
├── Closed                              the cluster has been closed
├── Timeout (TimeoutError)              the caller's time was up first
├── RankTaken (ValueError)              a rank, or a server's number, that another process has
├── BufferInUse                         a registered array that an earlier request still has
├── ResourceExhausted (MemoryError)     a limit on memory or count was reached
├── NonFinite (ValueError)              NaN or infinity where reject_nonfinite=True
├── ForkedProcess                       a cluster used in the child of a fork
├── ServerLost (ConnectionError)        a server that cannot be reached, or came back without what it held
├── AccessDenied (PermissionError)      a token that is missing or wrong, or a reader that would change something
├── ProtocolError                       a peer that does not speak as it should
├── StaleMap                            a shard that is on another server than this client thinks
├── Cancelled                           a request that was taken back
├── WouldDeadlock                       waiting for what only the caller itself can bring about
├── CorruptCheckpoint (ValueError)      a file of a checkpoint that is damaged, cut off, or of another version
├── StorageFailed (OSError)             a folder of checkpoints that cannot be read or written
├── FunctionFailed                      a rule or function of the user's raised on a server, or took too long
└── InternalError                       a bug in Windlass

A message says which object, what was expected and what was seen. The error of a push that some shards refused lists in
`not_applied` what they have nothing of.
"""

import dataclasses
from typing import Any

from windlass import _core


@dataclasses.dataclass(frozen=True, eq=False)
class NotApplied:
    """What a push brought that was refused: the servers applied nothing of it, and everything else.

    ``push(..., only=this)`` with the same arrays sends it again, and nothing else.
    """

    name: str  #: of the tensor or table
    request: int  #: which one of its step, counted from 0; 0 for a push by itself
    keys: Any  #: of a table: the keys, as uint64; of a tensor: None
    positions: Any  #: of a table: where they were in the push; of a tensor: None
    ranges: list[tuple[int, int]] | None  #: of a tensor: first element and end of each range of it; of a table: None
    _shards: list[int] = dataclasses.field(repr=False)

    def _of(self, name: str, what: str) -> list[int]:
        """Its shards, if it is about this object."""
        if self.name != name.rpartition("/")[2]:
            raise InvalidArgument(f"push of {what}: only= is about {self.name!r}")
        return self._shards


class WindlassError(Exception):
    """The root of every error that Windlass raises."""

    _refused: list[tuple[str, bool, int, bytes, bytes, bytes]] = []  # the core's words

    @property
    def not_applied(self) -> list[NotApplied]:
        """Of a push, or a step: what some shards refused, an entry per push. Empty where nothing is known of any."""
        import numpy as np

        found = []
        for name, is_table, request, shards, places, keys in self._refused:
            at = np.frombuffer(places, np.uint64).astype(np.int64)
            ranges = [(int(first), int(first + n)) for first, n in at.reshape(-1, 2)] if not is_table else None
            found.append(
                NotApplied(
                    name,
                    request,
                    np.frombuffer(keys, np.uint64).copy() if is_table else None,
                    at if is_table else None,
                    ranges,
                    np.frombuffer(shards, np.uint32).tolist(),
                )
            )
        return found


class InvalidArgument(WindlassError, ValueError):
    """A value that can never be right."""


class ShapeMismatch(WindlassError, TypeError):
    """An array of another shape, dtype or layout than the object's."""


class SpecMismatch(WindlassError, ValueError):
    """An object opened with another spec than it was created with."""


class NotFound(WindlassError, KeyError):
    """No such object."""

    def __str__(self) -> str:  # KeyError would show the repr
        return Exception.__str__(self)


class Deleted(NotFound):
    """An object that somebody has deleted since it was opened: ``cluster.delete()``."""


class Closed(WindlassError):
    """The cluster has been closed."""


class Timeout(WindlassError, TimeoutError):
    """The caller's time was up first. A push goes on; its future can be waited for again."""


class RankTaken(WindlassError, ValueError):
    """A rank, or a server's number, that another process has. Joining has tried again for long enough that one which
    had died would have been noticed."""


class BufferInUse(WindlassError):
    """A registered array that an earlier request still has."""


class ResourceExhausted(WindlassError, MemoryError):
    """A limit on memory or count was reached."""


class NonFinite(WindlassError, ValueError):
    """NaN or infinity in a push to an object with reject_nonfinite=True."""


class ForkedProcess(WindlassError):
    """A cluster used in the child of a fork."""


class ServerLost(WindlassError, ConnectionError):
    """A server that cannot be reached, or came back without what it held."""


class AccessDenied(WindlassError, PermissionError):
    """A token that is missing or wrong."""


class ProtocolError(WindlassError):
    """A peer that does not speak as it should."""


class StaleMap(WindlassError):
    """A shard that is on another server than this client thinks."""


class Cancelled(WindlassError):
    """A request that was taken back with ``Future.cancel()``."""


class WouldDeadlock(WindlassError):
    """Waiting for what only the caller itself can bring about: a push under BSP whose iteration it has not closed."""


class FunctionFailed(WindlassError):
    """A rule or function of the user's raised on a server, or took too long there. The traceback is in its log."""


class CorruptCheckpoint(WindlassError, ValueError):
    """A file of a checkpoint that is damaged, cut off, or of another version; nothing of it was used."""


class StorageFailed(WindlassError, OSError):
    """A folder of checkpoints that cannot be read or written: a full disk, no permission, nobody there."""


class CheckpointFailed(WindlassError):
    """A checkpoint that was begun and given up; the one before stays, and training goes on."""


class InternalError(WindlassError):
    """A bug in Windlass; please report it."""


# By the code of the core's Status (csrc/base/status.h); the first stands for "ok" and is never raised.
ERRORS: list[type[WindlassError]] = [
    InternalError,
    InvalidArgument,
    ShapeMismatch,
    SpecMismatch,
    NotFound,
    Closed,
    Timeout,
    BufferInUse,
    ResourceExhausted,
    NonFinite,
    ForkedProcess,
    ServerLost,
    AccessDenied,
    ProtocolError,
    ProtocolError,  # a wrong checksum, which the client repairs by itself
    ProtocolError,  # pushes out of order, likewise
    StaleMap,
    Cancelled,
    WouldDeadlock,
    InternalError,
    FunctionFailed,
    Deleted,
]
_core.set_errors(ERRORS)
