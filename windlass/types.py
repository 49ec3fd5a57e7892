"""Types of what calls return: users write them in annotations at most, and make none of their own."""

from windlass._client.all_reduce import Reduction
from windlass._client.buffer_ring import Slots
from windlass._client.local_steps import Elastic, Local
from windlass._client.saving import Resumed, SavedCheckpoint
from windlass._data.lease import Lease
from windlass._errors import NotApplied
from windlass._objects.delay import Delayed
from windlass._objects.expressions import Expression
from windlass._objects.future import Future, Seen
from windlass._objects.named import ObjectInfo
from windlass._objects.query import Histogram, TopK
from windlass._objects.row_state import ChunkWithState
from windlass._objects.snapshot import Snapshot
from windlass._objects.step import Step
from windlass._objects.table import Chunk
from windlass._objects.tensor import Pulled
from windlass._objects.version import Version
from windlass._rules.functions import Part

__all__ = [
    "Chunk",
    "ChunkWithState",
    "Delayed",
    "Elastic",
    "Expression",
    "Future",
    "Histogram",
    "Lease",
    "Local",
    "NotApplied",
    "ObjectInfo",
    "Part",
    "Pulled",
    "Reduction",
    "Resumed",
    "SavedCheckpoint",
    "Seen",
    "Slots",
    "Snapshot",
    "Step",
    "TopK",
    "Version",
]
