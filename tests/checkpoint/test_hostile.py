"""S5, S6: whoever makes checkpoints to harm their readers gets typed errors, and little memory."""

import copy
import json
import os
import pathlib
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
from forge import BLOCK, INDEX, Change, changed, forge_block, forge_head, forge_index, forge_manifest, seal, write
from made import TENSOR, Made, content, make

import windlass as wl
from windlass._checkpoint.folder import Folder
from windlass._checkpoint.names import MANIFEST
from windlass._checkpoint.reader import Checkpoint, newest

#: What a reader may take: for the JSON of a file several times its bytes, for its numbers the bytes themselves.
TIMES, MORE = 24, 1 << 20
NAME = f"{TENSOR}#0.0/weights"
DEEP = b"[" * 200_000 + b"]" * 200_000


def read_all(made: Made) -> None:
    content(Checkpoint.open(made.folder, made.place))


def refused(made: Made, file: str) -> str:
    """The reader's error, which names the file; it may not take much memory over it."""
    before = sum(path.lstat().st_size for path in made.path.iterdir() if path.is_file())
    tracemalloc.start()
    try:
        with pytest.raises(wl.CorruptCheckpoint) as caught:
            read_all(made)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert file in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert peak < TIMES * before + MORE, f"{peak} bytes for {before}"
    assert newest(made.folder, "default").checkpoint is None or file == BLOCK
    return str(caught.value)


def entry(**other: Any) -> Change:
    return lambda head: head[NAME].update(other)


@pytest.mark.parametrize("length", [0, 1, 7, 100, 2**24 + 1, 2**31, 2**32 + 8, 2**63, 2**64 - 1])
def test_a_head_of_any_length_is_checked_before_it_is_read(made: Made, length: int):
    data = (made.path / BLOCK).read_bytes()
    forge_block(made, length.to_bytes(8, "little") + data[8:])
    refused(made, BLOCK)


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\0" * 8, b"\x02\0\0\0\0\0\0\0{}"])
def test_a_block_too_short_for_its_arrays_is_refused(made: Made, data: bytes):
    forge_block(made, data)
    refused(made, BLOCK)


