"""The suites of ``windlass bench``: our figures beside limits and peers that are taken in the same run."""

from windlass.bench._figures import Figure, Suite

__all__ = ["Figure", "Suite"]
