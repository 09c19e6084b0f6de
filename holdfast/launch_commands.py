"""The commands that start ranks: Holdfast's own launcher, and the launchers that it replaces. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# The code that starts Holdfast's launcher, for `python -c`. Its arguments are the folder that contains
# `holdfast`, followed by the arguments of `holdfast launch`. The folder replaces the current directory as the
# first entry of Python's path, so none of the user's files can shadow a module of Holdfast.
START = (
    "import sys; sys.path[0] = sys.argv.pop(1); "
    "from holdfast.launcher.cli import main; sys.exit(main(sys.argv[1:]))"
)

TORCHRUN, TORCHRUN_MODULE = "torchrun", "torch.distributed.run"
OLD_MODULE = "torch.distributed.launch"  # torchrun's predecessor
ACCELERATE_LAUNCH = "accelerate launch"
ACCELERATE_LAUNCH_PROGRAM, ACCELERATE_LAUNCH_MODULE = "accelerate-launch", "accelerate.commands.launch"
# These start ranks only if their first argument is "launch".
ACCELERATE_PROGRAM, ACCELERATE_MODULE = "accelerate", "accelerate.commands.accelerate_cli"

LAUNCHER_PROGRAMS: Mapping[str, str] = MappingProxyType(
    {TORCHRUN: TORCHRUN, ACCELERATE_LAUNCH_PROGRAM: ACCELERATE_LAUNCH}
)
"""The programs that always start ranks, each with the name to show to users."""

LAUNCHER_MODULES: Mapping[str, str] = MappingProxyType(
    {TORCHRUN_MODULE: TORCHRUN, OLD_MODULE: OLD_MODULE, ACCELERATE_LAUNCH_MODULE: ACCELERATE_LAUNCH}
)
"""The modules that always start ranks with `python -m`, each with the name to show to users."""
