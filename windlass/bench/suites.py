"""``windlass bench all``: every suite, each in a process of its own, one file per suite."""

import importlib.util
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence

#: In the order in which they run.
SUITES = ("core", "wire", "local", "control", "sync", "train", "embed", "rules", "checkpoint", "ray")
NEEDS = {"train": "torch", "embed": "torch", "ray": "ray"}  # extras


def command(suite: str, file: pathlib.Path, rows: int, short: bool) -> list[str]:
    """That measures one suite."""
    of_rows = ["--rows", str(rows)] if suite in ("core", "wire", "local", "embed") else []
    how = [*of_rows, *(["--short"] if short else [])]
    return [sys.executable, "-m", "windlass", "bench", suite, "--json", str(file), *how]


def run_all(
    folder: pathlib.Path,
    rows: int,
    short: bool,
    say: Callable[[str], object],
    suites: Sequence[str] = SUITES,
    command: Callable[[str, pathlib.Path, int, bool], list[str]] = command,
) -> list[str]:
    """Measures every suite, also after one that failed; returns the names of those that did. A suite that fails leaves
    no file, not even one of an earlier time."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for suite in suites:
        file = folder / f"{suite}.json"
        file.unlink(missing_ok=True)
        needed = NEEDS.get(suite)
        if needed is not None and importlib.util.find_spec(needed) is None:
            say(f"{suite}: not measured, {needed} is not installed")
            continue
        process = subprocess.Popen(command(suite, file, rows, short))
        try:
            code = process.wait()
        except BaseException:  # Ctrl-C reached it, too; it ends what it has started
            process.terminate()
            process.wait()
            raise
        if code != 0:
            failed.append(suite)
            say(f"{suite}: failed with status {code}")
    return failed
