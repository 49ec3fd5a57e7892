"""What goes into a checkpoint comes out of it."""

import pathlib

import numpy as np
import pytest
import safetensors.numpy
from made import TABLE, TENSOR, Made, content, equal, facts, make, new_place, tensor_shard

import windlass as wl
from windlass._checkpoint.folder import Folder
from windlass._checkpoint.layout import DTYPES, Facts, Manifest, Object, opaque, plain
from windlass._checkpoint.reader import Checkpoint, newest
from windlass._checkpoint.writer import ServerFiles, write_manifest


def test_a_checkpoint_comes_back_bit_by_bit(any_folder: Folder):
    made = make(any_folder)
    checkpoint = Checkpoint.open(any_folder, made.place)
    assert checkpoint.manifest == made.manifest
    assert equal(content(checkpoint), made.shards)
    for object, shards in ((TENSOR, 2), (TABLE, 3)):
        read = [shard.facts for shard in checkpoint.shards(object)]
        assert read == [facts(object, i, made.shards[object, i]) for i in range(shards)]
    assert checkpoint.fingerprint(TENSOR) == (2**64 - 1 + 2**64 - 2) % 2**64
    assert plain(checkpoint.manifest.ledgers) == {"data": [[0, 5]]}


def test_all_shards_are_read_with_each_file_read_once(made: Made, monkeypatch: pytest.MonkeyPatch):
    checkpoint = Checkpoint.open(made.folder, made.place)
    read: list[str] = []
    real = made.folder.store.read
    monkeypatch.setattr(made.folder.store, "read", lambda path, name, n: (read.append(name), real(path, name, n))[1])
    found = {(piece.object, piece.shard) for piece in checkpoint.read()}
    assert found == {key for key, arrays in made.shards.items() if len(arrays["weights"])}
    assert len(read) == len(set(read)) > 2
    assert {piece.shard for piece in checkpoint.read([(TENSOR, 1)])} == {1}


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_numbers_of_every_dtype_come_back(folder: Folder, dtype: str):
    numbers = np.random.default_rng(3).integers(0, 2, (7, 3)).astype(dtype)
    place = new_place()
    files = ServerFiles(folder, place, 0)
    files.add("default/x", 0, {"weights": numbers})
    files.shard_done("default/x", 0, Facts())
    known = Object("default/x", "tensor", next(k for k, v in DTYPES.items() if v == dtype), [7, 3], 1, b"")
    write_manifest(folder, Manifest(place.id, place.app, place.clock, 0.0, "0", [known], [files.finish()]))
    (piece,) = Checkpoint.open(folder, place).read_shard("default/x", 0)
    assert piece.arrays["weights"].dtype == dtype
    np.testing.assert_array_equal(piece.arrays["weights"], numbers)


def test_blocks_are_files_that_safetensors_reads(made: Made):
    blocks = sorted(made.path.glob("*.safetensors"))
    assert len(blocks) > 2
    found = {name: array for block in blocks for name, array in safetensors.numpy.load_file(block).items()}
    np.testing.assert_array_equal(found[f"{TENSOR}#0.0/weights"], made.shards[TENSOR, 0]["weights"])
    np.testing.assert_array_equal(found[f"{TABLE}#1.0/keys"], made.shards[TABLE, 1]["keys"])


def test_pieces_come_in_any_order_and_arrays_larger_than_a_block_are_cut(folder: Folder):
    place, numbers = new_place(), np.arange(1000, dtype=np.float64)
    files = ServerFiles(folder, place, 0, block_bytes=1024)
    files.add("default/x", 0, {"weights": numbers[600:]}, offset=600)
    files.add("default/x", 0, {"row": np.arange(9, dtype=np.float32)})
    files.add("default/x", 0, {"weights": numbers[:600]}, offset=0)
    files.shard_done("default/x", 0, Facts())
    known = Object("default/x", "tensor", "F64", [1000], 1, b"")
    write_manifest(folder, Manifest(place.id, place.app, place.clock, 0.0, "0", [known], [files.finish()]))
    checkpoint = Checkpoint.open(folder, place)
    (whole,) = content(checkpoint).values()
    np.testing.assert_array_equal(whole["weights"], numbers)
    np.testing.assert_array_equal(whole["row"], np.arange(9))
    sizes = [path.stat().st_size for path in pathlib.Path(folder.where(place)).glob("*.safetensors")]
    assert len(sizes) >= 8
    assert max(sizes) < 2048


