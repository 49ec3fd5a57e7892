"""Settings: flag over environment (WINDLASS_*) over TOML file over default, and where each came from.

A name that is not known is an error with a suggestion: a setting that is mistyped must not be silently another.
"""

import dataclasses
import difflib
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from windlass._cgroup import default_memory_bytes_max
from windlass._errors import InvalidArgument
from windlass._net.token import check_token, own_token, read_token
from windlass._rules.sync import ASP, parse_sync

Kind = Literal["text", "count", "bytes", "seconds", "flag", "path", "sync", "every"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting. Its flag is --the-name, its variable WINDLASS_THE_NAME, its key in a file the_name."""

    kind: Kind
    default: Any
    help: str
    least: float = 0
    choices: tuple[str, ...] = ()


SETTINGS: dict[str, Setting] = {
    "address": Setting("text", None, "Where the scheduler is: tcp://HOST:PORT."),
    "role": Setting(
        "text", "worker", "What connect() makes of the process.", choices=("worker", "server", "scheduler")
    ),
    "app": Setting("text", "default", "The group of workers that trains together."),
    "servers": Setting("count", 1, "How many servers are expected.", least=1),
    "workers": Setting("count", 1, "How many workers `windlass run` starts.", least=1),
    "transport": Setting(
        "text",
        "auto",
        "Whether memory is shared with servers on the same host.",
        choices=("auto", "arena", "socket"),
    ),
    "sync": Setting(
        "sync",
        None,
        "The policy of an app's objects: bsp, bsp:SPARE, ssp:STALENESS, asp, maxdelay:SECONDS. Default: asp, and bsp "
        "for optimizers.",
    ),
    "on_worker_loss": Setting(
        "text",
        "continue",
        "What the others do when a worker is lost: continue without it, or wait for a replacement.",
        choices=("continue", "wait"),
    ),
    "on_server_loss": Setting(
        "text",
        "continue",
        "What the scheduler does when a server is lost: continue with the others, or end the cluster, so that whoever "
        "starts its processes again has it go on from a checkpoint.",
        choices=("continue", "end"),
    ),
    "unfinished_code": Setting(
        "count",
        0,
        "The exit code of servers and scheduler where it helps to start all processes again: one was told to end "
        "before the work was done, or was lost.",
    ),
    "number": Setting("count", None, "The number that a server wants to have. Default: the first that is free."),
    "listen": Setting("text", "tcp://127.0.0.1:0", "What to bind: tcp://HOST:PORT, port 0 for a free one."),
    "advertise": Setting("text", None, "What others are told to connect to, where that is not what is bound."),
    "address_file": Setting("path", None, "A file to write the real address to, once others can connect."),
    "token_file": Setting(
        "path", None, "The file with the token that lets a process in. Default: the user's own token on this host."
    ),
    "no_token": Setting("flag", False, "Do without a token, on loopback: everybody on this machine gets in."),
    "failure_timeout": Setting("seconds", 10.0, "Silence after which a member is dead.", least=0.1),
    "start_timeout": Setting("seconds", 60.0, "How long to wait until all have come.", least=0.1),
    "linger": Setting("flag", False, "Stay when all workers have left; a server also without a scheduler."),
    "threads": Setting("count", None, "Threads of a server that work. Default: the cores that it may use.", least=1),
    "memory_bytes_max": Setting(
        "bytes",
        None,
        "What tensors and tables may take on a server. Default: 80 % of the memory of the machine or its cgroup, which "
        "the servers of one `windlass run` share.",
    ),
    "arena_bytes_max": Setting("bytes", None, "What a client on the same host may share. Default: the memory."),
    "staging_bytes_max": Setting(
        "bytes", None, "What requests and answers under way may take on a server. Default: 512 MiB."
    ),
    "allow": Setting(
        "text", "", "Modules, with commas between them, whose rules and functions servers may run; torch.optim is one."
    ),
    "function_seconds": Setting("seconds", 10.0, "What a call of a user's rule or function may take.", least=0.001),
    "state": Setting(
        "path", None, "The scheduler's journal, a file: a scheduler that is started with it again goes on where it was."
    ),
    "checkpoint_dir": Setting("text", None, "Where checkpoints are kept: a folder, or any URL that fsspec knows."),
    "checkpoint_every": Setting(
        "every", None, "How often to take one: seconds, such as 600s, or iterations, such as 1000. Default: when asked."
    ),
    "checkpoint_keep": Setting("count", 3, "How many of them to keep, beside those with a tag.", least=1),
    "checkpoint_rate": Setting(
        "bytes", None, "What a server may write of a checkpoint in a second. Default: all that the disk takes.", least=1
    ),
    "checkpoint_bytes_max": Setting(
        "bytes",
        256 << 20,
        "What a server sets aside for a checkpoint because it is about to change; pushes then wait.",
        least=1 << 20,
    ),
    "log_dir": Setting("path", None, "A folder for one log file per process."),
    "progress": Setting(
        "text",
        "off",
        "Whether `windlass run` shows how workers get on; auto: on a terminal.",
        choices=("auto", "on", "off"),
    ),
    "tls_cert": Setting("path", None, "The scheduler's certificate, PEM: its control port then speaks TLS."),
    "tls_key": Setting("path", None, "The key to it."),
    "tls_ca": Setting(
        "path", None, "The certificate that members trust; the control port is then expected to speak TLS."
    ),
}
#: At SIGTERM, for a last checkpoint before the end.
SAVE_SECONDS = 30.0
#: Variables that are not settings of this kind.
OTHER_VARIABLES = {
    "WINDLASS_TOKEN",
    "WINDLASS_CONFIG",
    "WINDLASS_CLUSTER",
    "WINDLASS_LISTEN_FD",
    "WINDLASS_RUN_DIR",
    "WINDLASS_RUN_SETTINGS",
    "WINDLASS_ISA",
    "WINDLASS_BREAK",
    "WINDLASS_STOP",
    "WINDLASS_CACHE",
    "WINDLASS_TASKS",  # of an engine that are workers: to the processes that `windlass join` starts
    "WINDLASS_RESUME",  # "newest", or which checkpoint of app WINDLASS_APP the scheduler begins with
    "WINDLASS_RESUME_SINCE",  # seconds since 1970: a checkpoint taken later goes before that
}
#: What Kubernetes puts into every container of a namespace for a Service whose name begins with "windlass".
_SERVICE = re.compile(r"WINDLASS_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
_SUFFIXES = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Values by name, and where each came from."""

    values: dict[str, Any]
    sources: dict[str, str]
    quotas: dict[str, int]  #: memory_bytes_max by app
    config: pathlib.Path | None = None  #: the file

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def as_environment(self, names: Iterable[str]) -> dict[str, str]:
        """Variables for other processes, of those that somebody has set."""
        return {f"WINDLASS_{name.upper()}": str(self[name]) for name in names if self.sources[name] != "default"}

    def describe(self) -> dict[str, object]:
        """For ``windlass status``."""
        return {
            name: {"value": str(value) if isinstance(value, pathlib.Path) else value, "from": self.sources[name]}
            for name, value in self.values.items()
        }


def load(
    flags: Mapping[str, Any] | None = None,
    config: pathlib.Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """All settings. flags: those that are not None count."""
    environ = os.environ if environ is None else environ
    check_environment(environ)
    if config is None and environ.get("WINDLASS_CONFIG"):
        config = pathlib.Path(environ["WINDLASS_CONFIG"])
    filed, quotas = _read_file(config) if config is not None else ({}, {})
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, setting in SETTINGS.items():
        variable = f"WINDLASS_{name.upper()}"
        if flags is not None and flags.get(name) is not None:
            values[name], sources[name] = flags[name], "flag"
            values[name] = _checked(f"--{name.replace('_', '-')}", setting, flags[name])
        elif environ.get(variable):
            values[name], sources[name] = _checked(variable, setting, environ[variable]), f"environment, {variable}"
        elif name in filed:
            values[name], sources[name] = _checked(f"{config}: {name}", setting, filed[name]), f"file, {config}"
        else:
            values[name], sources[name] = setting.default, "default"
    return Settings(values, sources, quotas, config)


def check_environment(environ: Mapping[str, str]) -> None:
    """Raises on a variable that looks like a setting and is none."""
    known = {f"WINDLASS_{name.upper()}" for name in SETTINGS} | OTHER_VARIABLES
    for variable in environ:
        if variable.startswith("WINDLASS_") and variable not in known and not _SERVICE.fullmatch(variable):
            raise InvalidArgument(
                f"environment variable {variable}: there is no such setting{_suggest(variable, known)}"
            )


def _read_file(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, int]]:
    import tomllib  # few have a file

    try:
        text = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidArgument(f"settings file {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"settings file {path}: {error}") from error
    quotas: dict[str, int] = {}
    apps = text.pop("apps", {})
    if not isinstance(apps, dict):
        raise InvalidArgument(f"settings file {path}: apps: expected tables such as [apps.NAME], not {apps!r}")
    for app, table in apps.items():
        for key, value in table.items() if isinstance(table, dict) else [("", table)]:
            if key != "memory_bytes_max":
                hint = _suggest(key, ["memory_bytes_max"])
                raise InvalidArgument(f"settings file {path}: apps.{app}.{key}: there is no such setting{hint}")
            quotas[app] = _checked(f"{path}: apps.{app}.memory_bytes_max", SETTINGS["memory_bytes_max"], value)
    for key in text:
        if key not in SETTINGS:
            raise InvalidArgument(f"settings file {path}: {key}: there is no such setting{_suggest(key, SETTINGS)}")
    return text, quotas


def _suggest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


def _checked(where: str, setting: Setting, value: Any) -> Any:
    """The value in its own type. Raises InvalidArgument."""
    if setting.kind == "sync":
        return str(parse_sync(value, ASP(), where))
    try:
        match setting.kind:
            case "flag":
                read: Any = _flag(value)
            case "count":
                read = int(value) if not isinstance(value, (bool, float)) else _wrong()
            case "bytes":
                read = _bytes(value)
            case "seconds":
                read = float(value) if not isinstance(value, bool) else _wrong()
            case "path":
                return pathlib.Path(value)
            case "every":
                return str(value) if every(value) else _wrong()
            case _:
                read = value if isinstance(value, str) else _wrong()
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(f"{where}: expected {_EXPECTED[setting.kind]}, not {value!r}") from None
    if setting.choices and read not in setting.choices:
        raise InvalidArgument(f"{where}: expected one of {', '.join(setting.choices)}, not {value!r}")
    if setting.kind in ("count", "bytes", "seconds") and not read >= setting.least:
        raise InvalidArgument(f"{where}: expected at least {setting.least:g}, not {value!r}")
    return read


_EXPECTED = {
    "flag": "true or false",
    "count": "a whole number",
    "bytes": "a number of bytes, such as 1000000, 8G or 8Gi",
    "seconds": "a number of seconds",
    "path": "a path",
    "every": "seconds, such as 600s, or iterations, such as 1000,",
    "text": "a text",
}


def _wrong() -> Any:
    raise ValueError


def every(value: object) -> tuple[float | None, int | None]:
    """Seconds or iterations, of which one is None. Raises ValueError."""
    text = str(value).strip().lower()
    seconds = float(text[:-1]) if text.endswith("s") else None
    iterations = int(text) if seconds is None else None
    if not (seconds or iterations or 0) > 0 or seconds == float("inf"):
        raise ValueError
    return seconds, iterations


def _flag(value: Any) -> bool:
    text = str(value).lower()
    if text not in ("1", "true", "yes", "0", "false", "no"):
        raise ValueError
    return text in ("1", "true", "yes")


def _bytes(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError
    if isinstance(value, int):
        return value
    text = str(value).strip().lower().removesuffix("b")
    digits = text.rstrip("kmgti")
    return int(float(digits) * _SUFFIXES[text[len(digits) :]]) if text[len(digits) :] in _SUFFIXES else _wrong()


def token_of(settings: Settings) -> bytes | None:
    """The token that is given, else the user's own on this host; None: no_token."""
    given = given_token(settings)
    if not settings.no_token:
        return own_token() if given is None else given
    if given is not None:
        raise InvalidArgument(f"no_token ({settings.sources['no_token']}): expected no token, but one is given, too")
    return None


def given_token(settings: Settings) -> bytes | None:
    """From the file that a flag names, else WINDLASS_TOKEN, else the file that another setting names, else None."""
    if settings.sources["token_file"] != "flag" and "WINDLASS_TOKEN" in os.environ:
        return check_token(os.environb[b"WINDLASS_TOKEN"], "environment variable WINDLASS_TOKEN")
    return None if settings.token_file is None else read_token(settings.token_file)


def uses_own_token(settings: Settings) -> bool:
    """Whether no token is given, so that the user's own on this host counts. Reads no file."""
    return settings.token_file is None and "WINDLASS_TOKEN" not in os.environ and not settings.no_token


def with_memory_cap(settings: Settings, servers: int) -> Settings:
    """The same with memory_bytes_max, where it was not set, for one of so many servers that share this machine."""
    if settings.memory_bytes_max is not None:
        return settings
    values = {**settings.values, "memory_bytes_max": default_memory_bytes_max(servers)}
    sources = {**settings.sources, "memory_bytes_max": f"this machine, shared by {servers}"}
    return dataclasses.replace(settings, values=values, sources=sources)
