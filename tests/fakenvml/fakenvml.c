/* A libnvidia-ml.so.1 whose GPUs are in the file named by FAKE_NVML_STATE.
 *
 * It replaces the NVIDIA driver for programs that load NVML by its name, so they need no test code.
 * Build: see build.py. With -DFAKE_OLD_DRIVER it lacks the symbols that older drivers lack.
 */
#define _GNU_SOURCE
#include "fakenvml.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, FUNCTION_NOT_FOUND = 13,
    GPU_IS_LOST = 15, RESET_REQUIRED = 16, LIB_RM_VERSION_MISMATCH = 18, INSUFFICIENT_RESOURCES = 23,
    ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999
};

#define BLOCK_POLL_S 0.001 /* how often a blocked call checks whether it may return */
#define FUTEX_S 5.0        /* the longest delay after a missed wake-up; a real driver does not poll */
#define MAX_SETS 64

typedef void *nvmlDevice_t; /* generation * 256 + slot + 1: never dereferenced, void after a reload */

struct event_set {
    uint32_t id; /* 0: free */
    uint32_t generation;
    uint64_t tail;
    uint64_t mask[FAKE_MAX_GPUS];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the variables below; never held while blocking */
static struct fake_state *volatile state;
static char mapped[4096];
static int references;
static uint32_t attached_generation;
static struct event_set sets[MAX_SETS];
static uint32_t next_set = 1;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void pause_s(double seconds) {
    struct timespec t = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    nanosleep(&t, NULL);
}

/* An old mapping is kept, because a blocked call may still read it. */
static int map_state(void) {
    const char *path = getenv("FAKE_NVML_STATE");
    if (!path || strlen(path) >= sizeof mapped) return DRIVER_NOT_LOADED;
    if (state && !strcmp(mapped, path)) return OK;
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return DRIVER_NOT_LOADED;
    struct stat found;
    void *at = MAP_FAILED;
    if (!fstat(file, &found) && (size_t)found.st_size == sizeof(struct fake_state))
        at = mmap(NULL, sizeof(struct fake_state), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED) return UNKNOWN;
    if (((struct fake_state *)at)->size != sizeof(struct fake_state)) return UNKNOWN;
    state = at;
    strcpy(mapped, path);
    return OK;
}

static int driver_code(struct fake_state *s) {
    switch (s->driver) {
    case FAKE_LOADED: return OK;
    case FAKE_MISMATCH: return LIB_RM_VERSION_MISMATCH;
    default: return DRIVER_NOT_LOADED;
    }
}

static void stand(struct fake_state *s, struct fake_fault *fault) {
    uint32_t serial = fault->serial;
    double until = fault->block_s < 0 ? -1 : now_s() + fault->block_s;
    __atomic_add_fetch(&s->blocked, 1, __ATOMIC_SEQ_CST);
    while (fault->active && fault->serial == serial && (until < 0 || now_s() < until)) {
        pause_s(BLOCK_POLL_S);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
    }
    __atomic_sub_fetch(&s->blocked, 1, __ATOMIC_SEQ_CST);
}

/* Apply the fault that the test has set for this call. The call may block and then fail. */
static int faults(struct fake_state *s, const char *function, int gpu) {
    for (uint32_t i = 0; i < s->fault_count && i < FAKE_MAX_FAULTS; i++) {
        struct fake_fault *fault = &s->faults[i];
        if (!fault->active || strcmp(fault->function, function)) continue;
        if (fault->gpu >= 0 && fault->gpu != gpu) continue;
        int code = fault->code;
        if (fault->block_s != 0) stand(s, fault);
        if (code != OK) return code;
    }
    return OK;
}

static int usable(struct fake_state *s) {
    int code = driver_code(s);
    if (code != OK) return code;
    return s->generation == attached_generation ? OK : UNINITIALIZED;
}

/* Every call begins here. gpu is the slot of the GPU, or -1 for none. */
static int enter(const char *function, int gpu) {
    struct fake_state *s = state;
    if (!references || !s) return UNINITIALIZED;
    __atomic_add_fetch(&s->calls, 1, __ATOMIC_RELAXED);
    int code = faults(s, function, gpu);
    return code != OK ? code : usable(s);
}

static int slot_of(nvmlDevice_t device) {
    uintptr_t raw = (uintptr_t)device;
    uint32_t slot = (uint32_t)(raw & 255) - 1;
    if (!state || slot >= FAKE_MAX_GPUS || (raw >> 8) != (state->generation & 0xffffff)) return -1;
    return (int)slot;
}

static nvmlDevice_t handle_of(int slot) {
    return (nvmlDevice_t)(((uintptr_t)(state->generation & 0xffffff) << 8) | (uintptr_t)(slot + 1));
}

/* Like enter, for a call that concerns a GPU. Stores the GPU in *gpu. */
static int about(const char *function, nvmlDevice_t device, struct fake_gpu **gpu) {
    int slot = slot_of(device);
    int code = enter(function, slot);
    if (code != OK) return code;
    if ((slot = slot_of(device)) < 0) return INVALID_ARGUMENT;
    *gpu = &state->gpu[slot];
    return (*gpu)->present ? (*gpu)->code : GPU_IS_LOST;
}

#define ABOUT(device)                          \
    struct fake_gpu *gpu;                      \
    int code = about(__func__, device, &gpu);  \
    if (code != OK) return code

#define NEWER() \
    if (state && state->old_driver) return FUNCTION_NOT_FOUND

static int text(char *to, unsigned size, const char *from) {
    if (strlen(from) >= size) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return OK;
}

/* -- the library */

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    int code = references ? OK : map_state();
    struct fake_state *s = state;
    pthread_mutex_unlock(&lock);
    if (code != OK) return code;
    if ((code = faults(s, "nvmlInitWithFlags", -1)) != OK) return code;
    pthread_mutex_lock(&lock);
    /* A process that already has NVML open keeps the driver that it opened. */
    code = references ? OK : driver_code(s);
    if (code == OK && references++ == 0) {
        attached_generation = s->generation;
        __atomic_add_fetch(&s->attached, 1, __ATOMIC_SEQ_CST);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    if (!references) return UNINITIALIZED;
    int code = faults(state, "nvmlShutdown", -1);
    if (code != OK) return code;
    pthread_mutex_lock(&lock);
    if (references && --references == 0) {
        __atomic_sub_fetch(&state->attached, 1, __ATOMIC_SEQ_CST);
        for (int i = 0; i < MAX_SETS; i++) {
            if (sets[i].id) __atomic_sub_fetch(&state->event_sets, 1, __ATOMIC_SEQ_CST);
            sets[i].id = 0;
        }
    }
    pthread_mutex_unlock(&lock);
    return OK;
}

const char *nvmlErrorString(int code) {
    static __thread char words[32];
    snprintf(words, sizeof words, "fake error %d", code);
    return words;
}

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    int code = enter(__func__, -1);
    return code != OK ? code : text(version, size, state->driver_version);
}

