"""`holdfast inject-manifest`: add Holdfast to the pod templates of a manifest, without a cluster."""

from __future__ import annotations

import sys
from pathlib import Path

from holdfast import exit_codes
from holdfast.errors import BadInput
from holdfast.version import __version__
from supervisor.admission import pod_layout
from supervisor.admission.injection import InjectionContext
from supervisor.admission.manifest import NotYaml, has_template, inject_manifest
from supervisor.cli import command_options
from supervisor.cluster.adoption import template_check
from supervisor.display.screen import Unwritable

_NOTHING = (
    f'no pod template requests Holdfast: add the annotation {pod_layout.INJECT}: "true" to the metadata of'
    " the template"
)
_EXPECTED = "expected the manifest of a Pod, or of an object that contains a pod template, such as a Job"


def show(command: command_options.InjectManifest) -> int:
    """Print the injected manifest, and notes on stderr. Return the exit code.

    If no template requests Holdfast, nothing is printed, because the output may be piped to `kubectl apply`,
    and the job would then train unprotected.

    Raises:
        BadInput: The file cannot be read, is not YAML, or has no pod template that requests Holdfast, or
            PyYAML is not installed.
        Unwritable: The output cannot be written.
    """
    given = _read(command.file)
    name = "standard input" if command.file == "-" else command.file
    try:
        text, notes = inject_manifest(
            given, InjectionContext(command.image, __version__), template_check.problem
        )
    except NotYaml as error:
        raise BadInput(f"{name}: {error}") from None
    if not notes:
        raise BadInput(
            f"{name}: {_NOTHING}" if has_template(given) else f"{name}: no pod template: {_EXPECTED}"
        )
    for note in notes:
        sys.stderr.write(f"holdfast: {name}: {note}\n")
    if not any(each.requested for each in notes):
        return exit_codes.BAD_INPUT
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
