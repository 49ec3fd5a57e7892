"""Types of arguments that the apps share."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path


def whole(least: int) -> Callable[[str], int]:
    """An argparse type: whole numbers of at least `least`."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, not {text!r}")
        return int(text)

    return parse


def positive(text: str) -> float:
    """An argparse type: finite numbers above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"expected a finite number above 0, not {text!r}")
    return value


def add_outcome(parser: argparse.ArgumentParser) -> None:
    """Options of every app that compares itself with a reference."""
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="of what is drawn (%(default)s)")
    parser.add_argument(
        "--sync", metavar="POLICY", help="bsp, ssp:3, asp or maxdelay:0.5 (WINDLASS_SYNC, or the app's)"
    )
    parser.add_argument("--reference", action="store_true", help="compare with a reference on the same data")
    parser.add_argument("--outcome", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--fallback", action="store_true", help="small data that needs no download")
