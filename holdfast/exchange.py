"""Give each rank's private state a second home, on another member, before every optimizer step.

Rank r sends to rank r + N (N ranks a member), so the copy is always elsewhere; where there is one member
only, to the next rank. The optimizer's first write waits for what comes in: whoever dies, either the rank
that it sends to still has the state of the step before, or its private state is in two places.
"""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_LENGTH = struct.Struct("<qq")  # bytes that follow, -1 for none; 1 when it may change after all
_ROUND_BYTES = 4096
_TAG = 0x4846


class Exchange:
    """One rank's side. All ranks must call `swap` equally often, in the same order."""

    def __init__(self, rank: int, world_size: int, nproc: int) -> None:
        self.shift = nproc % world_size or 1 % world_size
        self.to = (rank + self.shift) % world_size
        self.source = (rank - self.shift) % world_size
        self._room = 0
        self._out: torch.Tensor | None = None
        self._in: torch.Tensor | None = None

    @property
    def useful(self) -> bool:
        """False in a group of one rank: there is nobody else."""
        return self.shift != 0

    def agree(self, length: int) -> None:
        """Make room for the largest blob of any rank, and some more. Collective."""
        import torch
        import torch.distributed as dist

        largest = torch.tensor([length])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        rounds = -(-(int(largest) + _LENGTH.size) // _ROUND_BYTES) + 1
        self._room = rounds * _ROUND_BYTES
        self._out = torch.zeros(self._room, dtype=torch.uint8)
        self._in = torch.zeros(self._room, dtype=torch.uint8)

    def swap(self, blob: bytes, late: bool) -> tuple[bytes, bool] | None:
        """Send `blob`, return that of rank `source` and whether that may still change.

        Collective; raises what the backend raises.

        None: that rank's blob has outgrown the room, and so has no second home until the next
        generation agrees anew.
        """
        import torch.distributed as dist

        assert self._out is not None
        assert self._in is not None
        if len(blob) + _LENGTH.size > self._room:
            blob, length = b"", -1
        else:
            length = len(blob)
        framed = _LENGTH.pack(length, late) + blob
        ctypes.memmove(self._out.data_ptr(), framed, len(framed))
        receiving = dist.irecv(self._in, self.source, tag=_TAG)
        sending = dist.isend(self._out, self.to, tag=_TAG)
        assert sending is not None
        assert receiving is not None
        receiving.wait()
        sending.wait()
        length, was_late = _LENGTH.unpack(ctypes.string_at(self._in.data_ptr(), _LENGTH.size))
        if not 0 <= length <= self._room - _LENGTH.size:
            return None
        return ctypes.string_at(self._in.data_ptr() + _LENGTH.size, length), bool(was_late)
