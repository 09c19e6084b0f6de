"""Access to the cluster that $KUBECONFIG selects through kubectl, and the installation of Holdfast in it."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[3]
DEFAULT = ROOT / "manifests" / "default"
AGENTS_PAGE = ROOT / "docs" / "node-agent.md"
EXAMPLES = ROOT / "examples" / "kubernetes"
SYSTEM = "holdfast-system"
NODES, AGENT = "holdfast-nodes", "holdfast-nodeagent"  # the node agent's namespace and DaemonSet
SUPERVISOR, WEBHOOK = PROGRAMS = ("holdfast-supervisor", "holdfast-webhook")
OURS = "holdfast.dev/installed-by-tests"  # annotation: a namespace that an interrupted run may have left

READY_S = 180.0  # from `apply` until both programs are ready on a busy machine with two cores
GONE_S = 120.0  # pods have 30 s to end, and the namespace controller runs every few seconds
REQUEST_S = 60.0  # the limit of a kubectl request that does not wait
POLL_S = 0.3  # between two polls of the cluster; each costs the API server some milliseconds
LOG_LINES = 40

Json = dict[str, Any]
T = TypeVar("T")


class ClusterUnderTest:
    """The cluster that $KUBECONFIG selects.

    Writes go through kubectl. Repeated reads go through one `kubectl proxy`, because each kubectl process
    uses a core for a tenth of a second, and the training needs the cores.
    """

    def __init__(self) -> None:
        self._proxy: subprocess.Popen[str] | None = None
        self._port = 0

    def kubectl(self, *words: str | Path, text: str | None = None, limit_s: float = REQUEST_S) -> str:
        """Run kubectl with `text` on its input and return its output.

        Raises AssertionError with kubectl's message if it fails.
        """
        done = self.attempt(*words, text=text, limit_s=limit_s)
        assert done.returncode == 0, f"kubectl {shlex.join(map(str, words))}: {done.stderr or done.stdout}"
        return done.stdout

    def attempt(
        self, *words: str | Path, text: str | None = None, limit_s: float = REQUEST_S
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl and return its result. Raises subprocess.TimeoutExpired after `limit_s`."""
        return subprocess.run(
            ["kubectl", *map(str, words)],
            input=text,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            cwd=ROOT,
        )

    def wait(self, condition: str, *words: str, namespace: str, limit_s: float = READY_S) -> None:
        """Return once `kubectl wait` has seen `condition` on the objects that `words` name.

        Raises AssertionError with a report of the namespace after `limit_s`.
        """
        flags = (f"--for={condition}", f"--timeout={limit_s:g}s", "--namespace", namespace)
        done = self.attempt("wait", *flags, *words, limit_s=limit_s + REQUEST_S)
        if done.returncode:
            what = f"{' '.join(words)}: no {condition} within {limit_s:g} s: {done.stderr}"
            raise AssertionError(f"{what}\n{self.report(namespace)}")

    def until(self, look: Callable[[], T | None], what: str, namespace: str, limit_s: float) -> T:
        """Return the first result of `look` that is not None.

        Raises AssertionError with `what` and a report of the namespace after `limit_s`.
        """
        deadline = time.monotonic() + limit_s
        while True:
            found = look()
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {limit_s:g} s: {what}\n{self.report(namespace)}")
            time.sleep(POLL_S)

    def read(self, path: str) -> Json:
        """Return the object at a path of the API; {} if there is none. Raises AssertionError if refused."""
        status, text = self._request(path)
        assert status in (200, 404), f"{path}: {status} {text[:500]}"
        found: Json = json.loads(text) if status == 200 else {}
        return found

    def log(self, namespace: str, pod: str, container: str, options: str = "") -> str:
        """Return the log since the container's last start; "" if there is none yet."""
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log?container={container}{options}"
        status, text = self._request(path)
        return text if status == 200 else ""

    def _request(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._proxy_port(), timeout=REQUEST_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        finally:
            connection.close()

    def _proxy_port(self) -> int:
        if self._proxy is None:
            words = ["kubectl", "proxy", "--port=0"]
            self._proxy = subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            assert self._proxy.stdout is not None
            said = self._proxy.stdout.readline()  # "Starting to serve on 127.0.0.1:PORT"
            self._port = int(said.rpartition(":")[2])
        return self._port

    def close(self) -> None:
        """End the proxy."""
        if self._proxy is not None:
            self._proxy.kill()
            self._proxy.communicate()

    def report(self, namespace: str) -> str:
        """Return a namespace's pods, supervisions, events and last log lines, or why they cannot be read."""
        there = ("--namespace", namespace)
        logs = ("logs", *there, "--all-containers", "--prefix", f"--tail={LOG_LINES}")
        parts = {
            f"pods of {namespace}": self._seen("get", "pods", *there, "-o", "wide"),
            "supervisions": self._seen("get", "supervisions", *there),
            "events": self._seen("get", "events", *there, "--sort-by=.lastTimestamp"),
        }
        for name in self._seen("get", "pods", *there, "-o", "name").split():
            if name.startswith("pod/"):
                parts[f"log of {name}"] = self._seen(*logs, name)
        return "\n".join(f"-- {title}\n{text}" for title, text in parts.items())

    def _seen(self, *words: str) -> str:
        try:
            done = self.attempt(*words)
        except subprocess.TimeoutExpired as error:
            return str(error)
        return done.stdout + done.stderr


def missing() -> str:
    """Return the reason why the cluster tests cannot run; "" if they can."""
    if not os.environ.get("KUBECONFIG"):
        return "no cluster is given"
    if not os.environ.get("HOLDFAST_IMAGE_BUILD") and os.environ.get("HOLDFAST_IMAGES_READY") != "1":
        return "no images are given"
    return "" if shutil.which("kubectl") else "kubectl is not on PATH"


def is_lent() -> bool:
    """Return True if somebody else installed Holdfast and is using it."""
    return os.environ.get("HOLDFAST_INSTALLED") == "1"


_ANNOTATED: Json = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "first",
        "namespace": "default",
        "annotations": {
            "holdfast.dev/inject": "true",
            "holdfast.dev/group": "g",
            "holdfast.dev/members": "1",
        },
    },
    "spec": {"containers": [{"name": "trainer", "image": "any", "command": ["python", "train.py"]}]},
}


