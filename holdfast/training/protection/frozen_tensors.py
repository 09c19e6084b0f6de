"""Determine which tensors a slot already contains, to copy frozen parameters only once.

A frozen parameter is a module's parameter that requires no gradient and belongs to no optimizer. If this
process wrote the slot's last snapshot, the parameter is written into the slot again only if its version
counter, its address or a sample of its bytes has changed.

If a script writes a few rows of a parameter through `.data`, for example in a memory bank or a codebook, none
of these three reveals the write. So the kernel reports which pages were written since just before the copy
into the slot (see `holdfast.snapshot.written_pages`), and these pages are compared with the slot. If the
kernel cannot report this, every skipped tensor is compared as a whole. Differences are written to the slot.
After the first difference, tensors are no longer skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.snapshot import tensor_copy, written_pages
from holdfast.state import capture

if TYPE_CHECKING:
    import torch

    from holdfast.snapshot.commit_records import CommitRecord
    from holdfast.training.protection.device_copy import Tensors

MIN_TENSOR_BYTES = 64 << 10  # copying a smaller tensor takes no longer than checking it
SAMPLED_BYTES = 32  # about this many bytes of each tensor are sampled

_Fingerprint = tuple[int, int, tuple[int, ...]]  # version, address, sampled bytes


@dataclass(frozen=True, slots=True)
class _SlotContent:
    """The content of a slot that this process has written or restored from."""

    record: CommitRecord
    header: bytes
    fingerprints: dict[str, _Fingerprint]
    # The watch that was active when the slot was filled; None if the pages were not watched.
    watch: written_pages.WrittenPages | None


@dataclass(frozen=True, slots=True)
class SkippedTensors:
    """The tensors that need not be copied, and the stretches of them that must be compared with the slot."""

    places: frozenset[int] = frozenset()  # indices in the list of tensors
    compared: tuple[tuple[int, int, int], ...] = ()  # for each stretch: tensor index, first byte, end byte

    @property
    def bytes(self) -> int:
        """The number of bytes that must be compared."""
        return sum(to - at for _, at, to in self.compared)


@dataclass(slots=True)
class FrozenTensors:
    """Tracks the frozen tensors of `objects`, and which of them each slot contains."""

    objects: Mapping[str, Any]
    share: float = 1.0  # the share of the state's bytes that the next copies will write without comparing
    coming: float = 1.0  # the share of the state's bytes that copies will read once all slots are filled
    _slots: dict[int, _SlotContent] = field(default_factory=dict)
    _known: dict[str, _Fingerprint] = field(default_factory=dict)  # the result of the last `_compare` call
    _of: Tensors | None = None
    _candidates: list[int] = field(default_factory=list)  # indices in `_of`
    _distrusted: bool = False
    _watch: written_pages.WrittenPages | None = None
    _asked: bool = False  # whether this class has already tried to watch the pages of `_of`

    def take_left_out(self, tensors: Tensors, before: CommitRecord | None, header: bytes) -> SkippedTensors:
        """Return which of `tensors` a slot should already contain. Call this before copying any of them.

        `before` is the slot's previous snapshot, or None. `header` is the header of the new snapshot's file.
        """
        held = None if before is None else self._slots.pop(before.slot, None)
        fingerprints = self._compare(tensors)
        written = self._written(tensors)
        if held is None or held.record != before or held.header != header or self._distrusted:
            return SkippedTensors()
        same = {
            name for name, fingerprint in fingerprints.items() if held.fingerprints.get(name) == fingerprint
        }
        places = [n for n in self._candidates if tensors[n][0] in same]
        if held.watch is None or held.watch is not self._watch:
            return SkippedTensors(frozenset(places), tuple((n, 0, tensors[n][1].nbytes) for n in places))
        return SkippedTensors(frozenset(places), tuple((n, *each) for n in places for each in written[n]))

    def distrust(self) -> None:
        """Skip no tensors from now on, because a skipped tensor differed from the slot."""
        self._distrusted, self.share, self.coming = True, 1.0, 1.0
        self._slots.clear()
        self._replace_watch(None)

    def wrote(self, tensors: Tensors, record: CommitRecord, header: bytes) -> None:
        """Record that a snapshot of `tensors` was committed. They have not changed since `take_left_out`."""
        self._hold(tensors, record, header, self._watch)

    def restored(self, tensors: Tensors, record: CommitRecord, header: bytes) -> None:
        """Record that the objects have just been restored from this snapshot, so it has the same tensors."""
        self._compare(tensors)
        self._hold(tensors, record, header, None)  # the pages were not watched when the slot was filled

    def _hold(
        self, tensors: Tensors, record: CommitRecord, header: bytes, watch: written_pages.WrittenPages | None
    ) -> None:
        if not self._distrusted and self._candidates and self._of is tensors:
            self._slots[record.slot] = _SlotContent(record, header, self._known, watch)

    def _compare(self, tensors: Tensors) -> dict[str, _Fingerprint]:
        """Return the candidates' fingerprints.

        The first time that candidates are unchanged since the previous call, start watching their pages.
        """
        if self._of is not tensors:
            self._of, self._candidates, self._asked = tensors, _candidates(self.objects, tensors), False
            self._replace_watch(None)
        if not self._candidates:  # nearly always, so the sizes are not added up
            self.share, self._known = 1.0, {}
            return self._known
        fingerprints = {tensors[n][0]: _fingerprint(tensors[n][1]) for n in self._candidates}
        same = [tensors[n][1] for n in self._candidates if self._same(tensors[n][0], fingerprints)]
        still = sum(each.nbytes for each in same)
        if still and not self._asked and not self._distrusted and _writes_are_tracked():
            self._asked = True
            self._replace_watch(written_pages.watch([(each.data_ptr(), each.nbytes) for each in same]))
        total = sum(tensor.nbytes for _, tensor in tensors)
        self.share = 1.0 if self._distrusted or not total else 1.0 - still / total
        self._known = fingerprints
        return fingerprints

    def _written(self, tensors: Tensors) -> dict[int, tuple[written_pages.Stretch, ...]]:
        """Return the written stretches of each candidate by the candidate's index, and update `coming`."""
        if (watch := self._watch) is None:
            self.coming = 1.0
            return {}
        pairs = ((n, tensors[n][1]) for n in self._candidates)
        found = {n: watch.written((each.data_ptr(), each.nbytes)) for n, each in pairs}
        total = sum(tensor.nbytes for _, tensor in tensors)
        frozen = sum(tensors[n][1].nbytes for n in self._candidates)
        compared = sum(to - at for stretches in found.values() for at, to in stretches)
        self.coming = 1.0 - (frozen - compared) / total
        return found

    def _replace_watch(self, watch: written_pages.WrittenPages | None) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = watch

    def _same(self, name: str, fingerprints: Mapping[str, _Fingerprint]) -> bool:
        return self._known.get(name) == fingerprints[name]


