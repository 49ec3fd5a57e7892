"""Runs apps beside their references and prints one table: `make apps`, and `make apps-long` for the figures of record.

python apps/table.py [--long] [APP ...]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from outcome import Outcome
from side_by_side import table

APPS = Path(__file__).resolve().parent
#: What an app is told for its short form, of a few seconds. In the long form it is told nothing.
SHORT = {
    "mf": ["--fallback", "--epochs=4"],
    "fm": ["--fallback", "--epochs=5"],
    "pagerank": ["--fallback"],
    "kmeans": ["--fallback"],
    "gbdt": ["--fallback", "--trees=5", "--depth=4"],
    "sparse_lr": ["--fallback", "--batch=32", "--epochs=10"],
}


def run_app(app: str, *arguments: str, timeout: float | None = None) -> Outcome:
    """Runs it with its reference. Raises RuntimeError with what it said if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcome"
        command = [sys.executable, str(APPS / app / "train.py"), "--reference", f"--outcome={file}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        if done.returncode != 0 or not file.exists():
            raise RuntimeError(f"{app} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return Outcome(**json.loads(file.read_text()))


def row(outcome: Outcome) -> list[str]:
    """Of the table."""
    if outcome.reference is None:
        beside = [f"none: {outcome.of}", "", ""]
    else:
        wanted = f"≤ {outcome.most:g}" if outcome.least == 0 else f"≥ {outcome.least:g}"
        met = "met" if outcome.reached else "MISSED"
        ratio = f"{outcome.ours / outcome.reference:.4f}"
        beside = [f"{outcome.reference:.6g} ({outcome.of}, {outcome.of_seconds:.1f} s)", ratio, f"{wanted}, {met}"]
    return [outcome.app, outcome.data, f"{outcome.what} {outcome.ours:.6g}", *beside, f"{outcome.seconds:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Apps beside their references.")
    parser.add_argument("apps", nargs="*", metavar="APP", help=f"some of {', '.join(SHORT)} (all)")
    parser.add_argument("--long", action="store_true", help="on their own data, as long as it takes")
    args = parser.parse_args()
    if unknown := set(args.apps) - set(SHORT):
        parser.error(f"there is no app {', '.join(sorted(unknown))}; there are {', '.join(SHORT)}")
    rows, failed = [], False
    for app in args.apps or SHORT:
        try:
            outcome = run_app(app, *([] if args.long else SHORT[app]))
        except RuntimeError as error:
            print(error, file=sys.stderr)
            rows.append([app, "failed", "", "", "", "", ""])
            failed = True
        else:
            rows.append(row(outcome))
            failed = failed or not outcome.reached
    print(table(["app", "data", "ours", "reference", "ratio", "bar", "seconds"], rows))
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
