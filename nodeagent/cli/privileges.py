"""A table of the privileges that each sensor needs and the checks lost without them."""

from __future__ import annotations

from dataclasses import dataclass

from nodeagent.nvml import polling


@dataclass(frozen=True, slots=True)
class Need:
    """One privilege, file or device that a sensor needs."""

    sensor: str
    kind: str  # file, group, capability, device, namespace
    what: str
    how: str  # how to grant it to a service on the host and to a container
    lost: str  # the observations lost without it
    checks: tuple[str, ...] = ()  # checks that are lost entirely, if any


NEEDS: tuple[Need, ...] = (
    Need(
        "nvml-events", "device", "/dev/nvidiactl, /dev/nvidia*, libnvidia-ml.so.1",
        "host: nothing, as all users may open them; container: the NVIDIA runtime with "
        "NVIDIA_VISIBLE_DEVICES=all and NVIDIA_DRIVER_CAPABILITIES=utility, which takes no "
        "GPU from the device plugin",
        "Xids within milliseconds; they are still read from the kernel log",
    ),
    Need(
        "nvml-polling", "device", "/dev/nvidiactl, /dev/nvidia*, libnvidia-ml.so.1",
        "as for nvml-events",
        "all of the driver's data about a GPU: ECC, remapped rows, temperature, links, its recovery action",
        tuple(sorted(polling.CHECKS)),
    ),
    Need(
        "kmsg", "device", "/dev/kmsg",
        "host: root, or CAP_SYSLOG where kernel.dmesg_restrict is 1; container: only a privileged one, since "
        "the device cgroup denies it to all others even with CAP_SYSLOG",
        "kernel lines without delay; the journal has them a little later",
    ),
    Need(
        "journal", "group", "systemd-journal (or adm), and journalctl",
        "host: that group; container: the host's /var/log/journal read-only, --journal-dir, and user 0; the "
        "journal must be persistent",
        "kernel lines where /dev/kmsg cannot be read: details of Xids, SXids, storage and network faults",
    ),
    Need(
        "host", "file", "the host's /proc",
        "host: nothing; container: mount it read-only, --proc",
        "the host's processes and mounts, because a container's /proc shows only the container's own; it "
        "does show the node's memory, load and tables",
    ),
    Need(
        "host", "file", "the host's file systems",
        "host: nothing; container: mount / of the host read-only, with mountPropagation HostToContainer",
        "free space on file systems that the container does not mount; the agent lists the ones it omits",
        ("disk_used", "inodes_used", "disk_read_only"),
    ),
    Need(
        "host", "namespace", "the host's process ids",
        "host: nothing, unless /proc is mounted with hidepid; container: hostPID",
        "processes that are stuck",
        ("uninterruptible", "gpu_process_stuck"),
    ),
    Need(
        "host", "capability", "CAP_SYS_ADMIN for /proc/PID/stack, or CAP_SYS_PTRACE for /proc/PID/wchan",
        "host: root, or AmbientCapabilities; container: securityContext.capabilities.add",
        "whether a process is stuck in the NVIDIA driver; the stuck process itself is detected without it",
        ("gpu_process_stuck",),
    ),
    Need(
        "host", "file", "adjtimex(2)",
        "nothing; a custom seccomp profile must allow it",
        "whether the clock is disciplined",
        ("clock_unsynchronised",),
    ),
    Need(
        "sysfs", "file", "the host's /sys",
        "host: nothing, as all users may read it; container: mount it read-only, --sys. A container's own "
        "/sys shows only the network interfaces of the container's namespace",
        "network interfaces and, where the runtime hides them, adapters and PCI devices",
        ("net_down", "net_carrier"),
    ),
    Need(
        "sysfs", "file", "AER handled by the kernel",
        "firmware that grants it (`_OSC`), or the boot parameter pcie_ports=native; not in virtual machines",
        "errors of PCI devices",
        ("aer_fatal", "aer_nonfatal", "aer_correctable"),
    ),
)  # fmt: skip
