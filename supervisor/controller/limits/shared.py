"""Group the limits that all member servers of one event loop share."""

from __future__ import annotations

from dataclasses import dataclass, field

from supervisor.controller.limits.decoding_turns import DecodingTurns
from supervisor.controller.limits.incoming import IncomingMessages
from supervisor.controller.limits.report_memory import ReportMemory


@dataclass(frozen=True, slots=True)
class SharedLimits:
    """The limits that all members of one process share."""

    turns: DecodingTurns = field(default_factory=DecodingTurns)
    memory: ReportMemory = field(default_factory=ReportMemory)
    incoming: IncomingMessages = field(default_factory=IncomingMessages)
