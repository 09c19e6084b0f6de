/* The state of a fake GPU driver: one struct in a mapped file, mirrored by state.py. */
#ifndef FAKENVML_H
#define FAKENVML_H

#include <stdint.h>

#define FAKE_MAX_GPUS 16
#define FAKE_MAX_LINKS 18
#define FAKE_MAX_FIELDS 32 /* values that tests set, per GPU */
#define FAKE_MAX_FAULTS 32
#define FAKE_RING 256 /* an event set that falls further behind loses events */

enum { FAKE_LOADED, FAKE_MISSING, FAKE_MISMATCH, FAKE_RELOADING };

struct fake_field {
    uint32_t id, scope;
    int32_t code; /* what NVML returns for only this value */
    uint32_t set;
    uint64_t value;
};

struct fake_gpu {
    uint32_t present; /* whether NVML lists the GPU */
    int32_t code;     /* what every call for this GPU returns: 15 is lost, 16 reset required */
    char pci[32], uuid[96], name[96], serial[32];
    uint64_t supported_events;
    uint64_t clocks_event_reasons;
    uint64_t ecc_corrected, ecc_uncorrected; /* volatile */
    uint64_t nvlink_flit, nvlink_crc, nvlink_replay, nvlink_recovery;
    uint32_t temperature, slowdown_temperature;
    int32_t margin;
    uint32_t utilization;
    uint32_t pcie_width, pcie_max_width, pcie_replays;
    uint32_t pcie_generation, pcie_max_generation;
    uint32_t persistence;
    int32_t mig, mig_pending; /* -1: the GPU has no MIG mode */
    uint32_t sram_exceeded;
    uint32_t remapped_correctable, remapped_uncorrectable, remap_pending, remap_failure;
    int32_t inforom; /* what nvmlDeviceValidateInforom returns */
    uint32_t fabric_state, fabric_status, fabric_mask, fabric_summary;
    uint32_t recovery_action;
    uint32_t links;
    uint32_t link_up[FAKE_MAX_LINKS];
    struct fake_field fields[FAKE_MAX_FIELDS];
};

struct fake_event {
    uint64_t type, data;
    uint32_t gpu, gpu_instance, compute_instance, reserved;
};

struct fake_fault {
    char function[64];
    uint32_t active;
    int32_t gpu;    /* -1: any */
    int32_t code;   /* 0: the call succeeds after it has blocked */
    uint32_t serial;
    double block_s; /* negative: until the fault is removed */
};

struct fake_state {
    uint64_t size; /* size of this struct in the process that writes it */
    uint32_t driver;
    uint32_t generation; /* of the driver; handles of other generations are invalid */
    uint32_t gpus;
    uint32_t old_driver; /* newer functions return FUNCTION_NOT_FOUND */
    char driver_version[80], nvml_version[80];
    /* Written by the library, with atomic operations, for tests to read. */
    uint32_t attached;   /* processes that have the current driver open */
    uint32_t blocked;    /* calls that are blocked now */
    uint32_t waiting;    /* calls of nvmlEventSetWait that are waiting now */
    uint32_t event_sets; /* existing event sets */
    uint64_t calls;
    /* A futex, changed and woken with every change that a wait for events may have to notice. */
    uint32_t wake;
    uint32_t fault_count; /* only slots below this number can be active */
    struct fake_fault faults[FAKE_MAX_FAULTS];
    uint64_t next_event; /* number of the next event; its slot is this number modulo FAKE_RING */
    struct fake_event ring[FAKE_RING];
    struct fake_gpu gpu[FAKE_MAX_GPUS];
};

#endif
