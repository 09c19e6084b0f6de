"""Copy a file to storage past the page cache: straight from the pages that it lies in.

A copy through the cache moves each byte once more, fills memory that the training could use, and comes to
a stop whenever the kernel finds too much of it unwritten: of two writes of 1 GB one may take four times as
long as the other. Here the disk fetches what is written from the source's own memory.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from io import FileIO

PIECE_BYTES = 8 << 20  # larger ones are little faster, and a kill waits for one; a multiple of any page
BLOCK_BYTES = 4096  # a multiple of any disk's block
# What a file system says that cannot do it, or not from such memory, and a source that became shorter.
_CANNOT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV, errno.EFAULT})


def copy(file: FileIO, out: int, moved: Callable[[], object] = lambda: None) -> int:
    """Copy `file` into the new file `out` from the beginning on, and return how many bytes were copied.

    They are whole blocks. Where the file system cannot do it they are fewer, or none: what is left is the
    caller's to copy in the usual way. Nothing is durable before an fsync. `moved` is called for each piece.
    Raises OSError.
    """
    if not _switched(out, os.O_DIRECT):
        return 0
    try:
        return _pieces(file.fileno(), out, moved)
    finally:
        _switched(out, 0)


def _switched(out: int, direct: int) -> bool:
    flags = fcntl.fcntl(out, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(out, fcntl.F_SETFL, flags | direct)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        return False
    return True


def _pieces(source: int, out: int, moved: Callable[[], object]) -> int:
    size = os.fstat(source).st_size // BLOCK_BYTES * BLOCK_BYTES
    done = 0
    while done < size:
        length = min(PIECE_BYTES, size - done)
        count = _piece(source, out, done, length)
        done += count
        moved()
        if count < length:
            break
    return done


def _piece(source: int, out: int, at: int, length: int) -> int:
    """Write one piece; return how many bytes of it went, in whole blocks."""
    count = 0
    try:
        with (
            mmap.mmap(source, length, access=mmap.ACCESS_READ, offset=at) as piece,
            memoryview(piece) as view,
        ):
            while count < length:
                with view[count:] as rest:
                    written = os.pwrite(out, rest, at + count)
                count += written // BLOCK_BYTES * BLOCK_BYTES
                if written % BLOCK_BYTES or not written:
                    break  # there is no room for more: the usual way ends with that error
    except ValueError:  # shorter than a moment ago
        pass
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
    return count
