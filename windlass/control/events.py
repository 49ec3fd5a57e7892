"""What happens to the scheduler, and what it does about it."""

import dataclasses
from typing import TYPE_CHECKING

from windlass.control import messages as m

if TYPE_CHECKING:
    from windlass.control.saves import Save

# -- what goes in ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Came:
    """Somebody who knows the token has said who it is."""

    connection: int
    join: m.Join


@dataclasses.dataclass(frozen=True)
class Said:
    """A message of a member that has joined."""

    member: int
    message: m.Message


@dataclasses.dataclass(frozen=True)
class Died:
    """A member that is declared dead."""

    member: int
    why: str


@dataclasses.dataclass(frozen=True)
class Fired:
    """A timer that was asked for."""

    timer: str


@dataclasses.dataclass(frozen=True)
class Written:
    """The manifest of a checkpoint is on disk, or why it is not."""

    save: int
    error: str = ""
    at: float = 0.0  #: seconds since 1970


Event = Came | Said | Died | Fired | Written

# -- what comes out --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Admit:
    """The connection is this member's from now on."""

    connection: int
    member: int


@dataclasses.dataclass(frozen=True)
class Refuse:
    """The connection gets this message and ends."""

    connection: int
    message: m.Refused


@dataclasses.dataclass(frozen=True)
class Tell:
    """A message to a member."""

    member: int
    message: m.Message


@dataclasses.dataclass(frozen=True)
class Cut:
    """The member's connections end, once it has been told what it was to be told."""

    member: int


@dataclasses.dataclass(frozen=True)
class Timer:
    """Fired(name) in so many seconds, instead of any earlier one of that name. None: not at all."""

    name: str
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class Log:
    """A line for the operator."""

    level: str  #: info, warning or error
    text: str


@dataclasses.dataclass(frozen=True)
class Keep:
    """A row for the journal, which is to be on disk before any other action of the event is done. None: it goes."""

    table: str
    key: str
    value: bytes | None


@dataclasses.dataclass(frozen=True)
class Defer:
    """The connection ends without a word: whoever wants to join tries again in a moment."""

    connection: int


@dataclasses.dataclass(frozen=True)
class End:
    """The scheduler is done."""

    failed: bool
    why: str
    workers_lost: bool = False  #: nobody came in place of some that were lost, and the others were done without them
    again: bool = False  #: before its work was done, and whoever starts all processes again may have it done


@dataclasses.dataclass(frozen=True)
class SaveManifest:
    """All of a checkpoint is on disk but its manifest. Answered with Written."""

    save: "Save"


Action = Admit | Refuse | Defer | Tell | Cut | Timer | Log | SaveManifest | Keep | End
