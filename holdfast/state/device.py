"""Track the work that the host has queued on a rank's device, and copy tensors to the host.

On a CPU, the work is complete when a call returns. A GPU executes work from queues: the host queues a step
within milliseconds, and then runs far ahead of the kernels. So code that depends on the order of work puts a
mark into the device's queue, and later checks whether the device has reached it.

Copies to the host use a separate queue. It never waits for the training's queue, which may be blocked forever
in a collective with a dead peer.
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
POLL_S = 0.0005  # how often a wait with a limit checks its mark
PIECE_BYTES = 256 << 20  # a copy puts a mark after each piece of this size, to show its progress
NUMBERS = 4  # one call of `bring` copies at most this many numbers to the host
BATCHES = 4  # at most this many `bring` calls are in progress, so the host never runs further ahead


class Broken(RuntimeError):
    """The device has failed, for example after an illegal access, so all later calls fail too."""


class QueueMark(Protocol):
    """A position in a device's queue."""


class DeviceCopy(Protocol):
    """A copy to the host, in progress or completed."""

    @property
    def marks(self) -> Sequence[QueueMark]:
        """The marks after each piece, in the queue of copies. At the last mark, the copy is complete."""

    def seconds(self) -> float:
        """Return how many seconds the copy took. Call this after the device has reached the last mark."""


class PinnedMemory(Protocol):
    """Page-locked host memory. The device's copy engine can read and write it directly."""

    def release(self) -> None: ...


class Device(Protocol):
    """A rank's device.

    Only `wait` and `pin` may block. All methods raise `Broken` if the device has failed.
    """

    queues: bool  # if False, all work is complete when a call returns, so neither marks nor copies are needed

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is on this device. If so, its content depends on the queue."""

    def mark(self) -> QueueMark:
        """Put a mark after all work that the calling thread has queued so far, and return the mark."""

    def reached(self, mark: QueueMark) -> bool:
        """Return whether the device has completed all work before the mark."""

    def wait(self, mark: QueueMark, limit_s: float | None = None) -> bool:
        """Wait until the device reaches the mark, for at most `limit_s`. Return whether it was reached."""

    def copy(self, pairs: Sequence[Pair]) -> DeviceCopy:
        """Start copying flat, contiguous tensors to the host. The copy waits only for earlier copies.

        The device must already have computed the sources. The caller must keep sources and targets alive
        until the copy has ended.
        """

    def hold_back(self, copy: DeviceCopy) -> None:
        """Delay all work that the calling thread queues from now on until `copy` has ended."""

    def bring(self, numbers: Sequence[torch.Tensor]) -> PendingNumbers:
        """Start copying up to `NUMBERS` one-element tensors to the host."""

    def pin(self, memory: memoryview) -> PinnedMemory | None:
        """Page-lock host memory until `release` is called; return None if that is not possible.

        This may wait for all queued work, so do not call it on a rank whose peers have failed.
        """


class PendingNumbers(Protocol):
    """Numbers that the device is copying to the host."""

    @property
    def mark(self) -> QueueMark:
        """The mark that the device reaches when the numbers are on the host."""

    def values(self) -> list[float]:
        """Return the numbers. Call this after the device has reached the mark."""


class HostDevice:
    """The CPU, where all work is complete when a call returns."""

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
        raise NotImplementedError("the numbers are already on the host")

    def pin(self, memory: memoryview) -> PinnedMemory | None:
        return None


class CudaDevice:
    """An NVIDIA GPU.

    Several threads may call it at the same time; each call uses the calling thread's current stream.
    """

    queues = True

    def __init__(self, device: torch.device) -> None:
        """Allocate all memory and streams now, because a later allocation might wait for a dead peer.

        Raises `Broken`.
        """
        import torch

        self._device = device
        with self._asked():
            # The separate priority prevents this stream from sharing a hardware queue with a blocked
            # collective.
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._room = torch.zeros((BATCHES, NUMBERS, 8), dtype=torch.uint8, pin_memory=True)
        self._next = 0

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def mark(self) -> QueueMark:
        import torch

        with self._asked():
            # With `blocking`, a waiting thread sleeps. A spinning thread would appear to make progress.
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
        """Clear the error of a failed call, because the script's next kernel would otherwise report it."""
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
        except RuntimeError as error:  # torch raises this type for every CUDA error
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
    """Page-locked memory. Keeps its mapping alive, because memory unmapped before `release` stays locked."""

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
    """Return the device of the modules' parameters. Raises BadInput if they are on several GPUs."""
    found = {parameter.device for module in modules for parameter in module.parameters()}
    on_gpu = sorted((each for each in found if each.type == "cuda"), key=str)
    if len(on_gpu) > 1:
        names = ", ".join(map(str, on_gpu))
        raise BadInput(f"the model's parameters are on {names}: the state of a rank must be on one GPU")
    return CudaDevice(on_gpu[0]) if on_gpu else HostDevice()
