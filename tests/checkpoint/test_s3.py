"""Checkpoints on S3, against moto's server: `make test-s3` installs it."""

from collections.abc import Iterator

import pytest
from made import content, equal, make
from typer.testing import CliRunner

import windlass as wl
from windlass._checkpoint.folder import Folder
from windlass._checkpoint.names import MANIFEST
from windlass._checkpoint.reader import Checkpoint, newest
from windlass._checkpoint.retention import prune
from windlass._cli import app

s3fs = pytest.importorskip("s3fs", reason="needs windlass[s3]; make test-s3 installs it")
moto = pytest.importorskip("moto.server", reason="needs moto's server; make test-s3 installs it")
pytestmark = pytest.mark.filterwarnings("ignore")  # of their packages, about one another


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A URL as users have it: the endpoint and the keys are in the environment."""
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    name = request.node.name.replace("_", "-")[:50].strip("-")
    s3fs.S3FileSystem().mkdir(name)
    return f"s3://{name}"


def test_checkpoints_on_s3(bucket: str):
    folder = Folder(f"{bucket}/runs/one")
    assert folder.apps() == []
    first = make(folder, clock=1, created=1e9)
    second = make(folder, clock=2, created=2e9)
    half = make(folder, clock=3, finish=False)
    assert equal(content(Checkpoint.open(folder, second.place)), second.shards)
    found = newest(folder, "default")
    assert found.checkpoint is not None
    assert found.checkpoint.place == second.place
    assert [(one.place, one.half_written) for one in found.passed] == [(half.place, True)]
    s3fs.S3FileSystem().rm_file(f"{folder.store.url}/{second.place.path}/server-0-0000.safetensors")
    again = newest(folder, "default")
    assert again.checkpoint is not None
    assert again.checkpoint.place == first.place
    make(folder, clock=4, created=3e9)
    assert first.place in prune(folder, "default", keep=1).removed
    folder.remove(half.place)
    assert [place.clock for place in folder.places("default")] == [2, 4]


def test_a_damaged_object_on_s3_is_refused_by_name(bucket: str):
    folder = Folder(bucket)
    made = make(folder)
    at = f"{bucket}/{made.place.path}/server-1-0000.safetensors"
    data = s3fs.S3FileSystem().cat_file(at)
    s3fs.S3FileSystem().pipe_file(at, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(wl.CorruptCheckpoint, match=rf"{at}: expected checksum"):
        Checkpoint.open(folder, made.place).verify()
    s3fs.S3FileSystem().pipe_file(at, data[:-1])
    with pytest.raises(wl.CorruptCheckpoint, match=rf"{at}: expected {len(data)} bytes, saw {len(data) - 1}"):
        Checkpoint.open(folder, made.place)


def test_a_bucket_that_is_not_there_is_a_storage_failure(bucket: str):
    with pytest.raises(wl.StorageFailed, match="nosuchbucket"):
        make(Folder("s3://nosuchbucket/x"))


def test_commands_take_urls_of_s3(bucket: str):
    made = make(Folder(bucket), clock=7, tag="best")

    def windlass(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["checkpoint", *arguments], env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output
        return done.stdout

    assert "complete" in windlass("ls", bucket)
    assert "good" in windlass("verify", bucket)
    windlass("export", bucket, "best", "--to", f"{bucket}/out/model.safetensors")
    assert s3fs.S3FileSystem().exists(f"{bucket}/out/model.safetensors")
    windlass("rm", bucket, made.place.id)
    assert MANIFEST not in str(s3fs.S3FileSystem().find(bucket))
