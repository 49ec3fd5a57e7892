"""Checkpoints as tests make them: what was put in, to compare with what comes out."""

import dataclasses
import itertools
from typing import Any

import msgspec
import numpy as np

from windlass._checkpoint.folder import Folder
from windlass._checkpoint.layout import Facts, Manifest, Object, Record, opaque
from windlass._checkpoint.names import Place
from windlass._checkpoint.reader import Checkpoint
from windlass._checkpoint.writer import ServerFiles, write_manifest

Arrays = dict[str, np.ndarray[Any, Any]]
TENSOR, TABLE = "default/w", "default/user"
_ids = itertools.count(1)


@dataclasses.dataclass
class Made:
    """A checkpoint, and what is in each shard."""

    folder: Folder
    place: Place
    manifest: Manifest
    shards: dict[tuple[str, int], Arrays]

    @property
    def path(self) -> Any:
        """Of its files; of a local folder."""
        import pathlib

        return pathlib.Path(self.folder.where(self.place))


def tensor_shard(shard: int, n: int = 5) -> Arrays:
    rng = np.random.default_rng([1, shard])
    return {name: rng.standard_normal(n).astype(np.float32) for name in ("weights", "momentum")}


def table_shard(shard: int, n: int = 3, dim: int = 2) -> Arrays:
    rng = np.random.default_rng([2, shard])
    return {
        "keys": rng.integers(0, 2**64, n, np.uint64),
        "updates": rng.integers(0, 2**32, n, np.uint32),
        "touched": rng.integers(0, 2**32, n, np.uint32),
        "weights": rng.standard_normal((n, dim)).astype(np.float32),
        "sum": rng.standard_normal((n, dim)).astype(np.float32),
    }


def facts(object: str, shard: int, arrays: Arrays) -> Facts:
    return Facts(
        version=shard + 1,
        count=7,
        rows=len(arrays.get("keys", ())),
        made=shard,
        fingerprint=2**64 - 1 - shard,
        records=[Record(0, 2**64 - 1, 3, 4), Record(1, 5, 6, 7)],
    )


def new_place(clock: int = 12, app: str = "default") -> Place:
    return Place(app, clock, f"{next(_ids):016x}")


def make(
    folder: Folder,
    *,
    clock: int = 12,
    app: str = "default",
    created: float = 1.7e9,
    servers: int = 2,
    finish: bool = True,
    block_bytes: int = 128,
    **about: Any,
) -> Made:
    """A tensor of two shards and a table of three, one of them empty, by two servers; in blocks of a few numbers."""
    place = new_place(clock, app)
    shards = {(TENSOR, i): tensor_shard(i) for i in range(2)}
    shards |= {(TABLE, i): table_shard(i, 3 if i else 0) for i in range(3)}
    refs = []
    for server in range(servers):
        files = ServerFiles(folder, place, server, block_bytes=block_bytes)
        for (object, shard), arrays in shards.items():
            if shard % servers == server:
                files.add(object, shard, arrays)
                files.shard_done(object, shard, facts(object, shard, arrays))
        refs.append(files.finish())
    manifest = Manifest(
        id=place.id,
        app=app,
        clock=clock,
        created=created,
        windlass="0.1.0",
        objects=[
            Object(TENSOR, "tensor", "F32", [2, 5], 2, b"a spec", "tensor (2, 5) float32, SGD"),
            Object(TABLE, "table", "F32", [2], 3, b"\0\xff", "table, dim 2"),
        ],
        indexes=refs,
        ledgers=opaque({"data": [[0, 5]]}),
        extra={"0": opaque({"epoch": 3})},
    )
    manifest = msgspec.structs.replace(manifest, **about)
    if finish:
        write_manifest(folder, manifest)
    return Made(folder, place, manifest, shards)


def content(checkpoint: Checkpoint) -> dict[tuple[str, int], Arrays]:
    """All shards of a checkpoint, each put together from its pieces."""
    found: dict[tuple[str, int], Arrays] = {}
    for object in checkpoint.objects:
        for shard in checkpoint.shards(object):
            whole = {array.name: np.zeros(array.shape, _dtype(array.dtype)) for array in shard.arrays}
            for piece in checkpoint.read_shard(object, shard.shard):
                for name, array in piece.arrays.items():
                    whole[name][piece.offset : piece.offset + len(array)] = array
            found[object, shard.shard] = whole
    return found


def equal(one: dict[tuple[str, int], Arrays], other: dict[tuple[str, int], Arrays]) -> bool:
    """Whether all numbers are, bit by bit."""
    if one.keys() != other.keys():
        return False
    return all(
        a.keys() == b.keys()
        and all(
            a[name].dtype == b[name].dtype and a[name].shape == b[name].shape and a[name].tobytes() == b[name].tobytes()
            for name in a
        )
        for a, b in ((one[key], other[key]) for key in one)
    )


def _dtype(name: str) -> str:
    from windlass._checkpoint.layout import DTYPES

    return DTYPES[name]
