"""Find what is wrong with an installation, a namespace or a pod, from their API objects. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from holdfast import exit_codes
from holdfast.fileio.strict_json import mapping
from supervisor.admission import pod_layout, settings
from supervisor.cli.on_cluster.jobs import seconds_of
from supervisor.cli.on_cluster.resource import view_of
from supervisor.cluster.adoption import pod_facts
from supervisor.cluster.adoption.pod_facts import ENDED_PHASES
from supervisor.cluster.pods import member_name
from supervisor.kubernetes.client import KubernetesObject
from supervisor.observability.incident_record import SCHEMA
from supervisor.wording import size

FindingState: TypeAlias = Literal["ok", "problem", "unknown"]

INSTALL = "install Holdfast: `kubectl apply -k manifests/default`"
AGAIN = "recreate the pod: an existing pod cannot be injected"
YOUNG_S = 20.0  # a pod that has been running for less than this may still be connecting
_OUT_OF_MEMORY = "OOMKilled"  # the reason of a container that the kernel has killed
_WELL = (0, None, exit_codes.INTERRUPTED, exit_codes.TERMINATED)  # for a job that finished or was stopped
_STARTING = ("ContainerCreating", "PodInitializing")  # reasons of a container that is starting normally


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """The result of one check.

    `state` is "unknown" if the user lacks the rights for the check. `what` names the object that was checked.
    `remedy` says how the user can solve a problem.
    """

    state: FindingState
    what: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.state:8} {self.what}: {self.text}" + (f"; {self.remedy}" if self.remedy else "")

    def as_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


# -- the installation


def webhook(found: KubernetesObject | None) -> DoctorFinding:
    """Check the webhook's configuration. `found` is None if it does not exist."""
    what = "webhook configuration"
    if found is None:
        return DoctorFinding("problem", what, "it does not exist, so no pod is injected", INSTALL)
    hooks = found.get("webhooks") or ()
    if not all(mapping(each.get("clientConfig")).get("caBundle") for each in hooks):
        text = "the API server does not trust the webhook: its CA certificate is missing"
        logs = f"see `kubectl -n {pod_layout.NAMESPACE} logs deploy/holdfast-webhook`"
        return DoctorFinding("problem", what, text, logs)
    return DoctorFinding("ok", what, "the API server sends new pods to the webhook, and trusts it")


def deployment(name: str, found: KubernetesObject | None) -> DoctorFinding:
    """Check one of Holdfast's two deployments. `found` is None if it does not exist."""
    what = f"deployment {name}"
    if found is None:
        return DoctorFinding("problem", what, f"it does not exist in {pod_layout.NAMESPACE}", INSTALL)
    wanted, ready = (
        mapping(found.get("spec")).get("replicas", 1),
        mapping(found.get("status")).get("readyReplicas"),
    )
    text = f"{ready or 0} of {wanted} replicas are ready"
    if ready:
        return DoctorFinding("ok", what, text)
    see = f"see `kubectl -n {pod_layout.NAMESPACE} describe pods` and the logs of deploy/{name}"
    return DoctorFinding("problem", what, text, see)


def exclusion(namespace: KubernetesObject, configuration: KubernetesObject) -> str:
    """Return why the webhook's selector excludes the namespace; "" if it does not."""
    labels = mapping(namespace["metadata"].get("labels"))
    for hook in configuration.get("webhooks") or ():
        selector = mapping(hook.get("namespaceSelector"))
        for key, value in mapping(selector.get("matchLabels")).items():
            if labels.get(key) != value:
                return f"it lacks the label {key}={value}"
        for each in selector.get("matchExpressions") or ():
            if not _matches(labels, each):
                return f"its label {each['key']} is {labels.get(each['key'], 'missing')!r}"
    return ""


