"""kubectl, for what the API alone cannot do: build and apply the manifests, and read logs as text."""

from __future__ import annotations

import shutil
import subprocess

from holdfast.errors import BadInput

REQUEST_S = 60.0  # for a request that waits for nothing


class Kubectl:
    """kubectl in one context of the kubeconfig; "" for the current one."""

    def __init__(self, context: str = "") -> None:
        """Raises `BadInput` if there is no kubectl."""
        found = shutil.which("kubectl")
        if found is None:
            raise BadInput(
                "demo --cluster needs kubectl, which is not on PATH: https://kubernetes.io/docs/tasks/tools"
            )
        self._words = [found, *(["--context", context] if context else [])]

    def attempt(self, *words: str, limit_s: float = REQUEST_S) -> tuple[str, str]:
        """Run kubectl and return its output, and in one line why it failed, or "".

        A process group of its own keeps Ctrl-C from ending a kubectl that removes something.
        """
        try:
            done = subprocess.run(
                [*self._words, *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=limit_s,
                check=False,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return "", f"kubectl {words[0]} has not ended within {limit_s:g} s"
        if done.returncode == 0:
            return done.stdout, ""
        return done.stdout, " ".join(
            done.stderr.split()
        ) or f"kubectl {words[0]} exited with {done.returncode}"
