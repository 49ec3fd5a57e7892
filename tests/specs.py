"""Specs as their bytes travel (docs/formats/wire.md)."""

import struct

RULES = {"sgd": 0, "sum": 6, "row_adagrad": 3}

ASP = struct.pack("<B3xId", 0, 0, 0.0)  # the policy
#: What a rule may have besides: bounds, a schedule, what one of the user's keeps, its maker's text. Here none of that.
PLAIN = struct.pack("<fffB3xQQdBBBxIHH", 0.0, float("-inf"), float("inf"), 0, 0, 0, 0.0, 0, 0, 0, 0, 0, 0)


def tensor_spec(
    name: str, shape: tuple[int, ...], rule: str = "sum", *, dtype: int = 2, reject: int = 0, like: str = ""
) -> bytes:
    """The body that opens a tensor; dtype 2 is int64."""
    return (
        struct.pack("<BBBBBBHIfddQ", 0, dtype, RULES[rule], 0, reject, len(shape), len(name), 0, 0.0, 0.0, 0.0, 0)
        + struct.pack("<BxHId", 0, len(like), 0, 0.0)
        + struct.pack(f"<{len(shape)}Q", *shape)
        + name.encode()
        + like.encode()
        + PLAIN
    )


def table_spec(name: str, dim: int, rule: str = "sum") -> bytes:
    """The body that opens a table."""
    head = struct.pack("<BBBBBBHIfddQ", 1, 0, RULES[rule], 0, 0, 0, len(name), dim, 0.0, 0.0, 0.0, 0)
    return head + ASP + name.encode() + PLAIN
