"""A rank's device: which of the work that the host has queued is done, and copies to the host.

A CPU has done what it was asked when the call returns. A GPU has queues: the host launches a step in
milliseconds and is far ahead of the kernels. So everything that depends on order uses a mark: the host
puts it into the device's queue, and checks later whether the device has reached it.

Copies to the host have a queue of their own. Nothing is ever put into it that waits for the training's queue:
that one may be blocked without end, in a collective with a dead peer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

from holdfast.errors import BadInput

Pair = tuple["torch.Tensor", "torch.Tensor"]  # target on the host, source on the device
POLL_S = 0.0005  # between two checks of a mark that is waited for with a limit
PIECE_BYTES = 256 << 20  # of a copy, after which its progress can be seen
NUMBERS = 4  # brought to the host at once, at most
BATCHES = 4  # of them on their way, at most: the host is never that far ahead


class Broken(RuntimeError):
    """Every call to the device fails (an illegal access, an uncorrectable memory error)."""


class QueueMark(Protocol):
    """A place in a device's queue."""


class DeviceCopy(Protocol):
    """A copy to the host that has been begun."""

    @property
    def marks(self) -> Sequence[QueueMark]:
        """The ends of its pieces, in the copies' queue; the last one is its own."""

    def seconds(self) -> float:
        """Return what it took the device, once its last mark is reached."""


class PinnedMemory(Protocol):
    """Page-locked host memory, which the device's copy engine reads and writes directly."""

    def release(self) -> None: ...