@pytest.mark.parametrize(
    ("arrays", "offset", "what"),
    [
        ({"weights": np.zeros(3), "state": np.zeros(2)}, None, "one length"),
        ({"weights": np.zeros((4, 4))[:, 1]}, None, "contiguous"),
        ({"weights": np.zeros(3, ">f4")}, None, "dtype"),
        ({"weights": np.zeros(3, np.complex64)}, None, "dtype"),
        ({"weights": np.float32(3)[...]}, None, "dimensions"),
        ({"a/b": np.zeros(3)}, None, "printable"),
        ({}, None, "no arrays"),
        ({"weights": np.zeros((1, 1000))}, None, "one entry"),
    ],
)
def test_what_no_file_could_hold_is_refused(folder: Folder, arrays: dict, offset: int | None, what: str):
    files = ServerFiles(folder, new_place(), 0, block_bytes=1024)
    with pytest.raises(wl.InvalidArgument, match=rf"shard 3 of 'default/x'.*{what}"):
        files.add("default/x", 3, arrays, offset)
    files.abort()


@pytest.mark.parametrize("offsets", [(0, 6), (0, 4), (1, 6)])
def test_a_shard_whose_pieces_leave_gaps_or_overlap_is_not_done(folder: Folder, offsets: tuple[int, int]):
    files = ServerFiles(folder, new_place(), 0)
    for offset in offsets:
        files.add("default/x", 0, {"weights": np.zeros(5)}, offset)
    with pytest.raises(wl.InvalidArgument, match=r"shard 0 of 'default/x'.*'weights': expected the next piece at"):
        files.shard_done("default/x", 0, Facts())
    files.abort()


def test_rows_that_a_shard_counts_are_those_that_came(folder: Folder):
    files = ServerFiles(folder, new_place(), 0)
    files.add(TABLE, 0, {"keys": np.zeros(5, np.uint64)})
    with pytest.raises(wl.InvalidArgument, match="expected 6 rows, saw 5 keys"):
        files.shard_done(TABLE, 0, Facts(rows=6))
    files.abort()


def test_a_manifest_is_refused_while_something_that_it_names_is_not_there(folder: Folder):
    made = make(folder, finish=False)
    (made.path / "server-1-0000.safetensors").unlink()
    with pytest.raises(wl.CorruptCheckpoint, match=r"server-1-0000\.safetensors: expected \d+ bytes, saw no such file"):
        write_manifest(folder, made.manifest)
    assert newest(folder, "default").checkpoint is None


def test_aborting_removes_what_was_written_and_only_that(folder: Folder):
    made = make(folder, finish=False)
    files = ServerFiles(folder, made.place, 5, block_bytes=64)
    files.add(TENSOR, 0, tensor_shard(0))
    files.abort()
    assert {path.name[:8] for path in made.path.iterdir()} == {"server-0", "server-1"}
    files.abort()


def test_writing_keeps_to_its_rate(folder: Folder):
    import time

    files = ServerFiles(folder, new_place(), 0, bytes_per_second=4e6)
    began = time.monotonic()
    files.add(TENSOR, 0, {"weights": np.zeros(1 << 18)})
    files.shard_done(TENSOR, 0, Facts())
    files.finish()
    assert time.monotonic() - began > 0.2  # 2 MiB, of which the first may go at once


def test_extra_and_notes_are_whatever_json_says(folder: Folder):
    made = make(folder, notes={"default/w": opaque({"any": [1, None, "x"]})}, tag="best", partial=True, world_size=4)
    read = Checkpoint.open(folder, made.place).manifest
    assert plain(read.notes["default/w"]) == {"any": [1, None, "x"]}
    assert (read.tag, read.partial, read.world_size) == ("best", True, 4)
