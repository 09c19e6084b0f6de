"""`holdfast doctor`: check the installation, the user's rights and pods, and print what is wrong."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.errors import BadInput
from holdfast.fileio.strict_json import mapping
from supervisor.admission import pod_layout
from supervisor.cli import command_options
from supervisor.cli.on_cluster import diagnosis
from supervisor.cli.on_cluster.connection import ClusterConnection, denial
from supervisor.cli.on_cluster.diagnosis import DoctorFinding, PodSurroundings
from supervisor.cli.on_cluster.job_source import place
from supervisor.cluster.supervision.contents import SUPERVISIONS
from supervisor.display.screen import say_all, say_json
from supervisor.kubernetes.client import PODS, KubernetesObject, ResourceKind
from supervisor.kubernetes.errors import Forbidden, NotFound
from supervisor.kubernetes.events import EVENTS
from supervisor.wording import count

NAMESPACES = ResourceKind("", "v1", "namespaces", namespaced=False)
DEPLOYMENTS = ResourceKind("apps", "v1", "deployments")
WEBHOOKS = ResourceKind(
    "admissionregistration.k8s.io", "v1", "mutatingwebhookconfigurations", namespaced=False
)
REVIEWS = ResourceKind("authorization.k8s.io", "v1", "selfsubjectaccessreviews", namespaced=False)
WEBHOOK, SUPERVISOR = "holdfast-webhook", "holdfast-supervisor"
MAX_PODS = 30  # pods that are listed one by one


@dataclass(frozen=True, slots=True)
class Withheld:
    """The result of a read that the user's rights do not permit. `why` names the missing right."""

    why: str


def show(connection: ClusterConnection, command: command_options.Doctor) -> int:
    """Print the findings, and return the exit code. Raises `BadInput` for an unknown pod or namespace."""
    namespace, name = place(connection, command, command.pod)
    found = tuple(_Examination(connection, namespace, name).run())
    problems = sum(each.state == "problem" for each in found)
    if command.json:
        say_json([each.as_json() for each in found])
    else:
        say_all([*map(str, found), f"{count(problems, 'problem')} found" if problems else "no problem found"])
    return 1 if problems else 0


