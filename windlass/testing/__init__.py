"""Servers and clusters in processes of their own and a network that fails, for tests: ours and yours."""

from windlass.testing.cluster import LocalCluster
from windlass.testing.faults import Faults
from windlass.testing.processes import Servers
from windlass.testing.proxy import Proxy

__all__ = ["Faults", "LocalCluster", "Proxy", "Servers"]
