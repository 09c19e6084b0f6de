"""Sees the devices of the node as the kernel shows them in sysfs: PCI, InfiniBand, network, heat."""
