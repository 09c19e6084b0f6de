"""The rights of each role, as the tables in docs/kubernetes.md and docs/node-agent.md state them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "kubernetes.md"
HEAD = "| verb | resource | where | supervisor | webhook | view | edit |"
AGENTS_PAGE = DOCS / "node-agent.md"
AGENTS_HEAD = "| verb | resource | where | nodeagent |"
_RESOURCE = re.compile(r"`([^`]+)`(?: named `([^`]+)`)?")


class DocumentedRight(NamedTuple):
    """One cell. `where` is any (namespace), own (the namespace of Holdfast) or cluster."""

    role: str
    verb: str
    resource: str  # with the subresource, such as `pods/eviction`
    group: str
    name: str
    where: str
    allowed: bool


def documented_rights() -> Iterator[DocumentedRight]:
    yield from _rights_in(PAGE, HEAD)
    yield from _rights_in(AGENTS_PAGE, AGENTS_HEAD)


def _rights_in(page: Path, head: str) -> Iterator[DocumentedRight]:
    lines = page.read_text().splitlines()
    roles = [each.strip() for each in head.strip("|").split("|")][3:]
    for line in lines[lines.index(head) + 2 :]:
        if not line.startswith("|"):
            return
        verbs, resources, where, *answers = (each.strip() for each in line.strip("|").split("|"))
        for (path, name), verb in ((r, v) for r in _RESOURCE.findall(resources) for v in verbs.split(", ")):
            whole, _, subresource = path.partition("/")
            resource, _, group = whole.partition(".")
            resource += f"/{subresource}" if subresource else ""
            for role, answer in zip(roles, answers, strict=True):
                yield DocumentedRight(
                    role, verb, resource, group, name, where, {"yes": True, "no": False}[answer]
                )
