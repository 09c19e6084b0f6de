"""Manage the installation that the demo uses: an existing one, which stays unchanged, or a temporary one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast import parts
from holdfast.errors import BadInput
from holdfast.fileio.strict_json import mapping
from supervisor.admission import pod_layout
from supervisor.cli.on_cluster import diagnosis
from supervisor.cli.on_cluster.connection import ClusterConnection
from supervisor.cli.on_cluster.demo import pods
from supervisor.cli.on_cluster.demo.interruption import Interruption
from supervisor.cli.on_cluster.demo.kubectl import REQUEST_S, Kubectl
from supervisor.cli.on_cluster.doctor import (
    DEPLOYMENTS,
    NAMESPACES,
    REVIEWS,
    SUPERVISOR,
    WEBHOOK,
    WEBHOOKS,
)
from supervisor.cluster.supervision.contents import GROUP, SUPERVISIONS
from supervisor.kubernetes.client import PODS, KubernetesObject
from supervisor.kubernetes.errors import AlreadyThere, ApiError, NotFound, ServerUnreachable

MANIFESTS = Path("manifests") / "default"
EXAMPLES = Path("examples") / "kubernetes"
MADE_BY = f"{GROUP}/installed-by"  # an annotation on Holdfast's namespace
DEMO_LABEL = f"{GROUP}/demo"  # a label on a demo's namespace
READY_S = 150.0  # the limit for both deployments, on a busy machine with two cores
INJECTED_S = 30.0  # after both are ready; the API server and the Service usually follow within seconds
GONE_S = 120.0  # pods have 30 s to end, and the namespace controller runs every few seconds
POLL_S = 0.3
_PROGRAMS = (WEBHOOK, SUPERVISOR)


@dataclass(frozen=True, slots=True)
class Right:
    """A right that the demo needs. `group` is "" for the core group."""

    verb: str
    group: str
    plural: str


TRAIN_RIGHTS = (
    Right("create", "", "namespaces"),
    Right("delete", "", "namespaces"),
    Right("create", "", "services"),
    Right("create", "batch", "jobs"),
    Right("delete", "", "pods"),
    Right("patch", GROUP, "supervisions"),
)
INSTALL_RIGHTS = (
    Right("create", "apiextensions.k8s.io", "customresourcedefinitions"),
    Right("create", "rbac.authorization.k8s.io", "clusterroles"),
    Right("create", "rbac.authorization.k8s.io", "clusterrolebindings"),
    Right("create", "admissionregistration.k8s.io", "mutatingwebhookconfigurations"),
    Right("create", "scheduling.k8s.io", "priorityclasses"),
    Right("create", "apps", "deployments"),
)


@dataclass(frozen=True, slots=True)
class Removal:
    """The result of removing the installation. `text` is a message for the user, or ""."""

    text: str = ""
    is_problem: bool = False


def find_checkout() -> Path:
    """Return the root of the checkout that contains the manifests and examples. Raises `BadInput`."""
    for place in (parts.folder(), Path.cwd()):
        if (place / MANIFESTS).is_dir() and (place / EXAMPLES).is_dir():
            return place
    raise BadInput(
        "demo --cluster applies the manifests and examples of a checkout, which an installed package lacks:"
        " run it in a clone of the repository"
    )


class Installation:
    """Holdfast in the cluster. `is_ours` is True if this demo, or a demo that was killed, installed it."""

    def __init__(
        self, connection: ClusterConnection, kubectl: Kubectl, checkout: Path, stop: Interruption
    ) -> None:
        self.is_ours = self._has_applied = False
        self._connection, self._kubectl, self._stop = connection, kubectl, stop
        self._manifests = str(checkout / MANIFESTS)
        self._probe = str(checkout / EXAMPLES / "bare-pods.yaml")

    def find(self) -> bool:
        """Look for Holdfast in the cluster, and set `is_ours`.

        Returns True if Holdfast is installed, but not by a demo. Raises `BadInput` if it is being deleted or
        only partly installed.
        """
        space = self._get_namespace()
        if space is None:
            return False
        if mapping(space.get("status")).get("phase") == "Terminating":
            raise BadInput(f"namespace {pod_layout.NAMESPACE} is being deleted: try again when it is gone")
        self.is_ours = _is_of_a_demo(space)
        if not self.is_ours and None in [self._deployment(name) for name in _PROGRAMS]:
            raise BadInput(
                f"namespace {pod_layout.NAMESPACE} exists, but Holdfast is only partly installed in it:"
                " `holdfast doctor` shows what is missing"
            )
        # If a demo was killed, its installation is applied again, and removed at the end of this demo.
        return not self.is_ours

    def check_rights(self, *, installs: bool) -> None:
        """Raise `BadInput` if the user lacks a right that the demo needs."""
        for right in (*TRAIN_RIGHTS, *(INSTALL_RIGHTS if installs else ())):
            if not self._may(right):
                what = f"{right.plural}.{right.group}" if right.group else right.plural
                need = "installing Holdfast needs the rights of a cluster administrator"
                why = need if right in INSTALL_RIGHTS else "the demo creates and removes a namespace"
                raise BadInput(f"forbidden: you may not {right.verb} {what} in this cluster; {why}")

    def install(self) -> None:
        """Apply the manifests. Raises `BadInput`."""
        space = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": pod_layout.NAMESPACE, "annotations": {MADE_BY: "demo"}},
        }
        if not self.is_ours:
            self.is_ours = True  # set first, because the response may be lost; `remove` checks again
            try:
                self._connection.ask(lambda server: server.create(NAMESPACES, space))
            except AlreadyThere:
                self.is_ours = False
                raise BadInput(f"another user has just created {pod_layout.NAMESPACE}: try again") from None
        self._has_applied = True
        _, why = self._kubectl.attempt("apply", "-k", self._manifests)
        if why:
            raise BadInput(f"Holdfast cannot be installed: {why}")

    def wait(self) -> str:
        """Wait until both programs are ready, and return their image. Raises `BadInput`."""
        deadline = time.monotonic() + READY_S
        while True:
            found = {name: self._deployment(name) for name in _PROGRAMS}
            hook = diagnosis.webhook(self._webhook())
            if hook.state == "ok" and all(_is_ready(each) for each in found.values()):
                return _image(found[SUPERVISOR])
            listed = self._connection.ask(lambda server: server.list(PODS, pod_layout.NAMESPACE)).objects
            lacking = pods.missing_image(listed)
            if lacking:
                raise BadInput(lacking)
            if time.monotonic() > deadline:
                why = pods.waiting_for(listed) or hook.text
                raise BadInput(f"Holdfast was not ready within {READY_S:g} s: {why}; see `holdfast doctor`")
            self._stop.pause(POLL_S)

    def wait_for_injection(self, namespace: str) -> None:
        """Wait until a dry run shows that the webhook injects new pods. Raises `BadInput`.

        The webhook can be ready a second before the API server trusts it and before its Service has an
        address.
        """
        deadline = time.monotonic() + INJECTED_S
        words = ("create", "--dry-run=server", "-o", "json", "-n", namespace, "-f", self._probe)
        while True:
            printed, why = self._kubectl.attempt(*words)
            if not why and pod_layout.SIDECAR in printed:
                return
            if time.monotonic() > deadline:
                why = why or "the webhook does not respond"
                raise BadInput(f"new pods are not injected: {why}; see `holdfast doctor`")
            self._stop.pause(POLL_S)

    def remove(self, own_namespace: str) -> Removal:
        """Remove the installation if it belongs to the demo and no one else uses it.

        `own_namespace` is the namespace of this demo, which is not counted as a user.
        """
        if not self.is_ours:
            return Removal()
        by_hand = "`kubectl delete -k manifests/default` removes it"
        try:
            space = self._get_namespace()
            if space is None and not self._has_applied:
                return Removal()
            if space is not None and not _is_of_a_demo(space):
                return Removal("Holdfast stays installed: its namespace is no longer marked as a demo's")
            users = list(self._users(own_namespace))
        except (ApiError, OSError) as error:
            why = f"its users are unknown ({error})"
            return Removal(f"Holdfast is still installed, because {why}: {by_hand}", is_problem=True)
        if users:
            named = ", ".join(users[:3])
            return Removal(f"Holdfast stays installed, because others use it ({named}): {by_hand}")
        words = ("delete", "-k", self._manifests, "--ignore-not-found", f"--timeout={GONE_S:g}s")
        _, why = self._kubectl.attempt(*words, limit_s=GONE_S + REQUEST_S)
        return (
            Removal(f"Holdfast is still installed: {why}; {by_hand}", is_problem=True) if why else Removal()
        )

    def _users(self, own_namespace: str) -> Iterator[str]:
        """Yield other users of the installation: jobs, and demos that may not have started their jobs."""
        try:
            jobs = self._connection.ask(lambda server: server.list(SUPERVISIONS, prune=_metadata_only))
        except NotFound:  # the resource definition was removed, or was never created
            return
        for each in jobs.objects:
            if each["metadata"]["namespace"] != own_namespace:
                yield f"job {each['metadata']['namespace']}/{each['metadata']['name']}"
        yield from (f"namespace {name}" for name in other_demos(self._connection) if name != own_namespace)

    def _get_namespace(self) -> KubernetesObject | None:
        try:
            return self._connection.ask(lambda server: server.get(NAMESPACES, pod_layout.NAMESPACE))
        except NotFound:
            return None

    def _deployment(self, name: str) -> KubernetesObject | None:
        try:
            return self._connection.ask(lambda server: server.get(DEPLOYMENTS, name, pod_layout.NAMESPACE))
        except NotFound:
            return None

    def _webhook(self) -> KubernetesObject | None:
        try:
            return self._connection.ask(lambda server: server.get(WEBHOOKS, WEBHOOK))
        except NotFound:
            return None

    def _may(self, right: Right) -> bool:
        asked = {"verb": right.verb, "group": right.group, "resource": right.plural}
        body = {
            "apiVersion": REVIEWS.api_version,
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        answer = self._connection.ask(lambda server: server.create(REVIEWS, body))
        return bool(mapping(answer.get("status")).get("allowed"))


def other_demos(connection: ClusterConnection) -> list[str]:
    """Return the namespaces of demos that are running, or were killed before they removed their namespace."""
    try:
        found = connection.ask(lambda server: server.list(NAMESPACES, labels=DEMO_LABEL))
    except ServerUnreachable:
        return []
    alive = [each for each in found.objects if not each["metadata"].get("deletionTimestamp")]
    return [str(each["metadata"]["name"]) for each in alive]


def _is_of_a_demo(space: KubernetesObject) -> bool:
    return MADE_BY in mapping(space["metadata"].get("annotations"))


def _is_ready(found: KubernetesObject | None) -> bool:
    """Return True if all replicas of a deployment's current version are available."""
    if found is None:
        return False
    status, wanted = mapping(found.get("status")), mapping(found.get("spec")).get("replicas", 1)
    is_current = int(status.get("observedGeneration") or 0) >= int(found["metadata"].get("generation") or 0)
    return is_current and int(status.get("availableReplicas") or 0) >= int(wanted)


def _image(found: KubernetesObject | None) -> str:
    assert found is not None  # a ready deployment exists
    image: str = found["spec"]["template"]["spec"]["containers"][0]["image"]
    return image


def _metadata_only(found: KubernetesObject) -> KubernetesObject:
    return {"metadata": found["metadata"]}
