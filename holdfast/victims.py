"""What the collectives of torch say to a rank whose peer has died, in a few words. Pure."""

from __future__ import annotations

SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket Timeout",
    "Timed out waiting",
    "NCCL",
    "connectFullMesh",
    "recvValue failed",
    "wait timeout",
)
_PLAIN = SIGNS[:6]  # those that say by themselves what happened
_MOST = 80  # characters of what has none of them


def lost_peers(text: str) -> str:
    """Return "lost its peers" with the reason that the last line of an exception's `text` gives.

    Where in the library that was, with which port, and what torch supposes are left out: the record of the
    incident has the whole text.
    """
    lines = text.strip().splitlines()
    reason = next((sign.lower() for sign in _PLAIN if sign in text), lines[-1] if lines else "")
    return "lost its peers" + (f" ({reason[:_MOST]})" if reason else "")
