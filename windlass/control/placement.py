"""Which server gets which shard of a new object. Pure.

Shards are given out in runs of neighbours, so that each server makes few long passes. How long a run is follows from
how much its server has already: in the end all have the same number of bytes, as nearly as whole shards allow.

    bytes had   A ######      what is to be placed   0 1 2 3 4 5 6 7
                B ##          runs by what is missing   C   B   A
                C             ->                     C C C C B B B A
"""

from collections.abc import Mapping, Sequence


def place(shard_bytes: Sequence[int], load_bytes: Mapping[int, int]) -> list[int]:
    """The server of every shard.

    load_bytes: what each server has already. Shards that take nothing yet, a table's, are divided evenly.
    """
    if not load_bytes:
        raise ValueError("place: there is no server")
    servers = sorted(load_bytes, key=lambda server: (load_bytes[server], server))
    if len(shard_bytes) <= len(servers):
        return servers[: len(shard_bytes)]
    sizes = shard_bytes if any(shard_bytes) else [1] * len(shard_bytes)
    total = sum(sizes)
    shares = _missing(total, [load_bytes[server] for server in servers]) if any(shard_bytes) else [1.0] * len(servers)
    scale = total / sum(shares)
    owners: list[int] = []
    at, end, before = 0, shares[0] * scale, 0
    for size in sizes:
        while before + size / 2 > end and at + 1 < len(servers):
            at += 1
            end += shares[at] * scale
        owners.append(servers[at])
        before += size
    return owners


def _missing(total: int, loads: Sequence[int]) -> list[float]:
    """What each server lacks to the level that all reach when `total` has been poured in; loads ascend."""
    level, poured = float(loads[0]), 0.0
    for count, load in enumerate(loads[1:], 1):
        need = (load - level) * count
        if poured + need >= total:
            break
        poured, level = poured + need, float(load)
    else:
        count = len(loads)
    level += (total - poured) / count
    return [max(0.0, level - load) for load in loads]


def runs_of(owners: Sequence[int], terms: Sequence[int]) -> list[tuple[int, int, int]]:
    """Neighbours with the same owner and term as one: (first shard, server, term)."""
    runs: list[tuple[int, int, int]] = []
    for shard, (server, term) in enumerate(zip(owners, terms, strict=True)):
        if not runs or runs[-1][1:] != (server, term):
            runs.append((shard, server, term))
    return runs


def spread(runs: Sequence[tuple[int, int, int]], shards: int) -> tuple[list[int], list[int]]:
    """The owner and the term of every shard."""
    owners: list[int] = []
    terms: list[int] = []
    for at, (first, server, term) in enumerate(runs):
        end = runs[at + 1][0] if at + 1 < len(runs) else shards
        owners += [server] * (end - first)
        terms += [term] * (end - first)
    return owners, terms
