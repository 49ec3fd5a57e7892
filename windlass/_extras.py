"""What only some users install: the error says how."""

import importlib
from typing import Any


def need(package: str, who: str) -> Any:
    """The package, an extra of the same name. Raises ImportError, which says what to install for whom."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise  # it is there, and lacks something itself
        raise ImportError(f"{who} needs {package}: pip install 'windlass[{package}]'") from error


def need_torch(who: str) -> Any:
    """torch, likewise."""
    return need("torch", who)
