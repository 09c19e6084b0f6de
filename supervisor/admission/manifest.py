"""Inject Holdfast into the pod templates of a manifest, for clusters without Holdfast's webhook.

Without an API server, this module cannot know what the cluster would add to a pod, such as defaults or an
operator's variables. The webhook sees these additions.
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from holdfast.errors import BadInput
from supervisor.admission import injection, settings
from supervisor.admission.injection import Injected, InjectionContext, NotAsked
from supervisor.admission.pod_layout import INJECT

_SEPARATOR = re.compile(r"^---(?:[ \t]*(?:#[^\n]*)?\r?(?:\n|\Z)|(?=[ \t]))", re.MULTILINE)
_CONTENT = re.compile(r"^[ \t]*[^#%\s]", re.MULTILINE)
MAX_PARTS = 100_000  # dictionaries and lists in an object; only nested anchors lead to more
_MISSING = "PyYAML is needed to read manifests: pip install 'holdfast[cluster]'"


class NotYaml(BadInput):
    """The text is not YAML. The message says where, but does not name the file."""


@dataclass(frozen=True, slots=True)
class ManifestNote:
    """A message for the user: how one pod template was injected, or why it was not.

    Attributes:
        place: The location of the template: the kind and name of the object, and the path in it.
        text: The message.
        injected: False if the template was not injected, or its job would not train as expected.
        requested: False if the template does not request Holdfast, although it was apparently meant to.
    """

    place: str
    text: str
    injected: bool
    requested: bool = True

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


Check = Callable[[dict[str, Any], str, dict[str, Any]], str]


def inject_manifest(
    text: str, context: InjectionContext, check: Check = lambda owner, path, template: ""
) -> tuple[str, tuple[ManifestNote, ...]]:
    """Inject each pod template that requests Holdfast. Return the manifest, and notes on each template.

    `check` receives an object, the path of an injected template in it, and the template. It returns a
    problem with the job that the object describes, or "".

    A pod template is any value that has containers and whose key ends in "template", in an object of any
    kind. Documents without a template to inject are returned byte for byte. In all other documents, comments
    are lost and anchors are expanded.

    Raises:
        NotYaml: The text is not YAML.
        BadInput: PyYAML is not installed.
    """
    yaml = _yaml()
    pieces: list[str] = []
    notes: list[ManifestNote] = []
    for head, body in _documents(text):
        changed, found = _injected_document(yaml, body, context, check)
        notes += found
        is_inline = head and not head.endswith("\n")  # `--- {kind: Pod}`
        pieces.append(head + (body if changed is None else "\n" * bool(is_inline) + changed))
    return "".join(pieces), tuple(notes)


def has_template(text: str) -> bool:
    """Return True if any document of a manifest has a pod template. Raises like `inject_manifest`."""
    yaml = _yaml()
    return any(any(_templates([_loaded(yaml, body)])) for _, body in _documents(text))


def _documents(text: str) -> Iterator[tuple[str, str]]:
    """Yield each document's separator line `---` and its text. The separator of the first document can be "".

    If the text before the first `---` has only comments and directives (%YAML), it is part of that separator.
    """
    head, place = "", 0
    for match in _SEPARATOR.finditer(text):
        before = text[place : match.start()]
        if not head and not _CONTENT.search(before):
            head = before + match[0]
        else:
            yield head, before
            head = match[0]
        place = match.end()
    yield head, text[place:]


def _injected_document(
    yaml: Any, body: str, context: InjectionContext, check: Check
) -> tuple[str | None, list[ManifestNote]]:
    """Return the text of the document after injection, or None if it is unchanged, and the notes."""
    root = [_loaded(yaml, body)]
    notes: list[ManifestNote] = []
    is_changed = False
    templates = list(_templates(root))
    if not templates:
        notes += _note_without_template(root[0])
    for owner, path, holder, key in templates:
        namespace = str(_metadata(owner).get("namespace") or context.namespace)
        place = _named(owner) + path
        known = replace(context, namespace=namespace, operator_variables=_operator_variables(owner))
        result = injection.inject(holder[key], known)
        if isinstance(result, NotAsked):
            notes += _note_misplaced(owner, holder[key], place)
        elif isinstance(result, Injected):
            holder[key] = result.pod
            is_changed = is_changed or bool(result.patch)
            notes.append(ManifestNote(place, f"injected, {_ranks(result)}", injected=True))
            notes += [ManifestNote(place, each, injected=True) for each in result.notes]
            if problem := check(owner, path, result.pod):
                notes.append(ManifestNote(place, problem, injected=False))
        else:
            notes.append(ManifestNote(place, f"not injected: {result.why}", injected=False))
    if not is_changed:
        return None, notes
    written = yaml.dump(
        root[0],
        Dumper=_dumper(yaml),
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=True,
        width=110,
    )
    return str(written), notes


def _loaded(yaml: Any, body: str) -> Any:
    """Return the object that a document describes. Raises `NotYaml`."""
    try:
        return yaml.load(body, Loader=_loader(yaml))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise NotYaml(f"the manifest is not YAML: {' '.join(str(error).split())}") from None


def _ranks(result: Injected) -> str:
    count = result.record.nproc
    return f"{count} rank{'' if count == 1 else 's'} in the container {result.record.container}"


def _note_misplaced(owner: dict[str, Any], template: dict[str, Any], place: str) -> list[ManifestNote]:
    """Return a note if the template or the object around it was apparently meant to request Holdfast."""
    why = ""
    annotations = _metadata(owner).get("annotations")
    asked = annotations.get(INJECT) if isinstance(annotations, dict) else None
    if owner is not template and asked not in (None, "false"):
        why = f"{INJECT} is an annotation of the {owner.get('kind', 'object')}: move it to the pod template"
    why = why or settings.forgotten_request(_metadata(template))
    return [ManifestNote(place, f"not injected: {why}", injected=False, requested=False)] if why else []


def _note_without_template(document: Any) -> list[ManifestNote]:
    """Return a note if an object, such as a TrainJob, requests Holdfast but contains no pod template."""
    if not isinstance(document, dict) or not _asks(document, set()):
        return []
    why = "its pod template is in another object, so only the webhook can inject its pods"
    return [ManifestNote(_named(document), f"not injected: {why}", injected=False)]


def _asks(value: Any, seen: set[int]) -> bool:
    if not isinstance(value, dict | list) or id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, list):
        return any(_asks(each, seen) for each in value)
    return value.get(INJECT) == "true" or any(_asks(each, seen) for each in value.values())


def _operator_variables(owner: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the variables that an operator will add to the pods of `owner` to set the number of ranks.

    Kubeflow's training operator adds a variable that torchrun reads to the pods of a PyTorchJob. Other
    operators add theirs to pods that they create from objects without a pod template.
    """
    if owner.get("kind") != "PyTorchJob":
        return ()
    spec = owner.get("spec")
    spec = spec if isinstance(spec, dict) else {}
    elastic = spec.get("elasticPolicy")
    stated = elastic.get("nProcPerNode") if isinstance(elastic, dict) else None
    stated = spec.get("nprocPerNode", "auto") if stated is None else stated
    return (("PET_NPROC_PER_NODE", str(stated)),)


