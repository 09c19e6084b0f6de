"""Every name in backticks in docstrings and comments exists in the code."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import keyword
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.unit.literals import ROOT
from tests.unit.test_docstrings import trees

_ATTRIBUTE = re.compile(r"`([A-Z]\w*[a-z]\w*)\.([a-z_]\w*)`")  # of a class
_NAME = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?`")
_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]+")
_COMMENT = re.compile(r"(?:^ *|  )#:? (.*)")
_SUFFIX = re.compile(r"(?:_at)?_(?:ns|s)")  # suffixes of names, in sentences about units

# Names of other projects. Any name of `torch` and `numpy` is accepted: the unit tests do not import them.
LIBRARIES = frozenset({"torch", "numpy"})
FOREIGN = frozenset(
    {
        *("ps", "cmdline"),  # a command; a file of /proc
        "create_server",  # of asyncio's event loop
        *("num_workers", "pin_memory", "worker_init_fn"),  # parameters of torch's DataLoader
        *("LambdaLR", "optimizer.step", "work.wait", "bn.eval"),  # objects of torch
        "Disabled",  # a state of an InfiniBand port
        "Path.exists",
    }
)
# The objects of the public API, by their names in the docs.
OBJECTS = {"session": "Session", "state": "State"}
# Values that are derived from names, as by `nodeagent.model.word`, or that occur in data files.
VALUES = frozenset({"reset_gpu", "gpu_state"})


@dataclass(frozen=True, slots=True)
class _File:
    """`variables`: names that are no module or class of the product here. `words`: all names and literals."""

    top: frozenset[str]
    variables: set[str]
    words: set[str]


@dataclass(frozen=True, slots=True)
class _Product:
    texts: dict[str, list[tuple[int, str]]] = field(default_factory=dict)  # docstrings and comments, by path
    files: dict[str, _File] = field(default_factory=dict)  # by dotted module name
    stems: set[str] = field(default_factory=set)  # the parts of the dotted names
    classes: dict[str, set[str]] = field(default_factory=dict)  # the attributes, inherited ones among them
    bases: dict[str, set[str]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)  # all defined names, and all parameters
    literals: set[str] = field(default_factory=set)  # the words of them, and the names of files

    def find(self, place: str, name: str) -> bool:
        """True if `name`, written in the module `place`, names something."""
        parts = name.split(".")
        if name in FOREIGN or name in VALUES or parts[0] in LIBRARIES:
            return True
        return self._find_single(place, name) if len(parts) == 1 else self._find_dotted(place, parts)

    def _find_single(self, place: str, name: str) -> bool:
        known = hasattr(builtins, name) or keyword.iskeyword(name) or name in sys.stdlib_module_names
        if known or name in self.files[place].words or _SUFFIX.fullmatch(name):
            return True
        if _CONSTANT.fullmatch(name):
            return False  # the same name may mean something else in another module
        return name in self.names or name in self.stems

    def _find_dotted(self, place: str, parts: Sequence[str]) -> bool:
        head = parts[0] if self._in_module(parts) else OBJECTS.get(parts[0], parts[0])
        if ".".join(parts) in self.literals or self._in_stdlib(parts) or self._in_module(parts):
            return True
        if head in self.classes:
            return len(parts) == 2 and parts[1] in self.classes[head]
        return head in self.files[place].variables and all(part in self.names for part in parts[1:])

    def _in_module(self, parts: Sequence[str]) -> bool:
        for count in range(1, len(parts) + 1):
            tail, rest = "." + ".".join(parts[:count]), parts[count:]
            for module in (each for each in self.files if f".{each}".endswith(tail)):
                if not rest or (len(rest) == 1 and rest[0] in self.files[module].top):
                    return True
                if len(rest) == 2 and rest[0] in self.files[module].top and rest[0] in self.classes:
                    return rest[1] in self.classes[rest[0]]
        return False

    @staticmethod
    def _in_stdlib(parts: Sequence[str]) -> bool:
        if parts[0] not in sys.stdlib_module_names:
            return False
        try:
            functools.reduce(getattr, parts[1:], importlib.import_module(parts[0]))
        except AttributeError:
            return False
        return True


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield each comment of `source`, joined over all its lines, with the number of its first line."""
    block: list[str] = []
    first = last = -1
    for number, line in enumerate(source.splitlines(), 1):
        if found := _COMMENT.search(line):
            if number != last + 1:
                yield first, " ".join(block)
                block, first = [], number
            block.append(found[1])
            last = number
    yield first, " ".join(block)


