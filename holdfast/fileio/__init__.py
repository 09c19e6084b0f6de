"""Files that survive a crash: formats, checksums, and storage that may stop responding."""
