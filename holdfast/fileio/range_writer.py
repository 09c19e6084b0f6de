"""Write ranges of an existing file, which already has its final size, from several threads or hosts.

As in `holdfast.fileio.bulk_copy`, whole blocks are written with direct I/O if the file system supports it.
"""

from __future__ import annotations

import errno
import os
import stat

from holdfast.fileio.bulk_copy import BLOCK_BYTES, CANNOT

_FLAGS = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening never creates a file or blocks


class RangeWriter:
    """The file `name` in the open directory `folder`."""

    def __init__(self, name: str, folder: int) -> None:
        """Raises OSError, including when it is not a plain file."""
        self._file = os.open(name, _FLAGS, dir_fd=folder)
        self._direct = -1
        try:
            status = os.fstat(self._file)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a plain file", name)
            self.size = status.st_size
            self._direct = _opened_direct(name, folder)
        except BaseException:
            self.close()
            raise

    @property
    def is_direct(self) -> bool:
        return self._direct >= 0

    def write(self, content: memoryview, at: int) -> None:
        """Write all of `content`, with direct I/O if memory and `at` are block-aligned. Raises OSError."""
        done = self._write_blocks(content, at)
        while done < len(content):
            with content[done:] as rest:
                done += os.pwrite(self._file, rest, at + done)

    def sync(self) -> None:
        """Make everything that was written durable. Raises OSError."""
        os.fdatasync(self._file)

    def close(self) -> None:
        for descriptor in (self._file, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._direct = -1

    def __enter__(self) -> RangeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_blocks(self, content: memoryview, at: int) -> int:
        """Return how many bytes were written with direct I/O."""
        size, done = len(content) // BLOCK_BYTES * BLOCK_BYTES, 0
        if self._direct < 0 or at % BLOCK_BYTES:
            return 0
        try:
            while done < size:
                with content[done:size] as rest:
                    written = os.pwrite(self._direct, rest, at + done)
                done += written // BLOCK_BYTES * BLOCK_BYTES
                if written % BLOCK_BYTES or not written:
                    break  # the file system is full; the write through the page cache will raise that error
        except OSError as error:
            if error.errno not in CANNOT:
                raise
        return done


def _opened_direct(name: str, folder: int) -> int:
    try:
        return os.open(name, _FLAGS | os.O_DIRECT, dir_fd=folder)
    except OSError as error:
        if error.errno not in CANNOT:
            raise
        return -1
