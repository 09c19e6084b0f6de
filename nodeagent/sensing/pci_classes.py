"""The PCI classes of GPUs, from pci_ids.h, for the sensors that read them from sysfs."""

from __future__ import annotations

# The base classes: display controllers (VGA 0x0300, 3D 0x0302), and processing accelerators (0x1200), which
# some data-centre GPUs are.
GPU_BASE_CLASSES = frozenset({0x03, 0x12})
HIGHEST = 0xFFFFFF  # a class has three bytes: base class, subclass, programming interface


def is_gpu(code: int | None) -> bool:
    """Return True if a device of this class, such as 0x030200, is a GPU."""
    return code is not None and 0 <= code <= HIGHEST and code >> 16 in GPU_BASE_CLASSES