def _templates(root: list[Any]) -> Iterator[tuple[dict[str, Any], str, Any, Any]]:
    """Yield each pod template of a document, as a tuple (owner, path, holder, key).

    `owner` is the object that contains the template, at `path`. The template itself is `holder[key]`. The
    only element of `root` is the document.
    """
    document = root[0]
    if not isinstance(document, dict):
        return
    is_list = isinstance(document.get("items"), list) and str(document.get("kind", "")).endswith("List")
    holder = document["items"] if is_list else root
    for place, each in enumerate(holder):
        if _is_pod(each):
            yield each, "", holder, place
        elif isinstance(each, dict):
            yield from _below(each, each, "", (), itertools.count())


def _below(
    owner: dict[str, Any], value: Any, path: str, above: tuple[int, ...], count: Iterator[int]
) -> Iterator[tuple[dict[str, Any], str, Any, Any]]:
    """Yield the templates in `value`. An anchored object is counted at each place that refers to it."""
    if not isinstance(value, dict | list) or id(value) in above:
        return
    if next(count) >= MAX_PARTS:
        raise BadInput(f"{_named(owner)} has more than {MAX_PARTS:,} parts, counting anchors repeatedly")
    above = (*above, id(value))
    if isinstance(value, list):
        for place, each in enumerate(value):
            yield from _below(owner, each, f"{path}[{place}]", above, count)
        return
    for key, each in list(value.items()):
        inner = f"{path}.{key}" if path else f" {key}"
        if str(key).lower().endswith("template") and _has_containers(each):
            yield owner, inner, value, key
        else:
            yield from _below(owner, each, inner, above, count)


def _is_pod(value: Any) -> bool:
    return isinstance(value, dict) and value.get("kind") == "Pod" and _has_containers(value)


def _has_containers(value: Any) -> bool:
    spec = value.get("spec") if isinstance(value, dict) else None
    return isinstance(spec, dict) and isinstance(spec.get("containers"), list)


def _named(owner: dict[str, Any]) -> str:
    """Return the kind and name of an object, for notes."""
    metadata = _metadata(owner)
    name = metadata.get("name") or metadata.get("generateName") or ""
    return f"{owner.get('kind', 'object')} {name}".strip()


def _metadata(owner: dict[str, Any]) -> dict[str, Any]:
    found = owner.get("metadata")
    return found if isinstance(found, dict) else {}


def _yaml() -> Any:
    try:
        return importlib.import_module("yaml")  # installed with `kubernetes`; `holdfast run` does not need it
    except ModuleNotFoundError:
        raise BadInput(_MISSING) from None


def _loader(yaml: Any) -> Any:
    """Return a loader that reads dates as strings, as Kubernetes does."""
    resolvers = {
        first: [each for each in known if each[0] != "tag:yaml.org,2002:timestamp"]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    return type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": resolvers})


def _dumper(yaml: Any) -> Any:
    """Return a dumper that writes multi-line strings as blocks, and writes no anchors."""
    found = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})
    found.add_representer(str, _represent)  # type: ignore[attr-defined]
    return found


def _represent(dumper: Any, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