int nvmlSystemGetNVMLVersion(char *version, unsigned size) {
    int code = enter(__func__, -1);
    return code != OK ? code : text(version, size, state->nvml_version);
}

/* -- inventory */

int nvmlDeviceGetCount_v2(unsigned *count) {
    int code = enter(__func__, -1);
    if (code != OK) return code;
    *count = 0;
    for (uint32_t i = 0; i < state->gpus && i < FAKE_MAX_GPUS; i++) *count += state->gpu[i].present != 0;
    return OK;
}

static int opened(int slot, const char *function, nvmlDevice_t *device) {
    int code = faults(state, function, slot);
    if (code != OK) return code;
    if (state->gpu[slot].code == GPU_IS_LOST) return GPU_IS_LOST;
    *device = handle_of(slot);
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    int code = enter("", -1);
    if (code != OK) return code;
    for (uint32_t i = 0; i < state->gpus && i < FAKE_MAX_GPUS; i++)
        if (state->gpu[i].present && index-- == 0) return opened((int)i, __func__, device);
    return INVALID_ARGUMENT;
}

/* NVML accepts addresses with a domain of four or eight digits. */
static const char *short_pci(const char *pci) { return strlen(pci) > 12 ? pci + strlen(pci) - 12 : pci; }

int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, nvmlDevice_t *device) {
    int code = enter("", -1);
    if (code != OK) return code;
    for (uint32_t i = 0; i < state->gpus && i < FAKE_MAX_GPUS; i++)
        if (state->gpu[i].present && !strcasecmp(short_pci(pci), short_pci(state->gpu[i].pci)))
            return opened((int)i, __func__, device);
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned size) {
    ABOUT(device);
    return text(uuid, size, gpu->uuid);
}

int nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned size) {
    ABOUT(device);
    return text(name, size, gpu->name);
}

int nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned size) {
    ABOUT(device);
    return gpu->serial[0] ? text(serial, size, gpu->serial) : NOT_SUPPORTED;
}

struct pci_info {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char pci[32];
};

int nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, struct pci_info *info) {
    ABOUT(device);
    memset(info, 0, sizeof *info);
    sscanf(gpu->pci, "%x:%x:%x", &info->domain, &info->bus, &info->device);
    snprintf(info->legacy, sizeof info->legacy, "%04X:%02X:%02X.0", info->domain & 0xffff, info->bus & 0xff,
             info->device & 0xff);
    return text(info->pci, sizeof info->pci, gpu->pci);
}

/* -- events */

static struct event_set *set_of(void *handle) {
    for (int i = 0; i < MAX_SETS; i++)
        if (sets[i].id && sets[i].id == (uint32_t)(uintptr_t)handle) return &sets[i];
    return NULL;
}

int nvmlEventSetCreate(void **handle) {
    int code = enter(__func__, -1);
    if (code != OK) return code;
    pthread_mutex_lock(&lock);
    code = INSUFFICIENT_RESOURCES;
    for (int i = 0; i < MAX_SETS && code != OK; i++) {
        if (sets[i].id) continue;
        memset(&sets[i], 0, sizeof sets[i]);
        sets[i].id = next_set++;
        sets[i].generation = attached_generation;
        sets[i].tail = __atomic_load_n(&state->next_event, __ATOMIC_ACQUIRE);
        *handle = (void *)(uintptr_t)sets[i].id;
        __atomic_add_fetch(&state->event_sets, 1, __ATOMIC_SEQ_CST);
        code = OK;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int nvmlEventSetFree(void *handle) {
    int code = enter(__func__, -1);
    if (code != OK) return code;
    pthread_mutex_lock(&lock);
    struct event_set *set = set_of(handle);
    if (set) {
        set->id = 0;
        __atomic_sub_fetch(&state->event_sets, 1, __ATOMIC_SEQ_CST);
    }
    pthread_mutex_unlock(&lock);
    return set ? OK : INVALID_ARGUMENT;
}

int nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
    ABOUT(device);
    *types = state->old_driver ? gpu->supported_events & 0x1ff : gpu->supported_events;
    return OK;
}

int nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, void *handle) {
    ABOUT(device);
    unsigned long long known = state->old_driver ? gpu->supported_events & 0x1ff : gpu->supported_events;
    if (types & ~known) return NOT_SUPPORTED;
    pthread_mutex_lock(&lock);
    struct event_set *set = set_of(handle);
    if (set) set->mask[slot_of(device)] |= types;
    pthread_mutex_unlock(&lock);
    return set ? OK : INVALID_ARGUMENT;
}

struct event_data {
    nvmlDevice_t device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};

