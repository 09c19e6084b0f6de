"""Queries one GPU repeatedly: skips unsupported calls, and continues if a call fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from nodeagent.nvml import library
from nodeagent.nvml.inventory import Gpu
from nodeagent.nvml.library import nvml
from nodeagent.sensing.progress import CallProgress

FieldKey = tuple[int, int]  # field id and scope: the link, or 0

_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t


class GpuGone(Exception):
    """The GPU no longer responds: `code` is one of `library.GONE`."""

    def __init__(self, code: int, during: str) -> None:
        super().__init__(f"{during}: {library.name(code)}")
        self.code = code


@dataclass(frozen=True, slots=True)
class GpuReading:
    """The current value of one check of one GPU."""

    check: str
    value: float
    text: str = ""
    facts: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class GpuQuery:
    """Queries one GPU for the duration of a session."""

    gpu: Gpu
    progress: CallProgress = field(default_factory=CallProgress)
    never: set[object] = field(default_factory=set)  # calls and fields that the GPU does not support
    answered: int = 0  # since `begin`
    failed: str = ""  # since `begin`: the first unexplained error
    nvlinks: tuple[int, ...] | None = None  # the links that the GPU has; None: not known yet
    link_states: dict[int, bool] = field(default_factory=dict)  # the last answer of each NVLink
    _pci: str = field(init=False, default="")
    _constants: dict[object, Any] = field(default_factory=dict)
    _of_sweep: dict[object, Any] = field(default_factory=dict)
    _supported: set[object] = field(default_factory=set)  # calls and fields that have returned a value

    def __post_init__(self) -> None:
        self._pci = self.gpu.pci

    def begin(self) -> None:
        """Reset `answered` and `failed`, and drop the results that `once` has kept."""
        self.answered = 0
        self.failed = ""
        self._of_sweep.clear()

    def constant(self, function: Callable[..., Any]) -> Any:
        """Return a result that does not change within a session. NVML is called until it returns one.

        Raises:
            GpuGone, DriverGone.
        """
        return self._kept(self._constants, function)

    def once(self, function: Callable[..., Any]) -> Any:
        """Return the result of a call that several checks of one sweep need. Raises as `constant` does."""
        return self._kept(self._of_sweep, function)

    def _kept(self, kept: dict[object, Any], function: Callable[..., Any]) -> Any:
        found = kept.get(function)
        if found is None:
            found = self.ask(function)
            if found is not None:
                kept[function] = found
        return found

    def ask(
        self, function: Callable[..., Any], *args: object, answers: Mapping[int, Any] | None = None
    ) -> Any:
        """Call NVML and return its result; None if there is none.

        Args:
            function: Called with the GPU's handle, then `args`.
            answers: Error codes that are returned as results.

        Raises:
            GpuGone, DriverGone.
        """
        key = (function, args) if args else function
        if key in self.never:
            return None
        self.progress.marked = (function, self._pci, monotonic())
        try:
            found = function(self.gpu.handle, *args)
        except library.Error as error:
            if answers and error.value in answers:
                self.answered += 1
                return answers[error.value]
            self._refused(error.value, key, function.__name__)
            return None
        self.answered += 1
        self._supported.add(key)
        return found

    def fields(self, *keys: FieldKey) -> tuple[float | None, ...]:
        """Return the values of fields, in order; None for each field that the GPU does not have.

        Raises:
            GpuGone, DriverGone.
        """
        asked = [key for key in keys if key not in self.never]
        if not asked:
            return (None,) * len(keys)
        found: dict[FieldKey, float] = {}
        self.progress.mark("nvmlDeviceGetFieldValues", self.gpu.pci)
        try:
            values = nvml.nvmlDeviceGetFieldValues(self.gpu.handle, asked)
        except library.Error as error:
            for key in asked:
                self._refused(error.value, key, "nvmlDeviceGetFieldValues")
            return (None,) * len(keys)
        for key, value in zip(asked, values, strict=True):
            if value.nvmlReturn:
                self._refused(value.nvmlReturn, key, f"field {key[0]}")
            elif value.valueType < len(_MEMBERS):
                found[key] = float(getattr(value.value, _MEMBERS[value.valueType]))
                self.answered += 1
                self._supported.add(key)
        return tuple(found.get(key) for key in keys)

    def _refused(self, code: int, key: object, during: str) -> None:
        if code in library.DRIVER_GONE:
            raise library.driver_gone(code, during)
        if code in library.GONE:
            raise GpuGone(code, during)
        # If the handle is the only argument, or if the other arguments were valid before, INVALID_ARGUMENT
        # means that the handle is invalid, which may be temporary.
        of_handle = not isinstance(key, tuple) or key in self._supported
        if code in library.NEVER and not (code == library.INVALID_ARGUMENT and of_handle):
            self.never.add(key)
        elif not self.failed:
            self.failed = f"{during}: {library.name(code)}"
