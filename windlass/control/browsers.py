"""Web pages do not command the scheduler: what a browser sends on behalf of another site is refused.

A page of any site can make a browser on this machine send requests to loopback, open WebSockets there, and, by giving
its own name our address (DNS rebinding), even read the answers. A browser says so:

    Sec-Fetch-Site: cross-site     whose page it was
    Origin: https://elsewhere      the same, with every WebSocket
    Host: elsewhere:4000           the name under which it believes to reach us

Members and tools send neither of the first two. A scheduler that has a token may be reached under any name: a page does
not know the token. One without a token is on loopback, and answers to localhost and loopback addresses
alone.
"""

import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_OURS = ("none", "same-origin")  # the user typed it, or it is our own page


def complaint(headers: Mapping[str, str], *, any_name: bool) -> str:
    """Why a request is refused, or nothing. any_name: whether the scheduler may be called by any name."""
    host = headers.get("Host", "")
    if (site := headers.get("Sec-Fetch-Site", "none")) not in _OURS:
        return f"expected a request of no other site, saw Sec-Fetch-Site: {site}"
    if (origin := headers.get("Origin")) is not None and urlsplit(origin).netloc != host:
        return f"expected a request of no other site, saw Origin: {origin}"
    if not any_name and not _is_loopback(host):
        return f"expected localhost or a loopback address, saw Host: {host}"
    return ""


def _is_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def refuse_other_sites(*, any_name: bool) -> Middleware:
    """A middleware."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if why := complaint(request.headers, any_name=any_name):
            raise web.HTTPForbidden(text=f"{why}\n")
        return await handler(request)

    return check