def install(cluster: ClusterUnderTest) -> None:
    """Install Holdfast and return when it is ready. Raises AssertionError with a report of its namespace."""
    cluster.kubectl("create", "namespace", SYSTEM)
    cluster.kubectl("annotate", "namespace", SYSTEM, f"{OURS}=true")
    cluster.kubectl("apply", "-k", DEFAULT)
    for name in PROGRAMS:
        cluster.wait("condition=Available", f"deployment/{name}", namespace=SYSTEM)
    rolled_out(cluster)
    text = cluster.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", text=json.dumps(_ANNOTATED))
    assert "holdfast-sidecar" in text, "a pod that is created once Holdfast is available is not injected"


def uninstall(cluster: ClusterUnderTest) -> None:
    """Remove everything that `install` has created, and return once it is gone."""
    words = ("delete", "-k", DEFAULT, "--ignore-not-found", f"--timeout={GONE_S:g}s")
    cluster.kubectl(*words, limit_s=GONE_S + REQUEST_S)
    forget = next(line for line in AGENTS_PAGE.read_text().splitlines() if '"$patch":"delete"' in line)
    subprocess.run(["bash", "-c", forget], check=True, capture_output=True, timeout=REQUEST_S)


def rolled_out(cluster: ClusterUnderTest) -> None:
    """Return once every node has a ready agent of the newest revision."""
    words = ("rollout", "status", f"daemonset/{AGENT}", "-n", NODES, f"--timeout={READY_S:g}s")
    done = cluster.attempt(*words, limit_s=READY_S + REQUEST_S)
    assert done.returncode == 0, f"{done.stderr}\n{cluster.report(NODES)}"


def leader(cluster: ClusterUnderTest) -> str:
    """Return the name of the supervisor pod that holds the lease; "" if none does."""
    path = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/{SUPERVISOR}"
    holder = ""
    with suppress(KeyError):
        holder = cluster.read(path)["spec"]["holderIdentity"]
    return holder.rpartition("_")[0]  # the rest distinguishes successive processes of the pod
