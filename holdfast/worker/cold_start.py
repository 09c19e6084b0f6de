"""Run a rank without a warm process, because a file of the script has changed since the run began."""

from __future__ import annotations

import os

from holdfast.protocol import environment
from holdfast.worker import script, script_source, zygote

BOOT_CODE = zygote.boot_code("holdfast.worker.cold_start")


def main() -> None:
    """Run the script as it was when the run began. The interpreter prints its exceptions."""
    descriptor = int(os.environ.pop(environment.SOURCES))
    sources = script_source.load(descriptor)
    os.close(descriptor)
    script.run_unsupervised(sources.program, sources.main)
