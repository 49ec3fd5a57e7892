"""Types of arguments that the apps share."""

import argparse
import math
from collections.abc import Callable


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
