"""Copy both the device's part and the host's part of the state into a slot of the arena.

The host's part is small: it consists of the optimizers' step counts and learning rates. The host may write
its part up to one step before the device writes the other part. So a copy of the host's part is kept for each
queued step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.state.device import Device, DeviceCopy, Pair

if TYPE_CHECKING:
    import torch

Tensors = list[tuple[str, "torch.Tensor"]]
MAX_KEPT_BYTES = 4 << 20  # copying a larger host part in every step would take too long


class TensorSplit:
    """Divides the collected tensors into tensors on the device and tensors on the host."""

    def __init__(self, tensors: Tensors, device: Device) -> None:
        """Divide `tensors`. Raises `BadInput` if a tensor is on another device."""
        self.of = tensors  # callers compare this by identity: the same list means the same tensors
        # Detached tensors keep their current memory even if the script gives a parameter another tensor.
        self.tensors = [(name, tensor.detach()) for name, tensor in tensors]
        held = [device.holds(tensor) for _, tensor in tensors]
        self.on_device = [at for at, on in enumerate(held) if on]
        self._on_host: dict[torch.dtype, list[int]] = {}
        for at, on in enumerate(held):
            if not on:
                self._on_host.setdefault(self.tensors[at][1].dtype, []).append(at)
        self.host_bytes = sum(self.tensors[at][1].nbytes for at, on in enumerate(held) if not on)
        self._contiguous = all(self.tensors[at][1].is_contiguous() for at, on in enumerate(held) if not on)
        self._flat: dict[torch.dtype, list[torch.Tensor]] = {}  # views of those tensors that are contiguous

    def keep(self, text: str) -> HostPart | None:
        """Return a copy of the host's current part; None if that part is too large to copy in every step."""
        import torch

        if self.host_bytes > MAX_KEPT_BYTES:
            return None
        with torch.no_grad():
            if not self._flat or not self._contiguous:
                self._flat = {
                    kind: [self.tensors[at][1].reshape(-1) for at in places]
                    for kind, places in self._on_host.items()
                }
            kept = {kind: torch.cat(flat) for kind, flat in self._flat.items()}
        return HostPart(self, text, kept)

    def host(self, part: HostPart | None) -> list[tuple[int, torch.Tensor]]:
        """Return the host's tensors with their indices: copies from `part`, or live tensors if it is None."""
        if part is None:
            return [(at, self.tensors[at][1]) for places in self._on_host.values() for at in places]
        found: list[tuple[int, torch.Tensor]] = []
        for kind, places in self._on_host.items():
            sizes = [self.tensors[at][1].numel() for at in places]
            found += zip(places, part.kept[kind].split(sizes), strict=True)
        return found


@dataclass(frozen=True, slots=True)
class HostPart:
    """A copy of the host's part of the state of one step."""

    division: TensorSplit
    text: str
    kept: dict[torch.dtype, torch.Tensor]


class AsyncCopy:
    """A copy that runs while the host continues. It ends when the device reaches the last of `copy.marks`."""

    def __init__(
        self, device: Device, division: TensorSplit, part: HostPart | None, targets: Sequence[torch.Tensor]
    ) -> None:
        """Start copying into `targets`: contiguous tensors on the host, one for each tensor of `division`."""
        import torch

        self._division = division  # keeps the tensors' memory alive until the copy has ended
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        pairs: list[Pair] = []
        with torch.no_grad():
            for at, tensor in division.host(part):
                targets[at].copy_(tensor.view(targets[at].shape))
            for at in division.on_device:
                self._add(targets[at], division.tensors[at][1], pairs)
        self.copy: DeviceCopy = device.copy(pairs)

    def finish(self) -> float:
        """Reorder the tensors that were not contiguous. Return how many seconds the device took."""
        import torch

        with torch.no_grad():
            for target, staged in self._staged:
                target.copy_(staged)
        self._staged.clear()
        return self.copy.seconds()

    def _add(self, target: torch.Tensor, source: torch.Tensor, pairs: list[Pair]) -> None:
        """Add a tensor to the copy. If it is not contiguous, `finish` reorders its elements on the host.

        Reordering on the device would mean allocating memory there, which might wait for the whole queue.
        """
        import torch

        if source.numel() == 0:
            return
        if source.is_contiguous():
            pairs.append((target.view(-1), source.view(-1)))
            return
        span = 1 + sum((n - 1) * step for n, step in zip(source.shape, source.stride(), strict=True))
        room = torch.empty(span, dtype=source.dtype)
        pairs.append((room, source.as_strided((span,), (1,))))
        self._staged.append((target, room.as_strided(source.shape, source.stride())))
