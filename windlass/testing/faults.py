"""Which faults a proxy makes, and how often."""

import dataclasses
import random
from typing import Literal

from windlass._errors import InvalidArgument

Direction = Literal["up", "down"]  # from the client to the server, and back

EXCLUSIVE = ("drop", "duplicate", "reorder", "corrupt", "half_close", "cut")
KINDS = (*EXCLUSIVE, "delay", "cut_at", "refused")


@dataclasses.dataclass(frozen=True)
class Faults:
    """How often, per frame, each fault is made; between 0 and 1.

    At most one of these six happens to a frame, so together they are at most 1:
    drop: it is not passed on. duplicate: it is passed on twice. reorder: it is held back until the next one has been
    passed on, or for 20 ms. corrupt: one to three of its bits are flipped. half_close: this direction ends behind it.
    cut: the connection is closed somewhere within it.

    delay comes on top: the frame, and all behind it, wait for a time within delay_ms.
    directions: "up" (to the server), "down" or "both". skip_hello: leave hello and its answer alone.
    The same seed makes the same faults, for the same frames on a connection with the same number.
    """

    drop: float = 0.0
    delay: float = 0.0
    delay_ms: tuple[float, float] = (1, 20)
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    half_close: float = 0.0
    cut: float = 0.0
    seed: int = 0
    directions: Literal["both", "up", "down"] = "both"
    skip_hello: bool = True

    def __post_init__(self) -> None:
        for kind in (*EXCLUSIVE, "delay"):
            if not 0 <= getattr(self, kind) <= 1:
                raise InvalidArgument(f"Faults: {kind} must be between 0 and 1, not {getattr(self, kind)!r}")
        if (total := sum(getattr(self, kind) for kind in EXCLUSIVE)) > 1 + 1e-9:
            raise InvalidArgument(f"Faults: {', '.join(EXCLUSIVE)} must add up to at most 1, not {total:g}")
        if not 0 <= self.delay_ms[0] <= self.delay_ms[1]:
            raise InvalidArgument(f"Faults: delay_ms must be the least and the most, not {self.delay_ms!r}")
        if self.directions not in ("both", "up", "down"):
            raise InvalidArgument(f'Faults: directions must be "both", "up" or "down", not {self.directions!r}')

    def draw(self, source: random.Random) -> tuple[bool, str | None]:
        """For one frame: whether it is delayed, and which other fault is made."""
        delayed, point = source.random() < self.delay, source.random()
        for kind in EXCLUSIVE:
            point -= getattr(self, kind)
            if point < 0:
                return delayed, kind
        return delayed, None
