"""How others read the scheduler's `/metrics` and JSON API: a line for curl, a configuration for Prometheus.

Both read the Bearer value from files that only this user can read; it is in no argument. Who has it can read the status
of this cluster, and nothing else: the token cannot be computed from it.
"""

import hashlib
import json
import pathlib
import secrets
import shlex

from windlass._net.address import Address
from windlass._net.token import check_own, make_user_folder, write_private
from windlass.launch import rundir

PATHS = ("/metrics", "/api/v1/status")


def folder_of(address: Address, token: bytes) -> pathlib.Path | None:
    """Where the files for this cluster are: in its run's folder, else made in the user's. None: it has no token."""
    if not token:
        return None
    for run in rundir.runs():
        if run.address == str(address) and run.token() == token:
            return run.folder
    files = rundir.bearer_files(token)
    folder = make_user_folder() / f"api-{hashlib.sha256(files[rundir.BEARER]).hexdigest()[:16]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    check_own(folder)
    for name, line in files.items():
        if not (folder / name).exists():
            beside = folder / f"{name}-{secrets.token_hex(4)}"
            write_private(beside, line)
            beside.replace(folder / name)  # whoever reads it reads all of it
    return folder


def curl_lines(address: Address, folder: pathlib.Path | None, tls_ca: pathlib.Path | None) -> list[str]:
    """A ready line for each path."""
    options = [] if folder is None else ["-H", f"@{folder / rundir.HEADER}"]
    options += [] if tls_ca is None else ["--cacert", str(tls_ca.resolve())]
    return [shlex.join(["curl", "-sS", *options, f"{_root(address, tls_ca)}{path}"]) for path in PATHS]


def prometheus(address: Address, folder: pathlib.Path | None, tls_ca: pathlib.Path | None, name: str | None) -> str:
    """A scrape configuration, as YAML."""
    lines = ["scrape_configs:", "  - job_name: windlass", f"    scheme: {'http' if tls_ca is None else 'https'}"]
    if folder is not None:
        file = json.dumps(str(folder / rundir.BEARER))  # a text of JSON is one of YAML
        lines += ["    authorization:", "      type: Bearer", f"      credentials_file: {file}"]
    if tls_ca is not None:
        lines += ["    tls_config:", f"      ca_file: {json.dumps(str(tls_ca.resolve()))}"]
    lines += ["    static_configs:", f"      - targets: [{json.dumps(_host(address))}]"]
    if name is not None:
        lines += [f"        labels: {{run: {json.dumps(name)}}}"]
    return "\n".join(lines)


def _host(address: Address) -> str:
    return str(address).removeprefix("tcp://")


def _root(address: Address, tls_ca: pathlib.Path | None) -> str:
    return f"{'http' if tls_ca is None else 'https'}://{_host(address)}"