class _Examination:
    """Checks the installation, a namespace, and `pod`, or all pods that request Holdfast if `pod` is ""."""

    def __init__(self, connection: ClusterConnection, namespace: str, pod: str) -> None:
        self._connection, self._namespace, self._pod = connection, namespace, pod
        self._configuration: KubernetesObject | None = None

    def run(self) -> Iterator[DoctorFinding]:
        pods = self._pods()  # this comes first, to report a mistyped name before any check
        yield from self._installation()
        excluded = ""
        space = self._get(NAMESPACES, self._namespace)
        if isinstance(space, Withheld):
            yield DoctorFinding("unknown", f"namespace {self._namespace}", space.why)
        elif space is None:
            raise BadInput(
                f"namespace {self._namespace!r} does not exist: `kubectl get namespaces` lists all namespaces"
            )
        elif self._configuration is not None:
            excluded = diagnosis.exclusion(space, self._configuration)
            yield diagnosis.namespace(self._namespace, excluded)
        yield from self._rights()
        jobs = self._list(SUPERVISIONS)
        if isinstance(jobs, Withheld):
            jobs = ()  # `_rights` has already reported why
        for each in jobs:
            yield from diagnosis.job(each)
        if isinstance(pods, Withheld):
            yield DoctorFinding("unknown", f"pods of namespace {self._namespace}", pods.why)
        else:
            yield from self._examine(pods, jobs, excluded)

    # -- the parts

    def _installation(self) -> Iterator[DoctorFinding]:
        configuration = self._get(WEBHOOKS, WEBHOOK)
        if isinstance(configuration, Withheld):
            yield DoctorFinding("unknown", "webhook configuration", configuration.why)
        else:
            self._configuration = configuration
            yield diagnosis.webhook(configuration)
        for name in (WEBHOOK, SUPERVISOR):
            found = self._get(DEPLOYMENTS, name, pod_layout.NAMESPACE)
            if isinstance(found, Withheld):
                yield DoctorFinding("unknown", f"deployment {name}", found.why)
            else:
                yield diagnosis.deployment(name, found)

    def _rights(self) -> Iterator[DoctorFinding]:
        """Check whether the API server knows supervisions, and what the user may do with them."""
        what = f"your rights in namespace {self._namespace}"
        try:
            self._connection.ask(
                lambda server: server.list(SUPERVISIONS, self._namespace, prune=lambda _: {})
            )
        except NotFound:
            text = "the API server does not know supervisions.holdfast.dev"
            yield DoctorFinding("problem", "resource definition", text, diagnosis.INSTALL)
            return
        except Forbidden as error:
            yield DoctorFinding("problem", what, denial(error), "ask your administrator for this right")
            return
        if self._may("patch"):
            yield DoctorFinding("ok", what, "you may view jobs, stop them and inject faults")
        else:
            more = "stop and inject need the ClusterRole holdfast-edit, which edit and admin include"
            yield DoctorFinding("ok", what, f"you may view jobs, but not change them: {more}")

    def _examine(
        self, pods: tuple[KubernetesObject, ...], jobs: tuple[KubernetesObject, ...], excluded: str
    ) -> Iterator[DoctorFinding]:
        events = self._list(EVENTS, "involvedObject.kind=Pod,reason=NotSupervised") if pods else ()
        by_pod: dict[str, list[KubernetesObject]] = {}
        for each in () if isinstance(events, Withheld) else events:
            by_pod.setdefault(str(mapping(each.get("involvedObject")).get("uid")), []).append(each)
        now_s = time.time()
        found = [
            diagnosis.examine(
                pod,
                PodSurroundings(jobs, tuple(by_pod.get(str(pod["metadata"]["uid"]), ())), excluded, now_s),
            )
            for pod in pods
        ]
        found.sort(key=lambda each: each.state != "problem")  # the sort is stable and keeps names in order
        yield from found[:MAX_PODS]
        if len(found) > MAX_PODS:
            rest = sum(each.state == "problem" for each in found[MAX_PODS:])
            state: diagnosis.FindingState = "problem" if rest else "ok"
            text = f"{len(found) - MAX_PODS} more pods, {rest} of them with a problem"
            yield DoctorFinding(state, f"namespace {self._namespace}", text)
        if not found:
            text = f"no pod in it has the annotation {pod_layout.INJECT}"
            yield DoctorFinding("ok", f"namespace {self._namespace}", text)

    # -- reading

    def _pods(self) -> tuple[KubernetesObject, ...] | Withheld:
        """Return the pods to check. Raises `BadInput` if the named pod does not exist."""
        if not self._pod:
            listed = self._list(PODS)
            return listed if isinstance(listed, Withheld) else tuple(filter(diagnosis.asks, listed))
        found = self._get(PODS, self._pod, self._namespace)
        if isinstance(found, Withheld):
            return found
        if found is not None:
            return (found,)
        listed = self._list(PODS)
        known = [] if isinstance(listed, Withheld) else [str(each["metadata"]["name"]) for each in listed]
        near = difflib.get_close_matches(self._pod, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        lists = f"`kubectl get pods -n {self._namespace}` lists its pods"
        raise BadInput(f"no pod {self._pod!r} in namespace {self._namespace!r}: {hint}{lists}")

    def _get(self, kind: ResourceKind, name: str, namespace: str = "") -> KubernetesObject | Withheld | None:
        try:
            return self._connection.ask(lambda server: server.get(kind, name, namespace))
        except NotFound:
            return None
        except Forbidden as error:
            return Withheld(f"not examined: {denial(error)}")

    def _list(self, kind: ResourceKind, fields: str = "") -> tuple[KubernetesObject, ...] | Withheld:
        """Return the namespace's objects of a kind; () if the API server does not know the kind."""
        try:
            found = self._connection.ask(lambda server: server.list(kind, self._namespace, fields=fields))
        except NotFound:
            return ()
        except Forbidden as error:
            return Withheld(f"not examined: {denial(error)}")
        return found.objects

    def _may(self, verb: str) -> bool:
        """Return True if the user has the right `verb` on supervisions in the namespace."""
        asked = {
            "namespace": self._namespace,
            "verb": verb,
            "group": SUPERVISIONS.group,
            "resource": SUPERVISIONS.plural,
        }
        body = {
            "apiVersion": REVIEWS.api_version,
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        answer = self._connection.ask(lambda server: server.create(REVIEWS, body))
        return bool(mapping(answer.get("status")).get("allowed"))
