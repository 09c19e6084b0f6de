"""Pods as the API server returns them."""

from __future__ import annotations

from typing import Any


def pod(name: str, uid: str = "", *, phase: str = "Running", **restarts: int) -> dict[str, Any]:
    """Return a pod on node n1. The keywords are its containers, with _ for -, and their restart counts."""
    found = [
        {
            "name": each.replace("_", "-"),
            "image": "holdfast:dev",
            "restartCount": count,
            "state": {"running": {}},
        }
        for each, count in restarts.items()
    ]
    return {
        "metadata": {"name": name, "uid": uid or f"uid-{name}"},
        "spec": {"nodeName": "n1"},
        "status": {"phase": phase, "containerStatuses": found},
    }


def waiting(name: str, reason: str, image: str = "holdfast:dev") -> dict[str, Any]:
    """Return a pod whose first init container waits for `reason`."""
    found = pod(name, phase="Pending")
    state = {"waiting": {"reason": reason}}
    found["status"]["initContainerStatuses"] = [
        {"name": "holdfast-setup", "image": image, "restartCount": 0, "state": state}
    ]
    return found
