"""Versions: what a pull has seen of each shard."""

import dataclasses

import numpy as np


@dataclasses.dataclass(slots=True, repr=False, unsafe_hash=True)  # frozen ones take twice as long to make
class Version:
    """What a pull has seen, for a later ``pull_newer()``. A value: equal if the same was seen."""

    tensor: str  #: the name of the tensor
    of: bytes  #: per shard, in uint64: 0, or 1 and how many updates it has had

    def __repr__(self) -> str:
        seen = np.frombuffer(self.of, np.uint64)
        return f"<Version of {len(seen)} shards, {sum(int(x) - 1 for x in seen if x)} updates>"
