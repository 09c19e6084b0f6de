"""Read the settings of a training job from the annotations of its pods. Pure.

Every policy option of `holdfast run` is also an annotation, `holdfast.dev/<option>`. Both accept the same
values, because they are defined in the same table of options. Settings that exist only for pods, such as the
training container and the storage, are in `POD_ANNOTATIONS`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from holdfast.checkpoint import object_location
from holdfast.protocol import defaults
from supervisor.admission import pod_layout
from supervisor.admission.resources import quantity
from supervisor.controller.policy_options import policy_of
from supervisor.options.run_options import RUN, Option
from supervisor.options.value_types import ValueType, choice, span
from supervisor.view.model import Policy

# Options that have no meaning on a cluster, because they control the files and the output of a local run.
LOCAL_ONLY = frozenset({"run_dir", "resume", "from_scratch", "port", "no_drills", "plain", "quiet"})
_WRITTEN_BY_US = (pod_layout.INJECT, pod_layout.INJECTED, pod_layout.NOT_INJECTED)

_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_SUBDOMAIN = re.compile(rf"(?=.{{1,253}}\Z){_LABEL.pattern}(?:\.{_LABEL.pattern})*", re.ASCII)
_FLAG = choice("true", "false")

# Limits on the work for each pod, because a pod may have 256 KiB of annotations, and the supervisor reads the
# annotations of all pods repeatedly.
MAX_PROBLEMS = 8  # the limit for reported problems, because each may need a comparison with all known names
MAX_VALUE = 4096  # characters, the length of the longest path
_SHOWN = 100  # characters of an invalid name or value; valid ones are shorter


@dataclass(frozen=True, slots=True)
class DurableStorage:
    """Where checkpoints are stored: in a claim, a directory of the node, a bucket or, by default, the pod."""

    claim: str = ""
    path: str = ""  # a path within the claim or, without a claim, on the node
    objects: str = ""  # the URL of a prefix in object storage

    @property
    def is_durable(self) -> bool:
        """False if no checkpoints are written, because they would be lost with the pod."""
        return bool(self.claim or self.path or self.objects)


@dataclass(frozen=True, slots=True)
class PodSettings:
    """The settings from a pod's annotations. Policy fields have the same names as in `RunOptions`."""

    container: str = ""  # "" if not given
    group: str = ""
    checkpoints: DurableStorage = DurableStorage()
    checkpoints_secret: str = ""  # "" if the pod's service account provides the credentials
    state_bytes: int | None = None
    members: int | None = None  # None if the pods' owner determines the number
    nproc_per_node: int | str | None = None  # None if the command determines the number
    standby: int = 0
    min_members: int = 0  # 0 if not given, which means all
    warm: str = defaults.WARM_STRATEGIES[0]
    snapshot_every: int = defaults.SNAPSHOT_EVERY
    snapshot_budget: float = defaults.SNAPSHOT_BUDGET
    checkpoint_every_s: float = defaults.CHECKPOINT_EVERY_S
    keep_checkpoints: int = defaults.KEEP_CHECKPOINTS
    max_restarts: int = defaults.MAX_RESTARTS
    skip_bad_batches: bool = False
    loss_jump: float | None = None
    hang_factor: float = defaults.HANG_FACTOR
    hang_floor_s: float = 0.0  # 0 if not given
    stall_limit_s: float = defaults.STALL_LIMIT_S
    first_step_timeout_s: float = defaults.FIRST_STEP_S
    pause_timeout_s: float = defaults.PAUSE_S
    member_timeout_s: float = defaults.MEMBER_TIMEOUT_S
    grace_s: float = defaults.GRACE_S


