"""Send a range of a pinned snapshot to another member, from a thread, without copying it.

sendfile moves the bytes from the slot's file to the socket, bypassing the interpreter and the event loop. If
the snapshot has no seal, the CRC32 of each 8 MiB chunk follows the chunk. If it has a seal, the receiver
compares the checksum of the whole snapshot instead, which also detects damage in this member's memory since
the seal was computed. Over TLS, sendfile would send plaintext, so a thread reads the chunks and the server's
transport sends them.
"""

from __future__ import annotations

import ipaddress
import os
import select
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.fileio.checksum import CHUNK_BYTES, stretch_crc
from holdfast.snapshot.commit_records import CommitRecord

try:  # sender and receiver hash all bytes; with zlib's crc32, this would take as long as the transfer
    from zlib_ng.zlib_ng import crc32
except ImportError:  # if an image lacks zlib_ng, zlib computes the same checksums more slowly
    from zlib import crc32

__all__ = ["crc32"]

SUM = struct.Struct("<I")
SLOWEST_BYTES_S = 4 << 20
ANSWER_S = 60.0  # the time allowed for a range, in addition to its size divided by `SLOWEST_BYTES_S`


def listener(host: str) -> socket.socket:
    """Return a listening socket for the peers, on a free port. Raises `OSError`.

    Between members on one host, sending needs no pacing. BBR, if it is the system's congestion control, sets
    a timer for every few packets, which takes several times as long as the copy. On the loopback interface,
    the socket therefore uses Reno, which every kernel provides and permits. The option must be set on the
    listener, because a connection that BBR has paced once remains paced.
    """
    found = socket.create_server((host, 0))
    if ipaddress.ip_address(found.getsockname()[0]).is_loopback:
        with suppress(OSError):  # if this fails, the system's default still works, only more slowly
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    return found


class UnalignedRange(ValueError):
    """The range does not begin and end at chunk boundaries."""


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """The bytes from `begin` to `end` of a snapshot of `total_bytes`, in whole chunks.

    Only the last chunk of the snapshot can be shorter.
    """

    begin: int
    end: int
    total_bytes: int

    @classmethod
    def parse(cls, text: str, total_bytes: int) -> ChunkRange:
        """Parse a Range header, such as "bytes=8388608-". Raises `UnalignedRange`."""
        first, dash, last = text.removeprefix("bytes=").partition("-")
        if not (text.startswith("bytes=") and dash and first.isdecimal() and len(text) < 64):
            raise UnalignedRange(f"range {text[:64]!r}: expected bytes=FIRST-LAST")
        if last and not last.isdecimal():
            raise UnalignedRange(f"range {text[:64]!r}: expected bytes=FIRST-LAST")
        found = cls(int(first), min(int(last) + 1, total_bytes) if last else total_bytes, total_bytes)
        whole = found.begin % CHUNK_BYTES == 0 and (found.end % CHUNK_BYTES == 0 or found.end == total_bytes)
        if not whole or not found.begin < found.end:
            raise UnalignedRange(
                f"range {text[:64]!r} of {total_bytes} bytes: expected chunks of {CHUNK_BYTES}"
            )
        return found

    @property
    def chunks(self) -> range:
        """The numbers of the chunks in this range."""
        return range(self.begin // CHUNK_BYTES, -(-self.end // CHUNK_BYTES))


def head(record: CommitRecord, part: ChunkRange, seal: int | None) -> bytes:
    """Return the header of the response. Without a seal, a checksum follows each chunk in the body."""
    lines = (
        "HTTP/1.1 206 Partial Content",
        *(f"{name}: {value}" for name, value in fields(record, part, seal)),
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def fields(record: CommitRecord, part: ChunkRange, seal: int | None) -> tuple[tuple[str, str], ...]:
    """Return the header fields of the response, as pairs of name and value."""
    size = part.end - part.begin + (0 if seal is not None else SUM.size * len(part.chunks))
    return (
        ("Content-Length", str(size)),
        ("Content-Range", f"bytes {part.begin}-{part.end - 1}/{part.total_bytes}"),
        ("X-Holdfast-World-Size", str(record.world_size)),
        ("X-Holdfast-Seal", "none" if seal is None else f"{seal:08x}"),
        ("Connection", "close"),
    )


def read(path: Path, part: ChunkRange, chunk: int, sums: bool) -> bytes:
    """Return a chunk of the range, followed by its checksum if `sums` is True. Raises `OSError`."""
    at, end = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, part.end)
    with path.open("rb") as file:
        content = os.pread(file.fileno(), end - at, at)
    if len(content) < end - at:
        raise OSError("the file of the snapshot has been truncated")
    return content + SUM.pack(crc32(content)) if sums else content


def send_range(
    descriptor: int, path: Path, first: bytes, part: ChunkRange, sums: bool, silence_s: float
) -> None:
    """Write `first` and the range of the file at `path` to a connected socket, and close `descriptor`.

    The caller must have pinned the snapshot. Raises `OSError` if the peer disconnects, reads nothing for
    `silence_s`, or is too slow overall.
    """
    give_up_at = time.monotonic() + ANSWER_S + (part.end - part.begin) / SLOWEST_BYTES_S
    with socket.socket(fileno=descriptor) as line, path.open("rb") as file:
        line.settimeout(silence_s)
        line.sendall(first)
        for chunk in part.chunks:
            at, end = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, part.end)
            _send_bytes(line, file.fileno(), at, end, give_up_at)
            if sums:  # computed while the peer reads the chunk from the socket
                line.sendall(SUM.pack(stretch_crc(file.fileno(), at, end, crc32)))


def _send_bytes(line: socket.socket, file: int, at: int, end: int, give_up_at: float) -> None:
    while at < end:
        if time.monotonic() > give_up_at:
            raise TimeoutError("the peer reads too slowly")
        try:
            sent = os.sendfile(line.fileno(), file, at, end - at)
        except BlockingIOError:
            _wait_writable(line)
            continue
        if not sent:
            raise OSError("the file of the snapshot has been truncated")
        at += sent


def _wait_writable(line: socket.socket) -> None:
    poller = select.poll()
    poller.register(line, select.POLLOUT)
    limit_s = line.gettimeout()
    if not poller.poll(None if limit_s is None else limit_s * 1e3):
        raise TimeoutError("the peer reads no data")
