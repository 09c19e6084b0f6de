"""The commands that start ranks: of Holdfast's launcher, and of the launchers that it replaces. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# The program that starts Holdfast's launcher, as the text of `python -c`. The words after it are the folder
# that contains `holdfast`, and the arguments of `holdfast launch`. That folder replaces the current one as
# the first entry of Python's path, so that no file of the user can replace one of Holdfast's modules.
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
"""The programs that always start ranks, and the name of each for users."""

LAUNCHER_MODULES: Mapping[str, str] = MappingProxyType(
    {TORCHRUN_MODULE: TORCHRUN, OLD_MODULE: OLD_MODULE, ACCELERATE_LAUNCH_MODULE: ACCELERATE_LAUNCH}
)
"""The modules that always start ranks with `python -m`, and the name of each for users."""
