"""Settings: which source counts, where each came from, and what is said of one that is wrong."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from helpers import PATIENCE_S

import windlass as wl
from windlass._settings import OTHER_VARIABLES, SETTINGS, Settings, check_environment, load
from windlass.control.model import Terms
from windlass.testing import Servers

GIB = 1 << 30


def write(folder: pathlib.Path, text: str) -> pathlib.Path:
    path = folder / "windlass.toml"
    path.write_text(text)
    return path


def settle(name: str, flag: Any = None, variable: str | None = None, file: pathlib.Path | None = None) -> Settings:
    environ = {} if variable is None else {f"WINDLASS_{name.upper()}": variable}
    return load({name: flag}, file, environ)


def test_the_failure_timeout_has_one_default_with_a_scheduler_and_without(monkeypatch: pytest.MonkeyPatch):
    default = SETTINGS["failure_timeout"].default
    assert Terms(1).failure_timeout == default
    with Servers(1) as servers:
        with servers.connect() as cluster:
            assert cluster._remote.failure_timeout == default
        monkeypatch.setenv("WINDLASS_FAILURE_TIMEOUT", "3.5")
        with servers.connect() as cluster:
            assert cluster._remote.failure_timeout == 3.5
        with servers.connect(failure_timeout=4.5) as cluster:
            assert cluster._remote.failure_timeout == 4.5


# -- which source counts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flag", "variable", "filed", "expected"),
    [
        ("servers", "4", "3", "2", (4, 3, 2, 1)),
        ("app", "f", "e", '"t"', ("f", "e", "t", "default")),
        ("failure_timeout", "4.5", "3", "2", (4.5, 3.0, 2.0, 10.0)),
        ("memory_bytes_max", "4Gi", "3G", "2000", (4 * GIB, 3 * 10**9, 2000, None)),
        ("linger", True, "no", "true", (True, False, True, False)),
        ("token_file", "/f", "/e", '"/t"', (pathlib.Path("/f"), pathlib.Path("/e"), pathlib.Path("/t"), None)),
        ("transport", "arena", "socket", '"auto"', ("arena", "socket", "auto", "auto")),
        ("on_worker_loss", "wait", "continue", '"wait"', ("wait", "continue", "wait", "continue")),
        ("sync", "bsp:1", "ssp:2", '"maxdelay:3"', ("bsp:1", "ssp:2", "maxdelay:3", None)),
    ],
)
def test_flag_over_environment_over_file_over_default(
    tmp_path: pathlib.Path, name: str, flag: Any, variable: str, filed: str, expected: tuple[Any, ...]
):
    file = write(tmp_path, f"{name} = {filed}\n")
    settled = [
        settle(name, flag, variable, file),
        settle(name, None, variable, file),
        settle(name, None, None, file),
        settle(name),
    ]
    assert tuple(one[name] for one in settled) == expected
    sources = ["flag", f"environment, WINDLASS_{name.upper()}", f"file, {file}", "default"]
    assert [one.sources[name] for one in settled] == sources


def test_each_setting_comes_from_where_it_was_set(tmp_path: pathlib.Path):
    file = write(tmp_path, "servers = 2\nworkers = 3\napp = 'filed'\n")
    settings = load({"servers": "5"}, file, {"WINDLASS_WORKERS": "7"})
    assert (settings.servers, settings.workers, settings.app, settings.linger) == (5, 7, "filed", False)
    assert {name: source for name, source in settings.sources.items() if source != "default"} == {
        "servers": "flag",
        "workers": "environment, WINDLASS_WORKERS",
        "app": f"file, {file}",
    }
    assert set(settings.values) == set(settings.sources) == set(SETTINGS)


def test_a_flag_counts_even_if_it_says_no():
    assert settle("linger", False, "yes").linger is False


def test_an_empty_variable_is_none():
    settings = settle("servers", None, "")
    assert (settings.servers, settings.sources["servers"]) == (1, "default")


def test_the_file_is_also_found_by_its_variable_and_the_flag_is_over_that(tmp_path: pathlib.Path):
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text("servers = 2\n")
    two.write_text("servers = 3\n")
    environ = {"WINDLASS_CONFIG": str(one)}
    assert load(None, None, environ).servers == 2
    settings = load(None, two, environ)
    assert (settings.servers, settings.sources["servers"]) == (3, f"file, {two}")


def test_what_is_described_can_be_written_as_json():
    described = settle("token_file", "/somewhere").describe()
    assert json.loads(json.dumps(described))["token_file"] == {"value": "/somewhere", "from": "flag"}
    assert set(described) == set(SETTINGS)


def test_a_setting_that_is_not_there_is_no_attribute():
    with pytest.raises(AttributeError, match="server"):
        _ = load(None, None, {}).server


# -- what is not known -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("server = 2", "server: there is no such setting; did you mean servers?"),
        ("adress = 'x'", "adress: there is no such setting; did you mean address?"),
        ("failure-timeout = 2", "failure-timeout: there is no such setting; did you mean failure_timeout?"),
        ("zebra = 2", r"zebra: there is no such setting$"),
        (
            "[apps.a]\nmemory_byte_max = 2",
            "apps.a.memory_byte_max: there is no such setting; did you mean memory_bytes",
        ),
        ("[apps]\na = 2", "apps.a.: there is no such setting"),
        ("servers = ", "Invalid value"),
        ("servers = 1\nservers = 2", "Cannot overwrite a value"),
    ],
)
def test_an_unknown_key_in_a_file_is_an_error_with_a_suggestion(tmp_path: pathlib.Path, text: str, complaint: str):
    file = write(tmp_path, text)
    with pytest.raises(wl.InvalidArgument, match=complaint) as caught:
        load(None, file, {})
    assert str(caught.value).startswith(f"settings file {file}: ")


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: pathlib.Path):
    for path, complaint in ((tmp_path / "nowhere", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(wl.InvalidArgument, match=f"settings file {path}: {complaint}"):
            load(None, path, {})
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0")
    with pytest.raises(wl.InvalidArgument, match=r"settings file .*binary: .*codec"):
        load(None, tmp_path / "binary", {})


@pytest.mark.parametrize(
    ("variable", "suggestion"),
    [
        ("WINDLASS_ADRESS", "; did you mean WINDLASS_ADDRESS?"),
        ("WINDLASS_SERVER", "; did you mean WINDLASS_SERVERS?"),
        ("WINDLASS_FAILURE_TIMOUT", "; did you mean WINDLASS_FAILURE_TIMEOUT?"),
        ("WINDLASS_TOKENFILE", "; did you mean WINDLASS_TOKEN_FILE?"),
        ("WINDLASS_", ""),
    ],
)
def test_an_unknown_variable_is_an_error_with_a_suggestion(variable: str, suggestion: str):
    with pytest.raises(wl.InvalidArgument) as caught:
        load(None, None, {variable: "1", "PATH": "/bin"})
    expected = f"environment variable {variable}: there is no such setting{suggestion}"
    assert str(caught.value) == expected or (not suggestion and str(caught.value).startswith(expected))


def test_variables_of_others_and_our_own_are_no_error():
    check_environment(dict.fromkeys(OTHER_VARIABLES, "x") | {"PATH": "x", "windlass_x": "x", "WINDLASSX": "x"})
    check_environment({f"WINDLASS_{name.upper()}": "x" for name in SETTINGS})


def test_connect_refuses_a_mistyped_variable_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WINDLASS_ADRESS", "tcp://127.0.0.1:1")
    with pytest.raises(wl.InvalidArgument, match="did you mean WINDLASS_ADDRESS"):
        wl.connect()


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("servers", "many", "expected a whole number, not 'many'"),
        ("servers", "1.5", "expected a whole number, not '1.5'"),
        ("servers", "0", "expected at least 1, not '0'"),
        ("servers", "-3", "expected at least 1, not '-3'"),
        ("number", "-1", "expected at least 0, not '-1'"),
        ("failure_timeout", "soon", "expected a number of seconds, not 'soon'"),
        ("failure_timeout", "0", r"expected at least 0\.1, not '0'"),
        ("failure_timeout", "nan", r"expected at least 0\.1, not 'nan'"),
        ("linger", "maybe", "expected true or false, not 'maybe'"),
        ("memory_bytes_max", "lots", "expected a number of bytes, such as 1000000, 8G or 8Gi, not 'lots'"),
        ("memory_bytes_max", "8X", "expected a number of bytes"),
        ("memory_bytes_max", "Gi", "expected a number of bytes"),
        ("memory_bytes_max", "-1", "expected at least 0, not '-1'"),
        ("transport", "pigeon", "expected one of auto, arena, socket, not 'pigeon'"),
        ("role", "king", "expected one of worker, server, scheduler, not 'king'"),
    ],
)
def test_a_value_that_is_wrong_is_named_with_its_source(tmp_path: pathlib.Path, name: str, value: str, complaint: str):
    variable, flag = f"WINDLASS_{name.upper()}", f"--{name.replace('_', '-')}"
    file = write(tmp_path, f'{name} = "{value}"\n')
    for where, arguments in (
        (flag, ({name: value}, None, {})),
        (variable, (None, None, {variable: value})),
        (f"{file}: {name}", (None, file, {})),
    ):
        with pytest.raises(wl.InvalidArgument, match=complaint) as caught:
            load(*arguments)
        assert str(caught.value).startswith(f"{where}: ")


@pytest.mark.parametrize("value", ["1e999", "inf"])
def test_bytes_without_end_are_refused(value: str):
    with pytest.raises(wl.InvalidArgument, match="expected a number of bytes"):
        settle("memory_bytes_max", value)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("servers", "2.0", "expected a whole number, not 2.0"),
        ("servers", "true", "expected a whole number, not True"),
        ("failure_timeout", "true", "expected a number of seconds, not True"),
        ("memory_bytes_max", "true", "expected a number of bytes"),
        ("app", "3", "expected a text, not 3"),
        ("address", "['tcp://a:1']", "expected a text"),
        ("token_file", "3", "expected a path, not 3"),
        ("linger", "2", "expected true or false, not 2"),
    ],
)
def test_a_value_of_another_type_in_a_file_is_an_error(tmp_path: pathlib.Path, name: str, text: str, complaint: str):
    with pytest.raises(wl.InvalidArgument, match=complaint):
        load(None, write(tmp_path, f"{name} = {text}\n"), {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1000000", 1_000_000),
        ("5k", 5_000),
        ("5kB", 5_000),
        ("5KiB", 5 << 10),
        ("8M", 8 * 10**6),
        ("8Mi", 8 << 20),
        ("8g", 8 * 10**9),
        ("8Gi", 8 << 30),
        ("1.5Gi", 3 << 29),
        ("2T", 2 * 10**12),
        ("2Ti", 2 << 40),
        (" 7 ", 7),
        ("12b", 12),
    ],
)
def test_bytes_have_suffixes_of_a_thousand_and_of_1024(text: str, expected: int):
    assert settle("memory_bytes_max", text).memory_bytes_max == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("1", True), ("Yes", True), ("TRUE", True), ("0", False), ("no", False)]
)
def test_yes_and_no_have_several_words(text: str, expected: bool):
    assert settle("linger", None, text).linger is expected


# -- quotas ----------------------------------------------------------------------------------------------------------


def test_quotas_of_apps_are_in_the_file(tmp_path: pathlib.Path):
    file = write(tmp_path, '[apps.one]\nmemory_bytes_max = 1000\n[apps."the other"]\nmemory_bytes_max = "2Gi"\n')
    assert load(None, file, {}).quotas == {"one": 1000, "the other": 2 * GIB}
    assert load(None, write(tmp_path, "servers = 1\n"), {}).quotas == {}


def test_a_quota_that_is_no_number_is_named_with_its_app(tmp_path: pathlib.Path):
    file = write(tmp_path, '[apps.one]\nmemory_bytes_max = "lots"\n')
    with pytest.raises(wl.InvalidArgument, match=r"apps\.one\.memory_bytes_max: expected a number of bytes"):
        load(None, file, {})


@pytest.mark.parametrize("text", ["apps = 3", "apps = ['one']"])
def test_apps_that_are_no_table_are_an_error(tmp_path: pathlib.Path, text: str):
    with pytest.raises(wl.InvalidArgument, match=r"windlass\.toml: .*apps"):
        load(None, write(tmp_path, text), {})


# -- the commands ----------------------------------------------------------------------------------------------------


def test_a_command_says_where_a_wrong_value_came_from(tmp_path: pathlib.Path):
    file = write(tmp_path, "servers = 0\n")
    own = {n: v for n, v in os.environ.items() if not n.startswith("WINDLASS_")}
    for environment, arguments, where in (
        (own | {"WINDLASS_SERVERS": "0"}, [], "WINDLASS_SERVERS: expected at least 1"),
        (own, ["--config", str(file)], "servers: expected at least 1"),
        (own | {"WINDLASS_SERVER": "2"}, [], "did you mean WINDLASS_SERVERS?"),
    ):
        command = [sys.executable, "-m", "windlass", "scheduler", *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment | {"COLUMNS": "300"}
        )
        assert done.returncode == 2
        assert where in done.stderr
        assert "Traceback" not in done.stderr
