"""Xid 74: which bits of its seven registers are set. Pure."""

from __future__ import annotations

import re

XID = 74
REGISTERS = (1, 3, 4, 5)  # NVIDIA's Xid catalogue: only these can be read
COUNT = 7
WIDTH = 32

_REGISTER = re.compile(r"\s*0x([0-9a-f]{1,8})\s*", re.IGNORECASE)

Bit = tuple[int, int]  # register, from 1; bit, from 0


def bits(variant: str) -> tuple[Bit, ...]:
    """Return the bits set in the registers that can be read; none if `variant` holds no seven registers."""
    matches = [_REGISTER.fullmatch(part) for part in variant.split(",", COUNT)]
    values = [int(match[1], 16) for match in matches if match]
    if len(values) != COUNT or len(matches) != COUNT:
        return ()
    return tuple(
        (register, bit) for register in REGISTERS for bit in range(WIDTH) if values[register - 1] >> bit & 1
    )
