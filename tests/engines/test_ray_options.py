"""What windlass.ray says and refuses before it needs Ray, which most installations do not have."""

import pathlib
import socket
import sys

import pytest
from helpers import check_python
from typer.testing import CliRunner

import windlass as wl
from windlass._cli import app
from windlass.ray._run import init
from windlass.ray._script import read_resources, runtime_env, within


def test_ray_is_imported_only_where_it_is_used():
    check_python("""
        import sys
        import windlass, windlass._cli, windlass.ray, windlass.launch.run
        assert "ray" not in sys.modules
        assert "numpy" not in sys.modules, "an actor that owns a process needs none"
    """)


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for call in (lambda: wl.ray.run(print), lambda: wl.ray.start()):
        with pytest.raises(ImportError, match=r"needs ray: pip install 'windlass\[ray\]'"):
            call()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"function": 3}, "expected a function, not 3"),
        ({"args": "ab"}, "expected a tuple of arguments"),
        ({"server": 2}, "there is no argument 'server'; did you mean servers?"),
        ({"progress": "on"}, "there is no argument 'progress'"),
        ({"resources_per_worker": {"CPU": -1}}, "resources_per_worker: expected amounts by name"),
        ({"resources_per_server": {"CPU": 0}}, "resources_per_server: expected at least one resource"),
        ({"sync": "sometimes"}, "sync"),
        ({"strategy": "NEAR"}, "strategy: expected one of SPREAD, PACK, STRICT_SPREAD, STRICT_PACK, not 'NEAR'"),
        ({"restarts": -1}, "restarts: expected a whole number"),
        ({"resume": True}, "there is no place to look for checkpoints"),
    ],
)
def test_what_cannot_be_right_is_refused_before_ray_is_asked(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, object], says: str
):
    monkeypatch.setitem(sys.modules, "ray", object())  # which can do nothing
    with pytest.raises(wl.InvalidArgument, match=says):
        wl.ray.run(**{"function": print, **arguments})  # type: ignore[arg-type]


def test_resources_of_the_command_are_amounts_by_name():
    assert read_resources("CPU=2,GPU=0.5", "--resources-per-worker") == {"CPU": 2.0, "GPU": 0.5}
    assert read_resources(None, "--resources-per-worker") is None
    for wrong in ("4", "CPU", "CPU=many", "=4", ""):
        with pytest.raises(wl.InvalidArgument, match=r"--resources-per-worker: expected amounts such as CPU=4,GPU=1"):
            read_resources(wrong, "--resources-per-worker")


def test_a_script_outside_the_working_directory_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "train.py").touch()
    (tmp_path / "elsewhere.py").touch()
    monkeypatch.chdir(tmp_path / "here")
    assert within("train.py") == within(str(tmp_path / "here" / "train.py")) == pathlib.Path("train.py")
    with pytest.raises(wl.InvalidArgument, match=r"is not below .*/here, which is copied to the nodes"):
        within("../elsewhere.py")
    with pytest.raises(wl.InvalidArgument, match=r"there is no script 'other.py'"):
        within("other.py")


def test_a_job_that_has_a_working_directory_keeps_it():
    job = "RAY_JOB_CONFIG_JSON_ENV_VAR"
    assert runtime_env({}) == {"working_dir": "."}
    assert runtime_env({job: '{"runtime_env": {}}'}) == {"working_dir": "."}
    assert runtime_env({job: '{"runtime_env": {"working_dir": "gcs://a.zip"}}'}) == {}


def test_a_dry_run_shows_the_processes_and_what_each_takes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    options = ["--servers=2", "--workers=1", "--resources-per-worker=CPU=2,GPU=1", "--strategy=PACK"]
    shown = CliRunner().invoke(app, ["run", "--on", "ray", "--dry-run", *options, "train.py", "--lr", "0.1"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.splitlines() == [
        "scheduler   beside server 0, takes nothing; PACK",
        "server   0  CPU=1",
        "server   1  CPU=1",
        "worker   0  CPU=2, GPU=1: train.py --lr 0.1",
    ]


def test_options_of_ray_need_ray(tmp_path: pathlib.Path):
    (tmp_path / "train.py").touch()
    for option in ("--resources-per-worker=CPU=1", "--resources-per-server=CPU=1", "--strategy=PACK"):
        said = CliRunner().invoke(app, ["run", option, str(tmp_path / "train.py")])
        assert said.exit_code == 2
        assert f"{option.partition('=')[0]} is for --on ray" in said.output


def test_an_address_where_no_ray_is_ends_the_command_at_once(monkeypatch: pytest.MonkeyPatch):
    class Ray:
        is_initialized = staticmethod(lambda: False)

    with socket.create_server(("127.0.0.1", 0)) as free:
        at = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", at)
    with pytest.raises(wl.WindlassError, match=rf"wl.ray.run: Ray at RAY_ADDRESS={at}: .*[Rr]efused"):
        init(Ray(), "wl.ray.run")
