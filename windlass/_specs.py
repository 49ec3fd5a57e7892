"""What the bytes of a spec say of an object, beyond what the core compares."""

from windlass import _core


def settled_in(spec: bytes) -> str:
    """What a run that goes on from a checkpoint cannot change of an object: all but its rule and policy."""
    _, is_table, shape, dtype, _, _, (kind, *numbers), seed, _, _, like, *_ = _core.read_object(spec)
    return repr((is_table, shape, dtype.name, (kind.name, *numbers), seed, like))


def like_of(spec: bytes) -> str:
    """The tensor of the same app that an object lies like; "": none."""
    like: str = _core.read_object(spec)[10]
    return like