/* Find the next event that the set wants, or return TIMEOUT if there is none yet. */
static int take(void *handle, struct event_data *data) {
    pthread_mutex_lock(&lock);
    struct event_set *set = set_of(handle);
    int code = set ? (set->generation == state->generation ? TIMEOUT : UNINITIALIZED) : INVALID_ARGUMENT;
    uint64_t head = __atomic_load_n(&state->next_event, __ATOMIC_ACQUIRE);
    if (set && head - set->tail > FAKE_RING) set->tail = head - FAKE_RING;
    while (code == TIMEOUT && set->tail < head) {
        struct fake_event event = state->ring[set->tail++ % FAKE_RING];
        if (event.gpu >= FAKE_MAX_GPUS || !(set->mask[event.gpu] & event.type)) continue;
        data->device = handle_of((int)event.gpu);
        data->type = event.type;
        data->data = event.data;
        data->gpu_instance = event.gpu_instance;
        data->compute_instance = event.compute_instance;
        code = OK;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int nvmlEventSetWait_v2(void *handle, struct event_data *data, unsigned timeout_ms) {
    double until = now_s() + timeout_ms / 1000.0;
    struct fake_state *s = state;
    int code;
    if (s) __atomic_add_fetch(&s->waiting, 1, __ATOMIC_SEQ_CST);
    for (;;) {
        uint32_t wake = s ? __atomic_load_n(&s->wake, __ATOMIC_ACQUIRE) : 0;
        if ((code = enter(__func__, -1)) != OK || (code = take(handle, data)) != TIMEOUT) break;
        double left = until - now_s();
        if (left <= 0) break;
        double part = left < FUTEX_S ? left : FUTEX_S;
        struct timespec most = {(time_t)part, (long)((part - (time_t)part) * 1e9)};
        syscall(SYS_futex, &s->wake, FUTEX_WAIT, wake, &most, NULL, 0);
    }
    if (s) __atomic_sub_fetch(&s->waiting, 1, __ATOMIC_SEQ_CST);
    return code;
}

/* -- field values */

struct field_value {
    unsigned id, scope;
    long long timestamp, latency;
    int type, code;
    unsigned long long value;
};

static int builtin(const struct fake_gpu *gpu, unsigned id, unsigned long long *value) {
    switch (id) {
    case 3: *value = gpu->ecc_corrected; return OK;
    case 4: *value = gpu->ecc_uncorrected; return OK;
    case 94: *value = gpu->pcie_replays; return OK;
    case 142: *value = gpu->remapped_correctable; return OK;
    case 143: *value = gpu->remapped_uncorrectable; return OK;
    case 144: *value = gpu->remap_pending; return OK;
    case 145: *value = gpu->remap_failure; return OK;
    case 230: *value = gpu->recovery_action; return state->old_driver ? INVALID_ARGUMENT : OK;
    }
    if (!gpu->links) return NOT_SUPPORTED;
    switch (id) {
    case 38: *value = gpu->nvlink_flit; return OK;
    case 45: *value = gpu->nvlink_crc; return OK;
    case 52: *value = gpu->nvlink_replay; return OK;
    case 59: *value = gpu->nvlink_recovery; return OK;
    case 91: *value = gpu->links; return OK;
    }
    return NOT_SUPPORTED;
}

int nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, struct field_value *values) {
    ABOUT(device);
    if (count < 1) return INVALID_ARGUMENT;
    for (int i = 0; i < count; i++) {
        struct field_value *value = &values[i];
        value->type = 3; /* unsigned long long */
        value->value = 0;
        value->code = builtin(gpu, value->id, &value->value);
        for (int k = 0; k < FAKE_MAX_FIELDS; k++) {
            const struct fake_field *set = &gpu->fields[k];
            if (!set->set || set->id != value->id || set->scope != value->scope) continue;
            value->code = set->code;
            value->value = set->value;
        }
    }
    return OK;
}

/* -- memory */

int nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int type, int counter, unsigned long long *count) {
    ABOUT(device);
    if (counter) return NOT_SUPPORTED;
    *count = type ? gpu->ecc_uncorrected : gpu->ecc_corrected;
    return OK;
}

int nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *cor, unsigned *unc, unsigned *pending,
                              unsigned *failure) {
    ABOUT(device);
    *cor = gpu->remapped_correctable;
    *unc = gpu->remapped_uncorrectable;
    *pending = gpu->remap_pending;
    *failure = gpu->remap_failure;
    return OK;
}

int nvmlDeviceValidateInforom(nvmlDevice_t device) {
    ABOUT(device);
    return gpu->inforom;
}

