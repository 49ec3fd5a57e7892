"""At which address tasks of an engine reach each other's hosts, by the names that the engine has for them."""

import contextlib
import ipaddress
import re
import socket
import subprocess

_SCONTROL_SECONDS = 20.0
_NODE_ADDR = re.compile(r"\bNodeAddr=(\S+)")


def address_of(host: str, *, beyond: bool) -> str | None:
    """An IP address, by the resolver, else as Slurm knows the node; None: nobody knows it.

    beyond: it must reach this host from others, so a name that leads to loopback (one's own often does) is no answer.
    """
    if (found := _resolve(host, beyond)) is not None:
        return found
    told = _node_addr(host)
    if told is None:
        return None
    return told if _is_ip(told) else _resolve(told, beyond)


def address_towards(other: str) -> str | None:
    """The address of this host that packets to another address carry."""
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return None


def _resolve(host: str, beyond: bool) -> str | None:
    if _is_ip(host):
        return host
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        for _, _, _, _, (ip, *_) in sorted(found, key=lambda one: one[0] != socket.AF_INET):
            if not (beyond and ipaddress.ip_address(str(ip).partition("%")[0]).is_loopback):
                return str(ip)
    return None


def _is_ip(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(text))
    return False


def _node_addr(host: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(
            ["scontrol", "show", "node", host], capture_output=True, text=True, timeout=_SCONTROL_SECONDS, check=True
        )
        if match := _NODE_ADDR.search(said.stdout):
            return match[1]
    return None
