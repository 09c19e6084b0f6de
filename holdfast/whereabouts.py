"""Where a rank's main thread is: at work, or waiting for its peers, as another thread sees it."""

from __future__ import annotations

import threading

from holdfast import threadview
from holdfast.launcher_messages import COLLECTIVE

WORK = "work"
_WAITS = ("/torch/distributed/", "/torch/nn/parallel/distributed.py")


def whereabouts() -> str:
    """Return "collective" when the main thread is inside one of torch's collectives, else "work".

    What calls a collective inside torch counts as well, and waiting for the result of one (`work.wait()`)
    does not: that shows no frame of torch. What a script waits for by other means is work.
    """
    ident = threading.main_thread().ident
    frame = threadview.frames().get(ident) if ident is not None else None
    while frame is not None:
        file = frame.f_code.co_filename
        if any(sign in file for sign in _WAITS):
            return COLLECTIVE
        if "/torch/" not in file:
            return WORK
        frame = frame.f_back
    return WORK