/* -- modes */

/* According to NVML's documentation, this call does not return RESET_REQUIRED. */
int nvmlDeviceGetPersistenceMode(nvmlDevice_t device, int *mode) {
    struct fake_gpu *gpu = NULL;
    int code = about(__func__, device, &gpu);
    if (code != OK && !(gpu && code == RESET_REQUIRED)) return code;
    *mode = (int)gpu->persistence;
    return OK;
}

int nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *mode, unsigned *pending) {
    ABOUT(device);
    if (gpu->mig < 0) return NOT_SUPPORTED;
    *mode = (unsigned)gpu->mig;
    *pending = (unsigned)gpu->mig_pending;
    return OK;
}

/* -- heat and load */

int nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned *temperature) {
    ABOUT(device);
    if (sensor) return INVALID_ARGUMENT;
    *temperature = gpu->temperature;
    return OK;
}

int nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, int threshold, unsigned *temperature) {
    ABOUT(device);
    if (threshold != 1) return NOT_SUPPORTED; /* 1: slowdown */
    *temperature = gpu->slowdown_temperature;
    return OK;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons) {
    ABOUT(device);
    *reasons = gpu->clocks_event_reasons;
    return OK;
}

struct utilization {
    unsigned gpu, memory;
};

int nvmlDeviceGetUtilizationRates(nvmlDevice_t device, struct utilization *rates) {
    ABOUT(device);
    rates->gpu = rates->memory = gpu->utilization;
    return OK;
}

/* -- links */

int nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t device, unsigned *width) {
    ABOUT(device);
    *width = gpu->pcie_width;
    return OK;
}

int nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t device, unsigned *width) {
    ABOUT(device);
    *width = gpu->pcie_max_width;
    return OK;
}

int nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t device, unsigned *generation) {
    ABOUT(device);
    *generation = gpu->pcie_generation;
    return OK;
}

int nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t device, unsigned *generation) {
    ABOUT(device);
    *generation = gpu->pcie_max_generation;
    return OK;
}

int nvmlDeviceGetPcieReplayCounter(nvmlDevice_t device, unsigned *count) {
    ABOUT(device);
    *count = gpu->pcie_replays;
    return OK;
}

int nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, unsigned *active) {
    ABOUT(device);
    if (!gpu->links) return NOT_SUPPORTED;
    if (link >= gpu->links || link >= FAKE_MAX_LINKS) return INVALID_ARGUMENT;
    *active = gpu->link_up[link];
    return OK;
}

/* -- what older drivers lack */

#ifndef FAKE_OLD_DRIVER

struct versioned_int {
    unsigned version;
    int value;
};

int nvmlDeviceGetMarginTemperature(nvmlDevice_t device, struct versioned_int *margin) {
    NEWER();
    ABOUT(device);
    if (margin->version != 0x1000008) return ARGUMENT_VERSION_MISMATCH;
    margin->value = gpu->margin;
    return OK;
}

int nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons) {
    NEWER();
    ABOUT(device);
    *reasons = gpu->clocks_event_reasons;
    return OK;
}

struct sram_status {
    unsigned version;
    unsigned long long counts[11];
    unsigned exceeded;
};

int nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t device, struct sram_status *status) {
    NEWER();
    ABOUT(device);
    if (status->version != 0x1000068) return ARGUMENT_VERSION_MISMATCH;
    status->exceeded = gpu->sram_exceeded;
    return OK;
}

struct fabric_info {
    unsigned version;
    unsigned char cluster[16];
    unsigned status, clique, state, mask;
    unsigned char summary; /* from version 3 on */
};

int nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, struct fabric_info *info) {
    NEWER();
    ABOUT(device);
    if (info->version != 0x2000024 && info->version != 0x3000028) return ARGUMENT_VERSION_MISMATCH;
    info->state = gpu->fabric_state;
    info->status = gpu->fabric_status;
    info->mask = gpu->fabric_mask;
    if (info->version == 0x3000028) info->summary = (unsigned char)gpu->fabric_summary;
    return OK;
}

#endif