class PodSettingsError(Exception):
    """The annotations are invalid. `problems` contains one line for each invalid key."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def _named(pattern: re.Pattern[str], expected: str) -> ValueType:
    def parse(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError
        return text

    return ValueType("word", expected, parse)


def _parse_storage(text: str) -> DurableStorage:
    if object_location.is_object_url(text):
        return DurableStorage(objects=str(object_location.parse(text)))
    scheme, _, place = text.partition("://")
    claim, _, path = place.partition("/")
    is_plain = ".." not in path.split("/") and "\0" not in path
    if scheme == "pvc" and is_plain and _SUBDOMAIN.fullmatch(claim):
        return DurableStorage(claim, path.strip("/"))
    if scheme == "hostpath" and is_plain and not claim and path.strip("/"):
        return DurableStorage(path="/" + path.strip("/"))
    raise ValueError


def _parse_state_size(text: str) -> int:
    try:
        count = int(quantity(text))
    except ValueError:
        raise ValueError from None  # without a message, so that `ValueType` uses its own
    if not 1 << 10 <= count <= 1 << 50:
        raise ValueError
    return count


_PLACES = f"pvc://CLAIM, pvc://CLAIM/PATH, hostpath:///PATH, {object_location.EXPECTED}"
_STORAGE = ValueType("storage", _PLACES, _parse_storage)
_STATE_SIZE = ValueType(
    "size", "a size of 1Ki-1Pi, such as 4Gi", _parse_state_size, "1Ki-1Pi", (1 << 10, 1 << 50)
)
_NAME = "a name of lower-case letters, digits and dashes"
POD_ANNOTATIONS = (
    Option((pod_layout.CONTAINER,), "container", _named(_LABEL, _NAME), "NAME", "",
           "container that trains, if the pod has several", "the only one"),
    Option((pod_layout.GROUP,), "group", _named(_SUBDOMAIN, _NAME), "NAME", "",
           "name of the job, for pods without an owner", "not given"),
    Option((pod_layout.CHECKPOINTS,), "checkpoints", _STORAGE, "PLACE", "",
           "durable storage for checkpoints",
           "none: no checkpoints are written, and the state is lost with the pods"),
    Option((pod_layout.CHECKPOINTS_SECRET,), "checkpoints_secret", _named(_SUBDOMAIN, _NAME), "NAME", "",
           "Secret with the sidecar's credentials for object storage, as environment variables",
           "the credentials of the pod's service account or node"),
    Option((pod_layout.STATE_SIZE,), "state_bytes", _STATE_SIZE, "SIZE", "",
           "size of the training state, which determines the memory for snapshots",
           "half of the training container's memory limit is for snapshots"),
)  # fmt: skip


def is_policy(option: Option) -> bool:
    """Return True if this option of `holdfast run` is also an annotation."""
    return option.field not in LOCAL_ONLY


def key_of(option: Option) -> str:
    """Return the key of the annotation that corresponds to `option`."""
    return pod_layout.PREFIX + option.names[0].removeprefix("--").removeprefix(pod_layout.PREFIX)


ANNOTATIONS: Mapping[str, Option] = MappingProxyType(
    {key_of(each): each for each in (*POD_ANNOTATIONS, *filter(is_policy, RUN))}
)
"""All annotations that are settings, by key, in the order of the documentation."""

_OTHER_NAMES = {
    pod_layout.PREFIX + name.removeprefix("--"): key
    for key, option in ANNOTATIONS.items()
    for name in option.names[1:]
} | {pod_layout.PREFIX + name: pod_layout.INJECT for name in ("enable", "enabled", "injection")}


def parse(annotations: Mapping[str, str]) -> PodSettings:
    """Return the settings in a pod's annotations. Annotations with other prefixes are ignored.

    Raises:
        PodSettingsError: A key is unknown or a value is invalid. Lists up to `MAX_PROBLEMS` problems.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key in sorted(each for each in annotations if each.startswith(pod_layout.PREFIX)):
        if key in _WRITTEN_BY_US:
            continue
        option = ANNOTATIONS.get(key)
        try:
            if option is None:
                raise ValueError(_unknown(key))
            values[option.field] = _value(key, annotations[key], option)
        except ValueError as error:
            problems.append(str(error))
            if len(problems) >= MAX_PROBLEMS:
                raise PodSettingsError((*problems, "further annotations were not checked")) from None
    settings = PodSettings(**values)
    if settings.hang_floor_s > settings.first_step_timeout_s:
        problems.append(
            f"{pod_layout.PREFIX}hang-floor: invalid value {span(settings.hang_floor_s)!r}: expected at most"
            f" {pod_layout.PREFIX}first-step-timeout ({span(settings.first_step_timeout_s)})"
        )
    if settings.checkpoints_secret and not settings.checkpoints.objects:
        problems.append(
            f"{pod_layout.CHECKPOINTS_SECRET}: {settings.checkpoints_secret!r} is only for object storage:"
            f" expected {pod_layout.CHECKPOINTS} to be {object_location.EXPECTED}"
        )
    if problems:
        raise PodSettingsError(tuple(problems))
    return settings


