"""Keeps the memory of a serving agent small: it runs on every node, beside the training job."""

from __future__ import annotations

import ctypes
import mimetypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_M_ARENA_MAX = -8  # malloc.h
# OpenSSL finds the system's certificate authorities by these variables.
_NO_AUTHORITIES = {"SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": os.devnull}


def share_heap() -> None:
    """Make the C library use one heap for all threads that start later.

    Otherwise each of the dozen threads gets a heap of its own (0.4 MB in total). Only one thread at a time
    runs Python code and allocates memory, so a heap of its own would not make a thread faster.
    """
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


@contextmanager
def without_unused_tables() -> Iterator[None]:
    """Within the context, importing aiohttp does not load tables that this server never uses.

    At its import, aiohttp creates TLS contexts for its client, with all certificate authorities of the system
    (2 MB), and reads the system's MIME types for serving files (0.3 MB). The agent's server uses no TLS and
    serves no files, and the agent's client of the API server trusts only the authority of its pod. No other
    thread may run.
    """
    before, files = {name: os.environ.get(name) for name in _NO_AUTHORITIES}, list(mimetypes.knownfiles)
    os.environ.update(_NO_AUTHORITIES)
    mimetypes.knownfiles.clear()
    try:
        yield
    finally:
        mimetypes.knownfiles.extend(files)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
