"""Make the folder that an editable install puts on the path: a link to `holdfast`, nothing else.

The checkout's root would let every script import our `supervisor`, `sidecar` and `trainer`, and an
import hook would cost every Python start of the environment. The wheel itself needs no hook.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.builders.wheel import WheelBuilderConfig


class ImportRoot(BuildHookInterface[WheelBuilderConfig]):
    """Found by hatchling through its base class."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make `.editable/holdfast` when an editable wheel is built."""
        if version != "editable":
            return
        link = Path(self.root, ".editable", "holdfast")
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(Path("..", "holdfast"), target_is_directory=True)
