"""Leave the reason why a pod's training container ends where the kubelet reads it.

The kubelet copies the text into the pod's status. There, the supervisor and `kubectl describe` find it even
if the launcher never reached a sidecar.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

FILE = Path("/dev/termination-log")  # the default terminationMessagePath, writable on a read-only root too
MOST_BYTES = 1024  # the kubelet accepts 4,096, and 12 KiB from all containers of a pod


def leave_message(text: str) -> None:
    """Write `text` for the kubelet. Do nothing if it has made no such file, as outside a pod."""
    with suppress(OSError):
        descriptor = os.open(FILE, os.O_WRONLY | os.O_TRUNC)
        try:
            os.write(descriptor, text.encode(errors="replace")[:MOST_BYTES])
        finally:
            os.close(descriptor)
