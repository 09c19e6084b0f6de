"""A rank that no warm process carries, of a script whose file has changed since the run began."""

from __future__ import annotations

import os

from holdfast.protocol import environment
from holdfast.worker import script, script_source, zygote

BOOT_CODE = zygote.boot_code("holdfast.worker.cold_start")


def main() -> None:
    """Run the script as it was. What it raises is the interpreter's to print."""
    descriptor = int(os.environ.pop(environment.SOURCES))
    kept = script_source.load(descriptor)
    os.close(descriptor)
    script.run_unsupervised(kept.program, kept.main)
