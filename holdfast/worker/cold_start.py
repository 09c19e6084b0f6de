"""A rank that no warm process carries, of a script whose file has changed since the run began."""

from __future__ import annotations

import os

from holdfast.worker import script, script_source, zygote

BOOT_CODE = zygote.boot_code("holdfast.worker.cold_start")
SOURCES_VARIABLE = "HOLDFAST_SOURCES"  # the variable with the descriptor of what the run keeps


def main() -> None:
    """Run the script as it was. What it raises is the interpreter's to print."""
    descriptor = int(os.environ.pop(SOURCES_VARIABLE))
    kept = script_source.load(descriptor)
    os.close(descriptor)
    script.run_unsupervised(kept.program, kept.main)