def _names_defined(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return (node.name,)
    if isinstance(node, ast.arg):
        return (node.arg,)
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return (node.id if isinstance(node, ast.Name) else node.attr,)
    return ()


def _names_used(node: ast.AST) -> Sequence[str]:
    """Return names and the words of literals."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return (node.attr,)
    if isinstance(node, ast.keyword):
        return (node.arg or "",)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
        text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
        return re.findall(r"\w+", text)
    return ()


def _names_imported(node: ast.AST) -> list[str]:
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return []
    return [(each.asname or each.name).split(".")[0] for each in node.names]


def _top(tree: ast.Module) -> Iterator[str]:
    for statement in tree.body:
        inside = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for node in (statement,) if inside else ast.walk(statement):
            yield from _names_defined(node)
            yield from _names_imported(node)


def _bases(node: ast.ClassDef) -> Iterator[str]:
    for base in node.bases:
        name = base.value if isinstance(base, ast.Subscript) else base
        yield name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "")


@functools.cache
def product() -> _Product:
    found = _Product()
    for place, tree in trees():
        _add(found, place, tree)
    for folder in {place.split("/")[0] for place in found.texts}:
        found.literals.update(file.name for file in (ROOT / folder).rglob("*.*"))
    for _ in range(4):  # as deep as classes derive from each other
        for name, parents in found.bases.items():
            found.classes[name].update(*(found.classes.get(parent, ()) for parent in parents))
    return found


def _add(found: _Product, place: str, tree: ast.Module) -> None:
    nodes = list(ast.walk(tree))
    docs = {
        id(node.value): (node.lineno, str(node.value.value))
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    defined = {name for node in nodes for name in _names_defined(node)}
    imported = {name for node in nodes for name in _names_imported(node)}
    used = {name for node in nodes if id(node) not in docs for name in _names_used(node)}
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            attributes = found.classes.setdefault(node.name, set())
            attributes.update(name for inner in ast.walk(node) for name in _names_defined(inner))
            found.bases.setdefault(node.name, set()).update(_bases(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            found.literals.update(node.value.split())
    module = module_of(place)
    found.files[module] = _File(frozenset(_top(tree)), defined - imported, defined | imported | used)
    found.stems.update(module.split("."))
    found.names.update(defined)
    found.texts[place] = [*docs.values(), *comments((ROOT / place).read_text())]


def module_of(place: str) -> str:
    return place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def missing(module: str, text: str) -> list[str]:
    return [name for name in _NAME.findall(text) if not product().find(module, name)]


def test_every_name_in_backticks_in_docstrings_and_comments_exists() -> None:
    wrong = [
        f"{path}:{line} `{name}`"
        for path, texts in product().texts.items()
        for line, text in texts
        for name in missing(module_of(path), text)
    ]
    assert wrong == []


def missing_attributes(text: str) -> list[str]:
    """Return the attributes of classes in `text` that do not exist. Other projects' classes do not count."""
    return [
        f"{name}.{attribute}"
        for name, attribute in _ATTRIBUTE.findall(text)
        if attribute not in product().classes.get(name, ())
    ]


def test_every_attribute_of_a_class_that_the_docs_name_exists() -> None:
    pages = {path.name: path.read_text() for path in (ROOT / "docs").rglob("*.md")}
    assert any(_ATTRIBUTE.search(text) for text in pages.values())
    wrong = {name: found for name, text in pages.items() if (found := missing_attributes(text))}
    assert wrong == {}
    assert missing_attributes("`Policy.gone` and `Gone.nproc`, unlike `Policy.nproc`.") == [
        *("Policy.gone", "Gone.nproc"),
    ]


def test_a_missing_name_is_detected() -> None:
    place = "supervisor.view.model"
    assert missing(place, "As `closing.last_line` says; `Policy.gone`, `GONE`; `gone_too`.") == [
        *("closing.last_line", "Policy.gone", "GONE", "gone_too"),
    ]
    assert missing(place, "`closing.summary`, `Policy.nproc`, `sys.exit`, `supervisor.view.members`") == []


def test_a_comment_of_several_lines_is_read_as_one() -> None:
    assert (1, "see `a.b`") in list(comments("# see\n# `a.b`\nx = 1\n"))