def _writes_are_tracked() -> bool:
    """Return True if no GPU is in use. The kernel cannot track what a GPU writes to host memory."""
    import torch

    return not torch.cuda.is_initialized()


def _candidates(objects: Mapping[str, Any], tensors: Tensors) -> list[int]:
    import torch

    values = [capture.unwrap(value) for value in objects.values()]
    optimizers = [value for value in values if isinstance(value, torch.optim.Optimizer)]
    trained = {
        id(p) for optimizer in optimizers for each in _with_inner(optimizer) for p in capture.parameters(each)
    }
    modules = [value for value in values if isinstance(value, torch.nn.Module)]
    untrained = {id(p) for module in modules for p in module.parameters()} - trained
    return [
        n
        for n, (_, tensor) in enumerate(tensors)
        if id(tensor) in untrained
        and tensor.nbytes >= MIN_TENSOR_BYTES
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.requires_grad
    ]


def _with_inner(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    yield optimizer
    yield from capture.wrapped_optimizers(optimizer).values()


def _fingerprint(tensor: torch.Tensor) -> _Fingerprint:
    """Return the tensor's version, its address, and a sample of its bytes."""
    if tensor.requires_grad:  # the script trains the tensor from now on
        return -1, 0, ()
    address = tensor.data_ptr()
    # For most sizes this step is odd, which spreads the samples over different bytes of the elements.
    step = tensor.nbytes // SAMPLED_BYTES + 1
    return (
        capture.version(tensor) or 0,
        address,
        tuple(tensor_copy.sampled_bytes(address, tensor.nbytes, step)),
    )
