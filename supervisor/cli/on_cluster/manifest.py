"""`holdfast inject-manifest`: add Holdfast to the pod templates of a manifest, without a cluster."""

from __future__ import annotations

import sys
from pathlib import Path

from holdfast.errors import BadInput
from holdfast.version import __version__
from supervisor.admission import pod_layout
from supervisor.admission.injection import InjectionContext
from supervisor.admission.manifest import has_template, inject_manifest
from supervisor.cli import commands
from supervisor.cluster.adoption import template_check
from supervisor.display.screen import Unwritable

_NOTHING = (
    f'no pod template requests Holdfast: add the annotation {pod_layout.INJECT}: "true" to the metadata of'
    " the template"
)
_EXPECTED = "expected the manifest of a Pod, or of an object that contains a pod template, such as a Job"


def show(command: commands.InjectManifest) -> int:
    """Print the injected manifest, and notes on stderr. Return the exit code.

    Raises:
        BadInput: The file cannot be read, is not YAML, or has no pod template, or PyYAML is not installed.
        Unwritable: The output cannot be written.
    """
    given = _read(command.file)
    text, notes = inject_manifest(given, InjectionContext(command.image, __version__), template_check.problem)
    name = "standard input" if command.file == "-" else command.file
    if not notes and not has_template(given):
        raise BadInput(f"{name}: no pod template: {_EXPECTED}")
    for note in notes or (_NOTHING,):
        sys.stderr.write(f"holdfast: {name}: {note}\n")
    _write(text)
    return 0 if all(each.injected for each in notes) else 1


def _read(name: str) -> str:
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        why = error.strerror or str(error)
        raise BadInput(f"manifest {name!r} cannot be read: {why}; give a YAML file, or -") from None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise BadInput(f"manifest {name!r} is not text in UTF-8: give a YAML file, or -") from None


def _write(text: str) -> None:
    """Write the manifest byte for byte, to leave the parts that were not injected unchanged."""
    try:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Unwritable(f"the output cannot be written: {error.strerror or error}") from None
