"""What the ranks of a group have called, as this one counts it."""

from __future__ import annotations

from hpcstrat._communicators.records import Signature


class Calls:
    """What the communicators of one group have in common.

    Attributes:
        number: of calls made.
        agreed: the last of them.
        paused: the call that not all ranks are in, during which none may be made.
        faults: a number that tells after which calls exceptions left `Strategy.run`.
        fault: the last of them.
    """

    __slots__ = ("agreed", "fault", "faults", "number", "paused")

    def __init__(self) -> None:
        self.number: int = 0
        self.agreed: Signature | None = None
        self.paused: str | None = None
        self.faults: int = 0
        self.fault: BaseException | None = None
