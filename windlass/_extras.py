"""What only some users install: the error says how."""

import importlib
from typing import Any


def need_torch(who: str) -> Any:
    """torch. Raises ImportError, which says what to install for whom."""
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise  # torch is there, and lacks something itself
        raise ImportError(f"{who} needs torch: pip install 'windlass[torch]'") from error