@pytest.mark.parametrize(
    "change",
    [
        entry(shape=[2**63]),
        entry(shape=[2**62, 2**62]),
        entry(shape=[0, 2**62, 2**62]),
        entry(shape=[2] * 17),
        entry(shape=[-5]),
        entry(shape=[5.0]),
        entry(shape=[6]),
        entry(shape=[]),
        entry(shape="5"),
        entry(dtype="F128"),
        entry(dtype="I32"),
        entry(dtype="F32" * 100_000),
        entry(data_offsets=[0, 40]),
        entry(data_offsets=[20, 0]),
        entry(data_offsets=[1, 21]),
        entry(data_offsets=[2**63, 2**63 + 20]),
        entry(data_offsets=[0]),
        entry(more=1),
        lambda head: head.pop(NAME) and None,
        lambda head: head.update({"../../x": head.pop(NAME)}),
        lambda head: head.update({"x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}),
        lambda head: head.update({"x": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}),
        lambda head: head.update(__metadata__={"a": "b"}),
        lambda head: b"{}",
        lambda head: b"[]",
        lambda head: b"",
        lambda head: b'{"a":' * 100_000,
        lambda head: b"{" + b'"a":{},' * 100_000 + b'"a":{}}',
        lambda head: b'{"a":{"dtype":"F32","shape":[1' + b"0" * 100_000 + b'],"data_offsets":[0,1]}}',
        lambda head: b'{"\xff":{}}',
        lambda head: b'{"\\ud800":{}}',
        lambda head: DEEP,
    ],
)
def test_a_head_that_lies_is_refused(made: Made, change: Change):
    forge_head(made, change)
    refused(made, BLOCK)


def block(**other: Any) -> Change:
    return lambda index: index["blocks"][0].update(other)


def shard(**other: Any) -> Change:
    return lambda index: index["shards"][0].update(other)


def piece(**other: Any) -> Change:
    return lambda index: index["shards"][0]["pieces"][0].update(other)


@pytest.mark.parametrize(
    "change",
    [
        block(name="../x"),
        block(name="/etc/passwd"),
        block(name="server-0-0001.safetensors"),
        block(name="server-1-0000.safetensors"),
        block(name=MANIFEST),
        block(bytes=2**62),
        block(bytes=-1),
        block(crc32c=2**32),
        shard(object="default/other"),
        shard(object="../../x"),
        shard(shard=2),
        shard(shard=1),
        shard(shard=2**64),
        shard(pieces=[]),
        shard(arrays=[]),
        shard(facts={"version": 2**64}),
        shard(facts={"records": [[1, 2, 3, 4]]}),
        shard(more=1),
        piece(block=9),
        piece(block=2**63),
        piece(name="../x"),
        piece(arrays=["weights", "weights"]),
        piece(arrays=[]),
        piece(arrays=["other"]),
        piece(offset=1),
        piece(length=2**63),
        piece(length=4),
        lambda index: index["shards"][0]["arrays"][0].update(shape=[5, 2**40]),
        lambda index: index["shards"][0]["arrays"][0].update(shape=[5, 2**40, 2**40]),
        lambda index: index["shards"].append(index["shards"][0]),
        lambda index: index["shards"].pop() and None,
        lambda index: index["shards"][0]["pieces"].append(index["shards"][0]["pieces"][0]),
        lambda index: index["shards"][0]["arrays"][0].update(shape=[2**63]),
        lambda index: index["shards"][0]["arrays"][0].update(shape=[]),
        lambda index: index["shards"][0]["arrays"][0].update(name="a/b"),
        lambda index: index.update(id="0" * 16),
        lambda index: index.update(server=1),
        lambda index: index.update(blocks=[]),
        lambda index: b"[" + b"0," * 500_000 + b"0]",
        lambda index: b'{"format_version":1,"shards":[' + b"{}," * 300_000 + b"{}]}",
        lambda index: b'{"format_version":1,"id":' + DEEP + b"}",
        lambda index: b'{"format_version":1,"more":' + DEEP + b"}",
        lambda index: b"",
    ],
)
def test_an_index_that_lies_is_refused(made: Made, change: Change):
    forge_index(made, change)
    error = refused(made, str(made.path))
    assert INDEX in error or BLOCK in error or "is in no index" in error


def index(**other: Any) -> Change:
    return lambda manifest: manifest["indexes"][0].update(other)


def object_(**other: Any) -> Change:
    return lambda manifest: manifest["objects"][0].update(other)


@pytest.mark.parametrize(
    "change",
    [
        index(name="../../../etc/passwd"),
        index(name="server-0-0000.safetensors"),
        index(name="server-1.index.json"),
        index(server=2**62),
        index(server=1),
        index(bytes=2**62),
        index(bytes=-1),
        index(crc32c=2**63),
        object_(name="\x1b[31mred"),
        object_(name=""),
        object_(name="x" * 100_000),
        object_(kind="function"),
        object_(shards=2**40),
        object_(shards=1),
        object_(shards=3),
        object_(dtype="object"),
        object_(spec="no base64"),
        object_(more=1),
        lambda manifest: manifest["objects"].append(manifest["objects"][0]),
        lambda manifest: manifest.update(objects=[]),
        lambda manifest: manifest.update(indexes=[]),
        lambda manifest: manifest.update(id="../../../../../x"),
        lambda manifest: manifest.update(id=manifest["id"] + "\n"),
        lambda manifest: manifest.update(app="other"),
        lambda manifest: manifest.update(clock=13),
        lambda manifest: manifest.update(clock=2**64),
        lambda manifest: manifest.update(created=-1.0),
        lambda manifest: manifest.update(tag="../x"),
        lambda manifest: manifest.update(extra={"../0": 1}),
        lambda manifest: manifest.update(more=1),
        lambda manifest: b'{"id":' + DEEP + b"}",
        lambda manifest: b'{"notes":{"a":' + DEEP + b"}}",
        lambda manifest: b'{"objects":[' + b"{}," * 300_000 + b"{}]}",
        lambda manifest: b'{"clock":' + b"9" * 1_000_000 + b"}",
        lambda manifest: b"null",
        lambda manifest: b"",
    ],
)
def test_a_manifest_that_lies_is_refused(made: Made, change: Change):
    forge_manifest(made, change)
    refused(made, str(made.path))


def test_values_of_others_may_be_large_and_cost_their_bytes(made: Made):
    forge_manifest(made, lambda manifest: manifest.update(extra={"0": [[]] * 500_000}, ledgers=[{}] * 200_000))
    size = (made.path / MANIFEST).stat().st_size
    tracemalloc.start()
    Checkpoint.open(made.folder, made.place)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * size + MORE


@pytest.mark.parametrize("file", [MANIFEST, INDEX, BLOCK])
def test_a_file_of_a_size_that_none_has_is_not_read(made: Made, file: str):
    os.truncate(made.path / file, 1 << 40)  # it takes no room: nothing of it was ever written
    if file != MANIFEST:
        size = {"bytes": 1 << 40}
        (forge_index if file == BLOCK else forge_manifest)(
            made, lambda of: of["blocks" if file == BLOCK else "indexes"][0].update(size)
        )
    tracemalloc.start()
    with pytest.raises(wl.CorruptCheckpoint, match=rf"{file}.*expected"):
        read_all(made)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("version", [0, 2, 10**9])
@pytest.mark.parametrize("file", [MANIFEST, INDEX])
def test_another_version_is_refused_with_both_named(made: Made, version: int, file: str):
    if file == MANIFEST:
        body = b'{"nothing":"is as in version 1"}'
        (made.path / MANIFEST).write_bytes(b'{"format_version":%d,"what":%s}' % (version, body))
    else:
        forge_index(made, lambda index: b'{"format_version":%d,"what":[]}' % version)
    by = "a later" if version else "an earlier"
    error = refused(made, file)
    assert f"{by} version of Windlass wrote it: expected format version 1, saw {version}" in error


@pytest.mark.parametrize("version", [-1, 1.5, "1", None, True, []])
def test_a_version_that_is_no_number_is_refused(made: Made, version: object):
    body = json.dumps(json.loads((made.path / MANIFEST).read_bytes())["manifest"]).encode()
    (made.path / MANIFEST).write_bytes(seal(body, version))
    refused(made, MANIFEST)


STRANGE: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**32, 2**53, 2**63, 2**64, 2**64 - 1, 10**30, 0.5, 1e308, "", "x", "../x", "\0",
    "F32", "\u202e", "a" * 5000, [], {}, [[]], [0] * 50, {"a": 1}, [-1], [2**63, 2**63],
]  # fmt: skip


def mutate(rng: random.Random, value: Any) -> Any:
    """One place of some JSON changed."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.9:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = rng.choice(keys)
        how = rng.random()
        if how < 0.8:
            value[key] = mutate(rng, value[key])
        elif how < 0.9:
            del value[key]
        elif isinstance(value, list):
            value.append(copy.deepcopy(value[key]))
        else:
            value[rng.choice(["more", "", "x/y"])] = value[key]
        return value
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 7, 1 << 20])
    return copy.deepcopy(rng.choice(STRANGE))


def noise(rng: random.Random, data: bytes) -> bytes:
    """Some bytes changed, taken out, doubled, or cut off."""
    at, n = rng.randrange(len(data) + 1), rng.randrange(9)
    return rng.choice(
        [
            data[:at] + rng.randbytes(n) + data[at + n :],
            data[:at] + data[at + n :],
            data[:at] + data[at : at + n] * 2 + data[at + n :],
            data[:at],
        ]
    )


def attack(rng: random.Random, made: Made) -> None:
    """Changes one file of it, with the right checksums."""
    kind = rng.randrange(4)
    forge = [forge_manifest, forge_index, forge_head][kind % 3]
    if kind == 3:
        forge_block(made, noise(rng, (made.path / BLOCK).read_bytes()))
    elif rng.random() < 0.5:
        forge(made, lambda decoded: noise(rng, changed(decoded, lambda same: None)))
    else:
        forge(made, lambda decoded: json.dumps(mutate(rng, decoded)).encode())


def survives(made: Made, rng: random.Random) -> bool:
    """Whether it was refused. Of what is not, no more numbers come than there are bytes."""
    originals = {path: path.read_bytes() for path in made.path.iterdir()}
    try:
        attack(rng, made)
        try:
            checkpoint = Checkpoint.open(made.folder, made.place)
            numbers = sum(array.nbytes for arrays in content(checkpoint).values() for array in arrays.values())
            assert numbers <= checkpoint.bytes
        except wl.CorruptCheckpoint as error:
            assert str(made.path) in str(error)  # noqa: PT017
            return True
        return False
    finally:
        for path, data in originals.items():
            write(path, data)


@pytest.mark.parametrize("n", [1_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_mutated_checkpoints_are_read_or_refused_and_nothing_else(folder: Folder, n: int):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    made, rng = make(folder), random.Random(seed)
    refusals = sum(survives(made, rng) for _ in range(n))
    print(f"{refusals} of {n} refused")
    assert refusals > n // 2
    read_all(made)


def test_a_folder_elsewhere_is_never_touched(folder: Folder, tmp_path: pathlib.Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_text("kept")
    made = make(folder)
    link = made.path.with_name(f"{1:016d}-{2:016x}")
    link.symlink_to(outside)
    assert [place.id for place in folder.places("default")] == [made.place.id]
    for name in ("../../../outside/x", "/etc/passwd", "..", "a/b", "A", ""):
        with pytest.raises(wl.InvalidArgument):
            folder.remove_files(made.place, [name])
    assert (outside / "x").read_text() == "kept"


def test_numbers_that_are_read_are_nobody_elses(made: Made):
    checkpoint = Checkpoint.open(made.folder, made.place)
    (piece,) = checkpoint.read_shard(TENSOR, 0)
    np.testing.assert_array_equal(piece.arrays["weights"], made.shards[TENSOR, 0]["weights"])