class Device(Protocol):
    """All calls but `wait` return at once, and raise `Broken` if the device is."""

    queues: bool  # False: what it is asked is done when the call returns, and there is nothing to ask

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say whether the tensor's content is what this device's queue makes of it."""

    def mark(self) -> QueueMark:
        """Put a mark behind everything that the calling thread has queued."""

    def reached(self, mark: QueueMark) -> bool:
        """Say whether all that was queued before the mark is done."""

    def wait(self, mark: QueueMark, limit_s: float | None = None) -> bool:
        """Wait until it is, or until the limit is over; say whether it is."""

    def copy(self, pairs: Sequence[Pair]) -> DeviceCopy:
        """Begin to copy flat, contiguous tensors to the host, after nothing but earlier copies.

        The caller has seen to it that the sources hold what they should, and keeps them and the targets
        until the copy has ended.
        """

    def hold_back(self, copy: DeviceCopy) -> None:
        """Let what the calling thread queues from now on begin only when `copy` has ended."""

    def bring(self, numbers: Sequence[torch.Tensor]) -> PendingNumbers:
        """Begin to bring up to `NUMBERS` tensors of one element each to the host."""

    def pin(self, memory: memoryview) -> PinnedMemory | None:
        """Page-lock memory for copies, until it is released; None where that cannot be.

        May wait for everything that is queued: not for a rank whose peers have failed.
        """


class PendingNumbers(Protocol):
    """Numbers on their way to the host."""

    @property
    def mark(self) -> QueueMark:
        """When they are there."""

    def values(self) -> list[float]:
        """Return them, once the mark is reached."""


class HostDevice:
    """The CPU as a device: every call has done its work when it returns."""

    queues = False

    def holds(self, tensor: torch.Tensor) -> bool:
        return False

    def mark(self) -> QueueMark:
        return self

    def reached(self, mark: QueueMark) -> bool:
        return True

    def wait(self, mark: QueueMark, limit_s: float | None = None) -> bool:
        return True

    def copy(self, pairs: Sequence[Pair]) -> DeviceCopy:
        raise NotImplementedError("tensors on the host are copied by holdfast.snapshot.tensor_copy")

    def hold_back(self, copy: DeviceCopy) -> None: ...

    def bring(self, numbers: Sequence[torch.Tensor]) -> PendingNumbers:
        raise NotImplementedError("numbers on the host are there")

    def pin(self, memory: memoryview) -> PinnedMemory | None:
        return None


class CudaDevice:
    """An NVIDIA GPU. Threads may call together; each of them means its own current stream."""

    queues = True

    def __init__(self, device: torch.device) -> None:
        """Make all that takes memory or streams: later that might wait for a dead peer. Raises `Broken`."""
        import torch

        self._device = device
        with self._asked():
            # Of another priority, so that it shares no hardware queue with a collective that stands still.
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._room = torch.zeros((BATCHES, NUMBERS, 8), dtype=torch.uint8, pin_memory=True)
        self._next = 0

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def mark(self) -> QueueMark:
        import torch

        with self._asked():
            # A thread that waits for it sleeps: one that spins would look like one that works.
            event = torch.cuda.Event(blocking=True)
            event.record(torch.cuda.current_stream(self._device))
        return event

    def reached(self, mark: QueueMark) -> bool:
        with self._asked():
            return bool(_event(mark).query())

    def wait(self, mark: QueueMark, limit_s: float | None = None) -> bool:
        if limit_s is None:
            with self._asked():
                _event(mark).synchronize()
            return True
        give_up_at = time.monotonic() + limit_s
        while not self.reached(mark):
            if time.monotonic() > give_up_at:
                return False
            time.sleep(POLL_S)
        return True

    def copy(self, pairs: Sequence[Pair]) -> DeviceCopy:
        import torch

        with self._asked():
            marks = [self._recorded(self._stream)]
            with torch.cuda.stream(self._stream), torch.no_grad():
                room = PIECE_BYTES
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
                    room -= source.nbytes
                    if room <= 0:
                        marks.append(self._recorded(self._stream))
                        room = PIECE_BYTES
            marks.append(self._recorded(self._stream))
        return _CudaCopy(marks[0], marks[1:])

    def hold_back(self, copy: DeviceCopy) -> None:
        import torch

        with self._asked():
            torch.cuda.current_stream(self._device).wait_event(_event(copy.marks[-1]))

    def bring(self, numbers: Sequence[torch.Tensor]) -> PendingNumbers:
        import torch

        with self._asked():
            row, self._next = self._room[self._next], (self._next + 1) % BATCHES
            targets = []
            with torch.no_grad():
                for at, number in enumerate(numbers):
                    target = row[at, : number.element_size()].view(number.dtype)
                    target.copy_(number.detach().reshape(-1), non_blocking=True)
                    targets.append(target)
            return _Numbers(self.mark(), targets)

    def pin(self, memory: memoryview) -> PinnedMemory | None:
        import torch

        view = torch.frombuffer(memory, dtype=torch.uint8)
        with self._asked():
            runtime = torch.cuda.cudart()
            if int(runtime.cudaHostRegister(view.data_ptr(), view.nbytes, 0)) == 0:
                return _Registered(view)
            self._forget_error()
        return None

    def _forget_error(self) -> None:
        """Take a refused call's error off the runtime: the script's next kernel would be blamed for it."""
        import torch

        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device).add_(1)

    def _recorded(self, stream: torch.cuda.Stream) -> QueueMark:
        import torch

        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(stream)
        return event

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch's type for every error of CUDA
            raise Broken(str(error).strip().partition("\n")[0]) from error


class _CudaCopy:
    def __init__(self, begun: QueueMark, marks: list[QueueMark]) -> None:
        self.marks = marks
        self._begun = begun

    def seconds(self) -> float:
        return float(_event(self._begun).elapsed_time(_event(self.marks[-1]))) / 1e3


class _Numbers:
    def __init__(self, mark: QueueMark, targets: list[torch.Tensor]) -> None:
        self.mark = mark
        self._targets = targets

    def values(self) -> list[float]:
        return [float(target) for target in self._targets]


class _Registered:
    """Keeps the mapping: memory that is unmapped while it is registered stays locked for ever."""

    def __init__(self, view: torch.Tensor) -> None:
        self._view: torch.Tensor | None = view

    def release(self) -> None:
        import torch

        view, self._view = self._view, None
        if view is not None:
            torch.cuda.cudart().cudaHostUnregister(view.data_ptr())


def _event(mark: QueueMark) -> Any:
    return mark


def device_of(modules: Iterable[torch.nn.Module]) -> Device:
    """Return what the device that the modules' parameters are on is asked through."""
    found = {parameter.device for module in modules for parameter in module.parameters()}
    on_gpu = sorted((each for each in found if each.type == "cuda"), key=str)
    if len(on_gpu) > 1:
        names = ", ".join(map(str, on_gpu))
        raise BadInput(f"the model's parameters are on {names}: a rank's state can be kept on one GPU only")
    return CudaDevice(on_gpu[0]) if on_gpu else HostDevice()