def _matches(labels: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    key, values = wanted["key"], wanted.get("values") or ()
    return {
        "In": labels.get(key) in values,
        "NotIn": labels.get(key) not in values,
        "Exists": key in labels,
        "DoesNotExist": key not in labels,
    }.get(str(wanted.get("operator")), True)


def namespace(name: str, why_not: str) -> DoctorFinding:
    """Check a namespace. `why_not` says why the webhook excludes it; "" if the webhook does not."""
    what = f"namespace {name}"
    if not why_not:
        return DoctorFinding("ok", what, "its pods can be injected")
    text = "its pods are not sent to the webhook"
    if name in pod_layout.SYSTEM_NAMESPACES:
        why = f"{text}, because it is a system namespace"
        return DoctorFinding("problem", what, why, "run jobs in another namespace")
    text += f", because {why_not}"
    return DoctorFinding("problem", what, text, "correct its labels with `kubectl label namespace`")


# -- a job


def job(found: KubernetesObject) -> Iterator[DoctorFinding]:
    """Yield a finding for each problem of a supervised job."""
    metadata, view = found["metadata"], view_of(found) or {}
    what = f"job {metadata['namespace']}/{metadata['name']}"
    memory = mapping(view.get("memory"))
    needed, available = memory.get("needed_bytes"), memory.get("available_bytes")
    if isinstance(needed, int) and isinstance(available, int) and needed > available:
        text = f"its snapshots need {size(needed)}, but the memory volume of its pods has {size(available)}"
        least = f"{-(-int(memory.get('state_bytes') or 0) // (1 << 20))}Mi"
        yield DoctorFinding(
            "problem", what, text, f'give its pods the annotation {pod_layout.STATE_SIZE}: "{least}"'
        )
    standbys = mapping(mapping(found.get("status")).get("standbys"))
    if standbys.get("problem") and view.get("phase") != "ended":
        text = f"it lacks a standby: {_one_line(standbys['problem'])}"
        yield DoctorFinding(
            "problem",
            what,
            text,
            "free up capacity, or lift the restriction that refuses the pod; Holdfast keeps trying",
        )
    code = view.get("exit_code")
    if view.get("phase") == "ended" and code not in _WELL:
        message = str(view.get("message") or "").strip().partition("\n")[0]
        how = "it was refused" if code == exit_codes.BAD_INPUT else f"it ended with exit code {code}"
        text = f"{how}: {message}" if message else how
        see = f"see `holdfast status --job {metadata['name']} -n {metadata['namespace']}`"
        yield DoctorFinding("problem", what, text, see)


# -- a pod


@dataclass(frozen=True, slots=True)
class PodSurroundings:
    """The jobs in a pod's namespace, the pod's events, and the reason if the namespace is excluded.

    `now_s` is the Unix time.
    """

    jobs: tuple[KubernetesObject, ...] = ()
    events: tuple[KubernetesObject, ...] = ()
    excluded: str = ""
    now_s: float = 0.0


def asks(pod: KubernetesObject) -> bool:
    """Return True if the pod requests injection, even if it does so incorrectly, for example with a label."""
    metadata = pod["metadata"]
    asked = pod_layout.INJECT in mapping(metadata.get("annotations"))
    return asked or bool(settings.forgotten_request(metadata))


def examine(pod: KubernetesObject, around: PodSurroundings) -> DoctorFinding:
    """Return the first problem that keeps a pod from being supervised, or an "ok" finding."""
    metadata = pod["metadata"]
    what = f"pod {metadata['namespace']}/{metadata['name']}"
    problem = _not_injected(pod, around) or _out_of_memory(pod) or _not_running(pod)
    if problem is not None:
        return DoctorFinding("problem", what, *problem)
    if (failure := _failed(pod)) is not None:
        return DoctorFinding("problem", what, *failure)
    phase = mapping(pod.get("status")).get("phase")
    if phase in ENDED_PHASES or metadata.get("deletionTimestamp"):
        return DoctorFinding(
            "ok", what, "it was injected, and has ended" if phase in ENDED_PHASES else "it is being deleted"
        )
    if phase != "Running":
        return DoctorFinding("ok", what, "it is injected, and is starting")
    problem = _not_supervised(pod, around)
    age_s = max(0.0, around.now_s - _running_since_s(pod))
    if problem is not None and age_s < YOUNG_S and not _refusals(around):
        return DoctorFinding(
            "ok", what, f"it is injected, started {age_s:.0f} s ago, and is still connecting"
        )
    if problem is not None:
        return DoctorFinding("problem", what, *problem)
    return DoctorFinding(
        "ok", what, f"it is injected, and supervised as a member of job {_job_of(pod, around.jobs)[0]}"
    )


def _not_injected(pod: KubernetesObject, around: PodSurroundings) -> tuple[str, str] | None:
    metadata = pod["metadata"]
    annotations = mapping(metadata.get("annotations"))
    asked, key = annotations.get(pod_layout.INJECT), pod_layout.INJECT
    template = f'give the pod template of its owner the annotation {key}: "true"'
    if asked is None:
        return settings.forgotten_request(metadata) or "it does not request Holdfast", template
    if asked != "true":
        return f"its annotation {key} is {asked!r}, but only 'true' requests Holdfast", template
    if pod_layout.NOT_INJECTED in annotations:
        return f"not injected: {annotations[pod_layout.NOT_INJECTED]}", f"fix this, then {AGAIN}"
    if pod_layout.INJECTED in annotations:
        return None
    if any(each in annotations for each in pod_layout.STATIC_POD_ANNOTATIONS):
        return "it is a static pod, which no webhook can change", "create it through the API server"
    if around.excluded:
        return (
            f"not injected, because its namespace is excluded ({around.excluded})",
            f"fix this, then {AGAIN}",
        )
    return "not injected: when it was created, no webhook responded or its namespace was excluded", AGAIN


def _not_running(pod: KubernetesObject) -> tuple[str, str] | None:
    """Return what keeps a pod's containers from running, and a remedy; None if nothing does."""
    status, name = mapping(pod.get("status")), pod["metadata"]["name"]
    for each in status.get("conditions") or ():
        if each.get("type") == "PodScheduled" and each.get("status") == "False":
            return f"it is not scheduled: {_one_line(each.get('message'))}", "see `kubectl describe pod`"
    for each in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = mapping(mapping(each.get("state")).get("waiting"))
        reason = waiting.get("reason")
        if reason and reason not in _STARTING:
            text = (
                f"its container {each['name']} does not start: {reason}: {_one_line(waiting.get('message'))}"
            )
            has_run = each.get("restartCount") or each.get("lastState")
            logs = f"see `kubectl logs {name} -c {each['name']} --previous`"
            return text.removesuffix(": "), logs if has_run else f"see `kubectl describe pod {name}`"
    return None


def _out_of_memory(pod: KubernetesObject) -> tuple[str, str] | None:
    """Return which container of the pod was killed at its memory limit, and a remedy; None if none was."""
    limits = {
        each.get("name"): mapping(mapping(each.get("resources")).get("limits")).get("memory")
        for each in mapping(pod.get("spec")).get("containers") or ()
    }
    for each in mapping(pod.get("status")).get("containerStatuses") or ():
        state = mapping(each.get("state"))
        if "running" in state:
            continue
        ended = mapping(state.get("terminated")) or mapping(mapping(each.get("lastState")).get("terminated"))
        if ended.get("reason") == _OUT_OF_MEMORY:
            limit = limits.get(each.get("name"))
            text = f"its container {each.get('name')} was killed at its memory limit"
            return f"{text} of {limit}" if limit else text, "raise resources.limits.memory of this container"
    return None


def _failed(pod: KubernetesObject) -> tuple[str, str] | None:
    """Return how a pod failed, and a remedy; None if it has not failed or was stopped."""
    status, metadata = mapping(pod.get("status")), pod["metadata"]
    if status.get("phase") != "Failed" or metadata.get("deletionTimestamp"):
        return None
    trains = pod_facts.training_container(pod)
    states = sorted(status.get("containerStatuses") or (), key=lambda each: each.get("name") != trains)
    endings = [
        (str(each.get("name")), mapping(mapping(each.get("state")).get("terminated"))) for each in states
    ]
    found = ((name, ended) for name, ended in endings if ended.get("exitCode") not in _WELL)
    name, ended = next(found, ("", {}))
    why = _one_line(ended.get("message") or status.get("message") or status.get("reason"))
    if not name and not why:
        return None
    other = f"its container {name} " if name and name != trains else ""
    how = f"{other}ended with exit code {ended['exitCode']}" if name else "it failed"
    see = f"see `kubectl logs {metadata['name']} -n {metadata['namespace']} -c {name or trains}`"
    return f"{how}: {why}" if why else how, see


def _not_supervised(pod: KubernetesObject, around: PodSurroundings) -> tuple[str, str] | None:
    """Return why a running, injected pod is not supervised, and a remedy; None if it is supervised."""
    name, member = _job_of(pod, around.jobs)
    see = f"see `kubectl logs {pod['metadata']['name']} -c {pod_layout.SIDECAR}`"
    reach = f"a NetworkPolicy may block its connection to {pod_layout.SUPERVISOR_URL}"
    if member is not None:
        if member.get("connected"):
            return _without_launcher(pod, member)
        return f"its sidecar is not connected to the supervisor of job {name}", f"{reach}; {see}"
    if refused := _refusals(around):
        return (
            f"not supervised: {_one_line(max(refused, key=_when).get('message'))}",
            "fix this, then recreate the pod",
        )
    owners = {each.get("uid") for each in pod["metadata"].get("ownerReferences") or ()}
    for each in around.jobs:
        if mapping(mapping(each.get("spec")).get("owner")).get("uid") in owners:
            return f"job {_path(each)} does not list it: its sidecar has not connected yet", f"{reach}; {see}"
    return "no Supervision lists it", f"the supervisor may be down, or may have just started; {see}"


def _refusals(around: PodSurroundings) -> list[KubernetesObject]:
    return [each for each in around.events if each.get("reason") == "NotSupervised"]


def _running_since_s(pod: KubernetesObject) -> float:
    """Return the Unix time at which the newest container started; 0 if none has."""
    states = (
        mapping(mapping(each.get("state")).get("running"))
        for key in ("initContainerStatuses", "containerStatuses")
        for each in mapping(pod.get("status")).get(key) or ()
    )
    return max((seconds_of(each.get("startedAt")) or 0.0 for each in states), default=0.0)


def _without_launcher(pod: KubernetesObject, member: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return why the pod's sidecar cannot reach its launcher, and a remedy; None if it can."""
    why = member.get("launcher_error")
    if not why:
        return None
    return (
        f"Holdfast cannot start ranks in it: {_one_line(why)}",
        f"see `kubectl logs {pod['metadata']['name']}`",
    )


def _job_of(pod: KubernetesObject, jobs: Sequence[KubernetesObject]) -> tuple[str, Mapping[str, Any] | None]:
    """Return the job whose status lists the pod, and the pod's entry; "" and None if no job lists it."""
    metadata = pod["metadata"]
    name = member_name(metadata["name"], metadata["uid"], 0)
    for each in jobs:
        for member in (view_of(each) or {}).get("members") or ():
            known = str(member.get("name"))
            if known == name or known.startswith(f"{name}."):
                return _path(each), member
    return "", None


def _path(found: KubernetesObject) -> str:
    return f"{found['metadata']['namespace']}/{found['metadata']['name']}"


def _when(event: Mapping[str, Any]) -> str:
    """Return a key that sorts events by time. All times have the same format, so they sort as text."""
    series = mapping(event.get("series"))
    return str(series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")


def _one_line(text: object) -> str:
    return " ".join(str(text or "").split())
