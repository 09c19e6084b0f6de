"""Write the reason why a pod's training container ends to the file that the kubelet reads.

The kubelet copies the text into the pod's status. The supervisor and `kubectl describe` find it there even if
the launcher never reached a sidecar.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

FILE = Path("/dev/termination-log")  # the default terminationMessagePath, writable even on a read-only root
MOST_BYTES = 1024  # the kubelet accepts 4,096, and 12 KiB from all containers of a pod


def leave_message(text: str) -> None:
    """Write `text` for the kubelet. Do nothing if the kubelet has not created the file, as outside a pod."""
    with suppress(OSError):
        descriptor = os.open(FILE, os.O_WRONLY | os.O_TRUNC)
        try:
            os.write(descriptor, text.encode(errors="replace")[:MOST_BYTES])
        finally:
            os.close(descriptor)
