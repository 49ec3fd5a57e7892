"""A checkpoint as plain safetensors, under the names that users know."""

import json
import pathlib

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from made import TABLE, TENSOR, Made, facts, make, new_place

import windlass as wl
from windlass._checkpoint.export import export
from windlass._checkpoint.folder import Folder
from windlass._checkpoint.layout import Manifest, Object, ParameterNote, TensorNote, opaque
from windlass._checkpoint.reader import Checkpoint
from windlass._checkpoint.writer import ServerFiles, write_manifest


def opened(made: Made) -> Checkpoint:
    return Checkpoint.open(made.folder, made.place)


def test_tensors_and_tables_have_the_names_of_users(made: Made, tmp_path: pathlib.Path):
    assert export(opened(made), tmp_path / "all.safetensors") == [str(tmp_path / "all.safetensors")]
    found = safetensors.numpy.load_file(tmp_path / "all.safetensors")
    assert set(found) == {
        *("w", "w.momentum"),
        *("user.keys", "user.updates", "user.touched", "user.weights", "user.sum"),
    }
    for name, ending in (("weights", ""), ("momentum", ".momentum")):
        flat = np.concatenate([made.shards[TENSOR, shard][name] for shard in range(2)])
        np.testing.assert_array_equal(found["w" + ending], flat.reshape(2, 5))
    rows = {int(key): row for key, row in zip(found["user.keys"], found["user.sum"], strict=True)}
    assert len(rows) == 6
    for shard in range(3):
        for key, row in zip(made.shards[TABLE, shard]["keys"], made.shards[TABLE, shard]["sum"], strict=True):
            np.testing.assert_array_equal(rows[int(key)], row)


def test_weights_alone_and_chosen_objects(made: Made, tmp_path: pathlib.Path):
    file = tmp_path / "some.safetensors"
    export(opened(made), file, weights_only=True)
    assert set(safetensors.numpy.load_file(file)) == {"w", "user.keys", "user.weights"}
    export(opened(made), file, names=["w"])
    assert set(safetensors.numpy.load_file(file)) == {"w", "w.momentum"}
    export(opened(made), file, names=[TABLE], weights_only=True)
    assert set(safetensors.numpy.load_file(file)) == {"user.keys", "user.weights"}
    with pytest.raises(wl.NotFound, match="'v' is not in it; it has 'w', 'user'"):
        export(opened(made), file, names=["v"])


