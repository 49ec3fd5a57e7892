"""R12: a damaged file is refused by name, and the checkpoint before it is used."""

import os
import pathlib
import random
from collections.abc import Callable

import pytest
from forge import write
from made import Made, content, equal, make

import windlass as wl
from windlass._checkpoint.folder import Folder
from windlass._checkpoint.reader import Checkpoint, newest


@pytest.fixture
def older(folder: Folder) -> Made:
    return make(folder, clock=5, created=1e9)


def check(older: Made, made: Made, file: pathlib.Path) -> bool:
    """Whether the damage was noticed. If so, the file is named and the older one is chosen; else all is as it was."""
    found = newest(made.folder, "default")
    checkpoint = found.checkpoint
    assert checkpoint is not None
    if checkpoint.place == older.place:
        assert [one.place for one in found.passed] == [made.place]
        assert file.name in found.passed[0].why
        assert str(made.path) in found.passed[0].why
        checkpoint.verify()
        return True
    assert checkpoint.place == made.place
    try:
        checkpoint.verify()
    except wl.CorruptCheckpoint as error:
        assert str(file) in str(error)  # noqa: PT017
        with pytest.raises(wl.CorruptCheckpoint):
            content(checkpoint)
        return True
    assert checkpoint.manifest == made.manifest
    assert equal(content(checkpoint), made.shards)
    return False


def files_of(made: Made) -> list[pathlib.Path]:
    return sorted(made.path.iterdir())


def test_every_flipped_byte_of_every_file_is_noticed(older: Made, made: Made):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, unnoticed = random.Random(seed), []
    for file in files_of(made):
        with file.open("r+b", buffering=0) as f:
            for at, byte in enumerate(file.read_bytes()):
                f.seek(at)
                f.write(bytes([byte ^ rng.randrange(1, 256)]))
                if not check(older, made, file):
                    unnoticed.append((file.name, at))
                f.seek(at)
                f.write(bytes([byte]))
    print(f"{sum(file.stat().st_size for file in files_of(made))} bytes flipped")
    assert not check(older, made, made.path / "none")
    assert not unnoticed, "no byte is without meaning: JSON is compact, and blocks are summed whole"


def test_every_length_that_a_file_is_cut_to_is_noticed(older: Made, made: Made):
    for file in files_of(made):
        data = file.read_bytes()
        for length in range(len(data)):
            write(file, data[:length])
            assert check(older, made, file), f"{file.name} cut to {length} of {len(data)}"
        file.write_bytes(data + b"x")
        assert check(older, made, file), f"{file.name} with a byte more"
        file.write_bytes(data)
    assert not check(older, made, made.path / "none")


def remove(file: pathlib.Path) -> None:
    file.unlink()


def make_a_link(file: pathlib.Path) -> None:
    target = file.with_name("elsewhere")
    file.rename(target)
    file.symlink_to(target)


def make_a_folder(file: pathlib.Path) -> None:
    file.unlink()
    file.mkdir()


def make_a_pipe(file: pathlib.Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("how", [remove, make_a_link, make_a_folder, make_a_pipe])
@pytest.mark.parametrize("number", range(7))
def test_what_is_no_file_any_more_is_noticed(folder: Folder, how: Callable[[pathlib.Path], None], number: int):
    older, made = make(folder, clock=5, created=1e9), make(folder)
    file = files_of(made)[number]
    how(file)
    found = newest(folder, "default")
    assert found.checkpoint is not None
    assert found.checkpoint.place == older.place
    assert file.name in found.passed[0].why


def test_there_are_seven_files_to_damage(made: Made):
    assert len(files_of(made)) == 7


def test_a_file_of_another_checkpoint_in_its_place_is_noticed(older: Made, made: Made):
    for file in files_of(made):
        data = file.read_bytes()
        file.write_bytes((older.path / file.name).read_bytes())
        assert check(older, made, file) or file.suffix == ".safetensors", "blocks of both are the same bytes"
        file.write_bytes(data)


def test_a_file_that_changes_after_the_sizes_were_checked_is_noticed(made: Made):
    checkpoint = Checkpoint.open(made.folder, made.place)
    file = made.path / "server-0-0000.safetensors"
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(wl.CorruptCheckpoint, match=r"server-0-0000\.safetensors: expected \d+ bytes, saw"):
        checkpoint.verify()


def test_a_reader_that_believes_every_checksum_turns_this_red(older: Made, made: Made, monkeypatch: pytest.MonkeyPatch):
    real = made.folder.store.read
    monkeypatch.setattr(
        made.folder,
        "read",
        lambda place, file: real(place.path, file.name, file.bytes)[0],
    )
    block = made.path / "server-0-0000.safetensors"
    data = block.read_bytes()
    write(block, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(AssertionError):
        check(older, made, block)
