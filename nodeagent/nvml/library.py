"""Loads and unloads the NVML library, and classifies its errors.

No other module uses NVML's types. `pynvml` loads `libnvidia-ml.so.1` once and keeps it. If the driver is
replaced while the agent runs, there is a new library, so the agent unloads a library that it could not
initialise: see `unload`.
"""

from __future__ import annotations

import _ctypes
from typing import Any

import pynvml  # type: ignore[import-untyped]

nvml: Any = pynvml
Error: Any = pynvml.NVMLError  # its `value` is one of the codes below

# Error codes from nvml.h.
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
CORRUPTED_INFOROM = 14
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
ARGUMENT_VERSION_MISMATCH = 25
GPU_NOT_FOUND = 28

# A call that returns one of these codes keeps returning it until the driver is replaced. An older driver
# returns INVALID_ARGUMENT for a field that it does not know, and ARGUMENT_VERSION_MISMATCH for a newer
# struct.
NEVER = frozenset(
    {NOT_SUPPORTED, FUNCTION_NOT_FOUND, INVALID_ARGUMENT, ARGUMENT_VERSION_MISMATCH},
)
GONE = frozenset({GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND})  # the GPU
DRIVER_GONE = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, LIB_RM_VERSION_MISMATCH})

# The states of the check `nvml`.
OK, LIBRARY_MISSING, NOT_LOADED, VERSION_MISMATCH, FAILED = range(5)
_STATES = {
    LIBRARY_NOT_FOUND: LIBRARY_MISSING,
    DRIVER_NOT_LOADED: NOT_LOADED,
    UNINITIALIZED: NOT_LOADED,
    LIB_RM_VERSION_MISMATCH: VERSION_MISMATCH,
}
_NAMES: dict[int, str] = {
    value: name.removeprefix("NVML_ERROR_")
    for name, value in vars(pynvml).items()
    if name.startswith("NVML_ERROR_")
}


class DriverGone(Exception):
    """NVML is unusable: `state` is a value of the check `nvml`, and the message gives the reason."""

    def __init__(self, state: int, why: str) -> None:
        super().__init__(why)
        self.state = state


def name(code: int) -> str:
    """Return NVML's name for a code, without calling NVML: `GPU_IS_LOST`."""
    return _NAMES.get(code, f"error {code}")


def driver_gone(code: int, during: str) -> DriverGone:
    """Return the exception for an error code that affects every user of NVML."""
    return DriverGone(_STATES.get(code, FAILED), f"{during}: {name(code)}")


def unload() -> None:
    """Unload the library, so that the next init loads the installed version.

    Without this, a driver upgrade would cause a version mismatch until the agent is restarted. Call this only
    while no NVML call is in progress, and after as many shutdowns as inits.
    """
    held = pynvml.nvmlLib
    with pynvml.libLoadLock:
        pynvml.nvmlLib = None
        pynvml._nvmlGetFunctionPointer_cache.clear()
    if held is not None:
        _ctypes.dlclose(held._handle)