def forgotten_request(metadata: Mapping[str, Any]) -> str:
    """Return a message if a pod was apparently meant to request Holdfast, but does not; "" otherwise.

    `metadata` belongs to a pod or a pod template.
    """
    noted, labels = (_keys(metadata.get(place)) for place in ("annotations", "labels"))
    if pod_layout.INJECT in noted:
        return ""
    if pod_layout.INJECT in labels:
        return f"{pod_layout.INJECT} is set as a label, but must be an annotation"
    for key in (*noted, *labels):
        is_ours = "holdfast" in key.partition("/")[0] and key not in ANNOTATIONS and key not in _WRITTEN_BY_US
        if is_ours and _nearest(key, (pod_layout.INJECT,), 0.8):
            return f"{key}: unknown: did you mean the annotation {pod_layout.INJECT!r}?"
    known = (*ANNOTATIONS, *_WRITTEN_BY_US)
    unknown = next((key for key in noted if key.startswith(pod_layout.PREFIX) and key not in known), "")
    if unknown:
        return _unknown(unknown)
    setting = next((key for key in noted if key in ANNOTATIONS), "")
    return f'{setting} has no effect without the annotation {pod_layout.INJECT}: "true"' if setting else ""


def _keys(found: object) -> list[str]:
    return sorted(map(str, found)) if isinstance(found, Mapping) else []


def _value(key: str, text: object, option: Option) -> object:
    """Return the value of an annotation. Raises `ValueError` with a complete message for the user."""
    value_type = option.value or _FLAG
    if not isinstance(text, str):
        raise ValueError(f"{key}: invalid value {_short(text)}: expected a string: put it in quotes")
    if len(text) > MAX_VALUE:
        raise ValueError(f"{key}: invalid value {_short(text)}: it has more than {MAX_VALUE} characters")
    try:
        value = value_type.read(text)
    except ValueError as error:
        near = _nearest(text, value_type.words)
        hint = f"did you mean {near!r}? " if near else ""
        raise ValueError(f"{key}: invalid value {_short(text)}: {hint}expected {error}") from None
    return value == "true" if option.value is None else value


def _unknown(key: str) -> str:
    near = _OTHER_NAMES.get(key) or _nearest(key.replace("_", "-"), (*ANNOTATIONS, *_WRITTEN_BY_US), 0.8)
    shown = key if len(key) <= _SHOWN else f"{key[:_SHOWN]}..."
    if near:
        return f"{shown}: unknown annotation: did you mean {near!r}?"
    return f"{shown}: unknown annotation; known are {', '.join(ANNOTATIONS)}"


@lru_cache(maxsize=1024)
def _nearest(text: str, known: tuple[str, ...], cutoff: float = 0.6) -> str:
    """Return the known word that is most similar to `text`; "" if none is similar."""
    if len(text) > _SHOWN:
        return ""
    return next(iter(difflib.get_close_matches(text, known, n=1, cutoff=cutoff)), "")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def policy(settings: PodSettings, members: int, nproc: int | None = None) -> Policy:
    """Return the policy of a job of `members` pods with `nproc` ranks each.

    Without `nproc`, use the annotated number of ranks, or 1. `holdfast run` derives the same policy from the
    same options.
    """
    stated = settings.nproc_per_node
    return policy_of(settings, members, nproc or (stated if isinstance(stated, int) else 1))
