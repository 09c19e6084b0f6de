"""The sensor of the devices in sysfs: PCI, InfiniBand, network interfaces, temperatures."""
