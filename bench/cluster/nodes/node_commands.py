"""Kill, start, cut off and reconnect nodes with the commands in the environment, and restore all of them."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType

from bench.harness.console import say
from holdfast.errors import BadInput

VARIABLES = {what: f"HOLDFAST_NODE_{what.upper()}" for what in ("kill", "start", "cut", "heal")}
_UNDO = {"kill": "start", "cut": "heal"}
COMMAND_S = 120.0  # the time limit of a command; booting a node takes longest


class NodeCommands:
    """The commands. On exit from the context, all nodes that are still killed or cut off are restored."""

    def __init__(self, words: Mapping[str, Sequence[str]]) -> None:
        self._words = words
        self._disturbed: dict[str, str] = {}  # by node: what was done to it

    def __enter__(self) -> NodeCommands:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in tuple(self._disturbed):
            try:
                self.restore(node)
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as failure:
                say(f"WARNING: node {node} is still disturbed: {failure}")

    def disturb(self, what: str, node: str) -> None:
        """Do "kill" or "cut" to a node. Raises `RuntimeError` if the command fails."""
        self._disturbed[node] = what
        self._run(what, node)

    def restore(self, node: str) -> None:
        """Start or reconnect a node, if it is disturbed. Raises `RuntimeError` if the command fails."""
        if node in self._disturbed:
            self._run(_UNDO[self._disturbed[node]], node)
            del self._disturbed[node]

    def _run(self, what: str, node: str) -> None:
        words = [*self._words[what], node]
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(words)}: {(done.stderr or done.stdout).strip()}")


def from_environment(environment: Mapping[str, str], needed: Sequence[str]) -> NodeCommands:
    """Return the commands. Raises `BadInput` that names each variable in `needed` that is not set."""
    words = {what: shlex.split(environment.get(name, "")) for what, name in VARIABLES.items()}
    missing = [VARIABLES[what] for what in needed if not words[what]]
    if missing:
        raise BadInput(
            f"set {', '.join(missing)} to commands that, followed by the name of a node, do this to the node"
        )
    return NodeCommands(words)
