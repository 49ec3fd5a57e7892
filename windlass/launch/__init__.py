"""Starting clusters: one machine by `windlass run`, several by hand or by environment."""

#: The exit code of a server or scheduler that cannot begin as it is told to: nor could another.
CANNOT_BEGIN = 2
ENDING = "ending"  # a file in a run's folder, since its launcher ends what is left: workers hold for nothing

#: The exit code of a worker that ends because another one is lost, without which it could only wait: all must end.
GROUP_LOST = 76

#: How Ray places servers and workers, the usual one first.
STRATEGIES = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")