def flat_of(folder: Folder, model: torch.nn.Module, *, shards: int = 5) -> Checkpoint:
    """A module's parameters in one flat tensor, each at a multiple of 16, and the momentum of each."""
    parameters, at = [], 0
    for name, parameter in model.named_parameters():
        strides = None if parameter.is_contiguous() else list(parameter.stride())
        parameters.append(ParameterNote(name, list(parameter.shape), at, strides))
        at += -(-parameter.numel() // 16) * 16
    flat = np.full(at, np.nan, np.float32)
    for note, parameter in zip(parameters, model.parameters(), strict=True):
        in_memory = torch.as_strided(parameter.detach(), (parameter.numel(),), (1,)).numpy()
        flat[note.offset : note.offset + parameter.numel()] = in_memory
    place, files_at = new_place(), np.linspace(0, at, shards + 1).astype(int)
    files = ServerFiles(folder, place, 0, block_bytes=512)
    for shard in range(shards):
        weights = flat[files_at[shard] : files_at[shard + 1]]
        files.add("default/model", shard, {"weights": weights, "momentum": weights * 2})
        files.add("default/model", shard, {"steps": np.full(1, shard, np.float32)})
        files.shard_done("default/model", shard, facts("default/model", shard, {}))
    manifest = Manifest(
        *(place.id, place.app, place.clock, 0.0, "0"),
        [Object("default/model", "tensor", "F32", [at], shards, b"")],
        [files.finish()],
        notes={"default/model": opaque(TensorNote(parameters))},
    )
    write_manifest(folder, manifest)
    return Checkpoint.open(folder, place)


def test_a_module_loads_what_lay_in_a_flat_tensor(folder: Folder, tmp_path: pathlib.Path):
    def model() -> torch.nn.Module:
        layers = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.Flatten(), torch.nn.Linear(20, 7))
        return layers.to(memory_format=torch.channels_last)

    trained, fresh = model(), model()
    assert not next(trained.parameters()).is_contiguous()
    export(flat_of(folder, trained), tmp_path / "model.safetensors", weights_only=True)
    fresh.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    for one, other in zip(trained.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_state_of_a_rule_is_cut_like_the_weights_and_what_is_per_shard_is_not(
    folder: Folder, tmp_path: pathlib.Path
):
    model = torch.nn.Linear(20, 7)
    export(flat_of(folder, model), tmp_path / "model.safetensors")
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert set(found) == {"weight", "bias", "weight.momentum", "bias.momentum", "model.steps"}
    assert torch.equal(found["weight.momentum"], model.weight * 2)
    assert found["model.steps"].tolist() == [0, 1, 2, 3, 4]


def test_what_is_too_large_for_one_file_becomes_several_with_an_index(folder: Folder, tmp_path: pathlib.Path):
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(5)))
    files = export(flat_of(folder, model), tmp_path / "model.safetensors", weights_only=True, file_bytes_max=600)
    assert [pathlib.Path(file).name for file in files] == [
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * (64 + 8) * 4
    state = {name: safetensors.torch.load_file(tmp_path / file)[name] for name, file in index["weight_map"].items()}
    for name, parameter in model.named_parameters():
        assert torch.equal(state[name], parameter)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == sorted(
        pathlib.Path(file).name for file in files
    )


@pytest.mark.parametrize(
    "note",
    [
        ParameterNote("a", [11], 0),
        ParameterNote("a", [2], 9),
        ParameterNote("a", [2**62, 2**62], 0),
        ParameterNote("a", [2, 2], 0, [3, 1]),
        ParameterNote("a", [2, 2], 0, [1]),
    ],
)
def test_a_note_that_does_not_fit_is_refused(folder: Folder, tmp_path: pathlib.Path, note: ParameterNote):
    made = make(folder, notes={TENSOR: opaque(TensorNote([note]))})
    with pytest.raises(wl.CorruptCheckpoint, match=r"manifest\.json: 'default/w': its note"):
        export(opened(made), tmp_path / "x.safetensors")
    assert not list(tmp_path.glob("x*"))


def test_two_arrays_of_one_name_are_refused(folder: Folder, tmp_path: pathlib.Path):
    notes = [ParameterNote("a", [2], 0), ParameterNote("a", [2], 2)]
    made = make(folder, notes={TENSOR: opaque(TensorNote(notes))})
    with pytest.raises(wl.InvalidArgument, match="two arrays are called 'a'"):
        export(opened(made), tmp_path / "x.safetensors")


def test_a_damaged_block_leaves_no_file(made: Made, tmp_path: pathlib.Path):
    block = made.path / "server-0-0000.safetensors"
    block.write_bytes(block.read_bytes()[:-1] + b"?")
    checkpoint = opened(made)
    with pytest.raises(wl.CorruptCheckpoint, match=r"server-0-0000\.safetensors: expected checksum"):
        export(checkpoint, tmp_path / "x.safetensors")
    assert not list(tmp_path.glob("x*"))


def test_a_file_is_exported_to_a_url_and_refused_where_there_is_no_folder(made: Made, tmp_path: pathlib.Path):
    import fsspec

    url = f"memory://{tmp_path.name}/out.safetensors"
    assert export(opened(made), url, names=["w"]) == [url]
    with fsspec.open(url) as file:
        assert set(safetensors.numpy.load(file.read())) == {"w", "w.momentum"}
    with pytest.raises(wl.StorageFailed, match=r"none/x\.safetensors: cannot be written: No such file or directory"):
        export(opened(made), tmp_path / "none" / "x.safetensors")
    with pytest.raises(wl.InvalidArgument, match=r"ends in \.safetensors"):
        export(opened(made), tmp_path / "x.bin")
