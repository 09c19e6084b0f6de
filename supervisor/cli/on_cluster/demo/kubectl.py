"""Run kubectl for tasks beyond the API: build and apply the manifests, and read logs as text."""

from __future__ import annotations

import shutil
import subprocess

from holdfast.errors import BadInput

REQUEST_S = 60.0  # the limit for a request that does not wait for anything


class Kubectl:
    """Runs kubectl in one context of the kubeconfig; "" for the current context."""

    def __init__(self, context: str = "") -> None:
        """Raises `BadInput` if kubectl is not installed."""
        found = shutil.which("kubectl")
        if found is None:
            raise BadInput(
                "demo --cluster needs kubectl, which is not on PATH: https://kubernetes.io/docs/tasks/tools"
            )
        self._words = [found, *(["--context", context] if context else [])]

    def attempt(self, *words: str, limit_s: float = REQUEST_S) -> tuple[str, str]:
        """Run kubectl. Return its output, and one line that says why it failed, or "".

        kubectl runs in a separate process group, to keep Ctrl-C from ending it while it removes something.
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
