"""TLS to a scheduler."""

import os
import ssl

from windlass._errors import InvalidArgument


def client_tls(ca: str | os.PathLike[str] | None) -> ssl.SSLContext | None:
    """The context for a scheduler whose certificate `ca` has signed; None without one."""
    if ca is None:
        return None
    try:
        return ssl.create_default_context(cafile=os.fspath(ca))
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(f"tls_ca {ca}: {error}") from error
