"""The structs of fakenvml.h, for ctypes."""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_double, c_int32, c_uint32, c_uint64
from typing import Any, ClassVar

MAX_GPUS = 16
MAX_LINKS = 18
MAX_FIELDS = 32
MAX_FAULTS = 32
RING = 256


class Field(ctypes.Structure):
    id: int
    scope: int
    code: int
    set: int
    value: int

    _fields_: ClassVar = [
        ("id", c_uint32),
        ("scope", c_uint32),
        ("code", c_int32),
        ("set", c_uint32),
        ("value", c_uint64),
    ]


class Gpu(ctypes.Structure):
    """The state that one GPU reports. Every field may be set at any time: `gpu.temperature = 80`."""

    present: int
    code: int
    pci: bytes
    uuid: bytes
    name: bytes
    serial: bytes
    supported_events: int
    clocks_event_reasons: int
    ecc_corrected: int
    ecc_uncorrected: int
    nvlink_flit: int
    nvlink_crc: int
    nvlink_replay: int
    nvlink_recovery: int
    temperature: int
    slowdown_temperature: int
    margin: int
    utilization: int
    pcie_width: int
    pcie_max_width: int
    pcie_replays: int
    pcie_generation: int
    pcie_max_generation: int
    persistence: int
    mig: int
    mig_pending: int
    sram_exceeded: int
    remapped_correctable: int
    remapped_uncorrectable: int
    remap_pending: int
    remap_failure: int
    inforom: int
    fabric_state: int
    fabric_status: int
    fabric_mask: int
    fabric_summary: int
    recovery_action: int
    links: int
    link_up: Any  # an array of MAX_LINKS
    fields: Any  # an array of Field

    _fields_: ClassVar = [
        ("present", c_uint32),
        ("code", c_int32),
        ("pci", c_char * 32),
        ("uuid", c_char * 96),
        ("name", c_char * 96),
        ("serial", c_char * 32),
        ("supported_events", c_uint64),
        ("clocks_event_reasons", c_uint64),
        ("ecc_corrected", c_uint64),
        ("ecc_uncorrected", c_uint64),
        ("nvlink_flit", c_uint64),
        ("nvlink_crc", c_uint64),
        ("nvlink_replay", c_uint64),
        ("nvlink_recovery", c_uint64),
        ("temperature", c_uint32),
        ("slowdown_temperature", c_uint32),
        ("margin", c_int32),
        ("utilization", c_uint32),
        ("pcie_width", c_uint32),
        ("pcie_max_width", c_uint32),
        ("pcie_replays", c_uint32),
        ("pcie_generation", c_uint32),
        ("pcie_max_generation", c_uint32),
        ("persistence", c_uint32),
        ("mig", c_int32),
        ("mig_pending", c_int32),
        ("sram_exceeded", c_uint32),
        ("remapped_correctable", c_uint32),
        ("remapped_uncorrectable", c_uint32),
        ("remap_pending", c_uint32),
        ("remap_failure", c_uint32),
        ("inforom", c_int32),
        ("fabric_state", c_uint32),
        ("fabric_status", c_uint32),
        ("fabric_mask", c_uint32),
        ("fabric_summary", c_uint32),
        ("recovery_action", c_uint32),
        ("links", c_uint32),
        ("link_up", c_uint32 * MAX_LINKS),
        ("fields", Field * MAX_FIELDS),
    ]


class Event(ctypes.Structure):
    _fields_: ClassVar = [
        ("type", c_uint64),
        ("data", c_uint64),
        ("gpu", c_uint32),
        ("gpu_instance", c_uint32),
        ("compute_instance", c_uint32),
        ("reserved", c_uint32),
    ]


class Fault(ctypes.Structure):
    function: bytes
    active: int
    gpu: int
    code: int
    serial: int
    block_s: float

    _fields_: ClassVar = [
        ("function", c_char * 64),
        ("active", c_uint32),
        ("gpu", c_int32),
        ("code", c_int32),
        ("serial", c_uint32),
        ("block_s", c_double),
    ]


class State(ctypes.Structure):
    size: int
    driver: int
    generation: int
    gpus: int
    old_driver: int
    driver_version: bytes
    nvml_version: bytes
    attached: int
    blocked: int
    waiting: int
    event_sets: int
    calls: int
    wake: int
    fault_count: int
    faults: Any  # an array of Fault
    next_event: int
    ring: Any  # an array of Event
    gpu: Any  # an array of Gpu

    _fields_: ClassVar = [
        ("size", c_uint64),
        ("driver", c_uint32),
        ("generation", c_uint32),
        ("gpus", c_uint32),
        ("old_driver", c_uint32),
        ("driver_version", c_char * 80),
        ("nvml_version", c_char * 80),
        ("attached", c_uint32),
        ("blocked", c_uint32),
        ("waiting", c_uint32),
        ("event_sets", c_uint32),
        ("calls", c_uint64),
        ("wake", c_uint32),
        ("fault_count", c_uint32),
        ("faults", Fault * MAX_FAULTS),
        ("next_event", c_uint64),
        ("ring", Event * RING),
        ("gpu", Gpu * MAX_GPUS),
    ]
