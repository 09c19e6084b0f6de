"""A rank's standard output and error: files that a full disk must not turn into a failure of the script."""

from __future__ import annotations

import errno
import io
import sys

_AWAY = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.ESTALE})


class _Tolerant(io.FileIO):
    """Drops what storage has no room for: a line that is lost is no reason to stop training."""

    def write(self, data: bytes) -> int:  # type: ignore[override] # any buffer
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _AWAY:
                raise
            return len(data)


def install() -> None:
    """Make stdout and stderr write line by line to descriptors 1 and 2, and never fail for want of room."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        known = getattr(sys, name)
        known.flush()
        raw = io.BufferedWriter(_Tolerant(number, "w", closefd=False))  # type: ignore[type-var] # a typeshed Protocol
        made = io.TextIOWrapper(raw, known.encoding, known.errors, line_buffering=True)
        made.mode = "w"  # type: ignore[misc] # as the interpreter's own
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)
