"""Parses the command line of `holdfast node`.

Reports a mistake in one line with the name, the value and the accepted values.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from holdfast.errors import BadInput
from nodeagent.cli.explanations import SUBJECTS
from nodeagent.kernel import kmsg
from nodeagent.policy.validation import close_match
from nodeagent.publishing.node_object import ACCOUNT
from nodeagent.sensing.baselines import BASELINES
from nodeagent.sensing.small_files import PROCFS, SYSFS

PORT = 9465
LISTEN = f"127.0.0.1:{PORT}"
# Variables that a pod sets from the downward API (`spec.nodeName`) and from a template.
NODE_NAME, PROVIDER_ID = "NODE_NAME", "NODE_PROVIDER_ID"
# Variables that the kubelet sets in every pod.
API_HOST, API_PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
POLICY_FILE = Path("/etc/holdfast/node.toml")
ROOT_STATE = Path("/var/lib/holdfast/node")
PODS_STATES = Path("/var/lib/holdfast/nodes")  # the agents in pods have one folder for each node here
LOGS = ("auto", "kmsg", "journal", "none")

# The names that other tools give to these options.
_OTHER_SPELLINGS = {"--port": "--listen", "--address": "--listen", "--format": "--json", "--reason": "--why"}
_SOME_GPU = "gpu/0000:00:00.0"  # of an injected Xid, unless --entity is given

_EPILOG = """\
examples
  holdfast node check                     look once: a table; 0 healthy, 1 degraded, 2 unhealthy, 3 unknown
  holdfast node serve                     run as a service: /healthz /readyz /metrics /v1/health /v1/events
  holdfast node explain xid 79            its meaning, source and remedy
  holdfast node history --limit 20        findings raised and cleared, including those before a restart
"""


# Messages of argparse.
_MISSING = re.compile(r"the following arguments are required: (?P<names>.+)")
_CHOICE = re.compile(r"argument (?P<name>\S+): invalid choice: (?P<value>.+) \(choose from (?P<choices>.+)\)")
_VALUE = re.compile(r"argument (?P<name>\S+): (?P<value>.+), (?P<rest>expected .+)")
_LACKS = re.compile(r"argument (?P<name>\S+): expected one argument")


class _Parser(argparse.ArgumentParser):
    """Names the command, the option or argument, the value, and what is expected, in each error message."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{self.prog.removeprefix('holdfast ')}: {self._in_words(message)}")

    def _in_words(self, message: str) -> str:
        if found := _MISSING.fullmatch(message):
            first = found["names"].split(", ")[0]
            return f"missing {first}: expected {self._described(first)}"
        if found := _CHOICE.fullmatch(message):
            allowed = found["choices"].replace("'", "").split(", ")
            close = close_match(found["value"].strip("'"), allowed)
            hint = f"did you mean {close!r}? " if close else ""
            return f"invalid value {found['value']} for {found['name']}: {hint}expected {_either(allowed)}"
        if found := _VALUE.fullmatch(message):
            return f"invalid value {found['value']} for {found['name']}: {found['rest']}"
        if found := _LACKS.fullmatch(message):
            return f"missing value for {found['name']}: expected {self._described(found['name'])}"
        return message

    def _described(self, name: str) -> str:
        """Return what the option or argument `name` accepts: its choices, or else its help."""
        for action in self._actions:
            if name in (action.dest, action.metavar, "/".join(action.option_strings)):
                return _either([*map(str, action.choices or ())]) or action.help or name
        return name


def _either(words: Sequence[str]) -> str:
    """Return "a, b or c"."""
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options; `command` is the command's name.

    Raises:
        BadInput: the command line is invalid; the message has one line.
        SystemExit: help was requested and has been printed.
    """
    parser, commands = _parser()
    if not argv:
        argv = ["--help"]
    if not argv[0].startswith("-") and argv[0] not in commands:
        raise BadInput(f"node: unknown command {argv[0]!r}{_near(argv[0], commands, 'commands')}")
    if argv[0] == "explain" and len(argv) > 1 and argv[1].isdecimal():
        code = argv[1][:20]
        raise BadInput(f"node explain: missing SUBJECT: did you mean `holdfast node explain xid {code}`?")
    found, unknown = parser.parse_known_args(list(argv))
    if unknown:
        names = [each for action in commands[found.command]._actions for each in action.option_strings]
        known = [each for each in names if each not in ("-h", "--help")]
        what = unknown[0].partition("=")[0]
        raise BadInput(f"node {found.command}: {_unknown(what)} {what!r}{_near(what, known, 'options')}")
    if found.command == "inject" and found.kind == "sample" and not found.entity:
        which = "expected the entity that the check is about, such as gpu/0000:3b:00.0, node or disk//"
        raise BadInput(f"node inject: missing --entity for sample {found.value!r}: {which}")
    if found.command == "inject":
        found.entity = found.entity or _SOME_GPU
    if getattr(found, "publish", False):
        _check_publishing(found)
    return found


def _unknown(word: str) -> str:
    return "unknown option" if word.startswith("-") else "unexpected argument"


def _check_publishing(found: argparse.Namespace) -> None:
    """Raise BadInput unless the options say which Node object to write, and where."""
    if not found.node_name:
        raise BadInput(f"--publish: the node's name is unknown: expected --node-name, or ${NODE_NAME}")
    if found.api_server is None:
        raise BadInput(f"--publish: the API server is unknown: expected --api-server, or ${API_HOST}")


def _near(word: str, known: Sequence[str] | dict[str, _Parser], what: str) -> str:
    """Return the end of a message about the unknown `word`: the name that is probably meant, or all names."""
    meant = _OTHER_SPELLINGS.get(word, "")
    close = meant if meant in known else close_match(word, known, 0.8 if word.startswith("--") else 0.5)
    return f": did you mean {close!r}?" if close else f"; {what} are {', '.join(known)}"


def _parser() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(
        prog="holdfast node",
        description="Watch the GPUs and the host of this node; report what fails, and what to do about it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    place = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True, parser_class=_Parser
    )
    made: dict[str, _Parser] = {}
    for name, (text, about) in _COMMANDS.items():
        said = f"{text[0].upper()}{text[1:]}. {about}".strip()
        made[name] = place.add_parser(name, help=text, description=said)
    _looking(made["check"], made["watch"], made["serve"])
    _records(made["history"], made["clear"], made["forget"])
    _releasing(made["release"])
    _injecting(made["inject"])
    made["explain"].add_argument("subject", metavar="SUBJECT", choices=SUBJECTS, help=_either(SUBJECTS))
    made["explain"].add_argument(
        "code", metavar="CODE", help="a number such as 79, or the name of a check or kernel line"
    )
    _shared(made)
    return parser, made


_COMMANDS = {
    "check": (
        "look once and print a table",
        "Exit code: 0 healthy, 1 degraded, 2 unhealthy, 3 if nothing is degraded or unhealthy but"
        " something could not be evaluated or the check failed, 64 for bad usage or a missing package. The"
        " exit code is the verdict even if the output cannot be written.",
    ),
    "watch": ("watch and print changes, until Ctrl-C", ""),
    "serve": (
        "run as a service with an HTTP API",
        "The service exits within 2 s of SIGTERM, even if sensors hang.",
    ),
    "history": ("print the findings raised, changed and cleared on this node", ""),
    "inject": (
        "inject an observation into a running `serve --test`",
        "An agent that runs without `--test` refuses the observation.",
    ),
    "explain": ("print the meaning, the source and the remedy of a code or a check", ""),
    "clear": ("declare one entity healthy and clear its findings", ""),
    "release": (
        "make the running agent close NVML for a while, so that a GPU can be reset or the driver replaced",
        "The command returns once the agent has closed NVML. With `--end`, the agent opens NVML again. The"
        " exit code is 1 if NVML is not closed or no agent is running, and 2 if the state folder does not"
        " exist.",
    ),
    "forget": (
        "forget what the agent has learned about this node's hardware, after an intended change",
        "; ".join(f"{name}: {what}" for name, what in BASELINES.items()) + ".",
    ),
}


def _looking(check: _Parser, watch: _Parser, serve: _Parser) -> None:
    check.add_argument(
        "--for",
        dest="for_s",
        type=_SECONDS,
        default=2.0,
        metavar="TIME",
        help="how long to look, such as 10, 10s or 2m (2s)",
    )
    serve.add_argument(
        "--listen",
        type=_address,
        default=LISTEN,
        metavar="HOST:PORT",
        help=f"address of the HTTP API ({LISTEN})",
    )
    serve.add_argument(
        "--probe-listen",
        type=_address,
        default=None,
        metavar="HOST:PORT",
        help="a separate address that serves only /healthz and /readyz (default: none)",
    )
    serve.add_argument(
        "--test",
        action="store_true",
        help="accept `holdfast node inject` and kernel lines from user space; uses a separate state folder",
    )
    _publishing(serve)
    check.add_argument(
        "--allow-blind",
        action="store_true",
        help="exit with 0 even if a sensor is blind, provided that nothing else is wrong; a saved state that"
        " cannot be read still counts as not evaluated",
    )
    for each in (check, watch, serve):
        _sensors(each)
        _identity(each)


def _publishing(serve: _Parser) -> None:
    serve.add_argument(
        "--publish",
        action="store_true",
        help="write the node's health to its Node object in the cluster, as the conditions GpuHealthy and"
        " TrainingNodeHealthy and as annotations; needs the node's name and permission to patch nodes/status",
    )
    serve.add_argument(
        "--api-server",
        type=_address,
        default=_api_server(),
        metavar="HOST:PORT",
        help=f"with --publish: the cluster's API server (default: ${API_HOST}:${API_PORT}, set in every pod)",
    )
    serve.add_argument(
        "--service-account",
        type=Path,
        default=ACCOUNT,
        metavar="DIR",
        help=f"with --publish: the folder with token and ca.crt, which are read for each write ({ACCOUNT})",
    )


def _api_server() -> str | None:
    host = os.environ.get(API_HOST)
    return f"{host}:{os.environ.get(API_PORT, '443')}" if host else None


def _records(history: _Parser, clear: _Parser, forget: _Parser) -> None:
    history.add_argument(
        "--limit", type=_COUNT, default=50, metavar="N", help="how many of the newest changes to print (50)"
    )
    clear.add_argument("entity", metavar="ENTITY", help="the entity, as in `node check`: gpu/0000:3b:00.0")
    forget.add_argument(
        "baseline",
        metavar="BASELINE",
        choices=tuple(BASELINES),
        help=f"what to forget: {_either(tuple(BASELINES))}",
    )
    forget.add_argument(
        "--entity",
        default="",
        help="forget it only for this entity, such as gpu/0000:3b:00.0 (default: all entities)",
    )
    for each in (clear, forget):
        each.add_argument("--why", default="", help="the reason, kept in the record")
    for each in (history, clear, forget):
        each.add_argument("--test", action="store_true", help="use the state directory of `serve --test`")


def _releasing(release: _Parser) -> None:
    release.add_argument(
        "--for",
        dest="for_s",
        type=_SECONDS,
        default=600.0,
        metavar="TIME",
        help="how long NVML stays closed, such as 90s or 10m (10m)",
    )
    release.add_argument("--end", action="store_true", help="end the release now")
    release.add_argument("--why", default="", help="the reason, kept in the record")
    release.add_argument("--test", action="store_true", help="use the state directory of `serve --test`")


def _injecting(inject: _Parser) -> None:
    inject.add_argument(
        "kind",
        metavar="KIND",
        choices=("xid", "kernel", "sample"),
        help="xid, kernel or sample: a GPU's Xid, a kernel line, or a check's sample",
    )
    inject.add_argument("value", metavar="VALUE", help="the code, the line, or CHECK=VALUE")
    inject.add_argument(
        "--entity",
        default="",
        help="the entity: gpu/0000:3b:00.0, node, disk//, ... (needed for a sample; default for an Xid:"
        f" {_SOME_GPU})",
    )
    inject.add_argument(
        "--to", type=_address, default=LISTEN, metavar="HOST:PORT", help=f"address of the agent ({LISTEN})"
    )


def _shared(made: dict[str, _Parser]) -> None:
    policy = f"the operator's TOML file ({POLICY_FILE} if it exists)"
    for name in ("check", "watch", "serve", "explain"):
        made[name].add_argument("--policy", type=Path, default=None, metavar="FILE", help=policy)
    folder = state_folder()
    for name in ("check", "watch", "serve", "history", "clear", "forget", "release"):
        made[name].add_argument(
            "--state-dir",
            type=Path,
            default=folder,
            metavar="DIR",
            help=f"the folder of the agent's saved state ({folder})",
        )
    for name in ("check", "watch", "history", "explain"):
        made[name].add_argument("--json", action="store_true", help="print JSON")


def _sensors(parser: _Parser) -> None:
    parser.add_argument(
        "--kernel-log",
        choices=LOGS,
        default="auto",
        help="source of kernel lines (auto: kmsg if it is readable, otherwise the journal)",
    )
    parser.add_argument(
        "--kmsg", type=Path, default=kmsg.PATH, metavar="PATH", help=f"the kernel log ({kmsg.PATH})"
    )
    parser.add_argument(
        "--journal-dir",
        type=Path,
        default=None,
        metavar="DIR",
        help="in a container: where the host's journal is mounted",
    )
    parser.add_argument("--sys", type=Path, default=SYSFS, metavar="DIR", help=f"sysfs ({SYSFS})")
    parser.add_argument("--proc", type=Path, default=PROCFS, metavar="DIR", help=f"procfs ({PROCFS})")
    parser.add_argument(
        "--root",
        type=Path,
        default=None,
        metavar="DIR",
        help="in a container: where the host's file systems are mounted",
    )
    parser.add_argument(
        "--ib-ports",
        type=_COUNT,
        default=None,
        metavar="N",
        help="number of InfiniBand ports that must be present and up (default: the ports that were up)",
    )
    parser.add_argument(
        "--ib-gbps",
        type=_RATE,
        default=None,
        metavar="X",
        help="rate in Gb/s that each InfiniBand port must have (default: the port's best rate so far)",
    )
    parser.add_argument(
        "--gpus",
        type=_COUNT,
        default=None,
        metavar="N",
        help="number of GPUs that must be present (default: the most seen so far)",
    )


def _identity(parser: _Parser) -> None:
    parser.add_argument(
        "--node-name",
        default=os.environ.get(NODE_NAME, ""),
        metavar="NAME",
        help=f"the node's name in the cluster (default: ${NODE_NAME}, otherwise the host name)",
    )
    parser.add_argument(
        "--provider-id",
        default=os.environ.get(PROVIDER_ID, ""),
        metavar="ID",
        help=f"the node's spec.providerID (default: ${PROVIDER_ID}, otherwise empty)",
    )


def state_folder() -> Path:
    """Return the default folder of the saved state: the system's for root, otherwise the user's."""
    if os.geteuid() == 0:
        return ROOT_STATE
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(base) / "holdfast/node"


def _number(kind: Callable[[str], float], least: float, most: float, what: str) -> Callable[[str], float]:
    """Return a parser of numbers from `least` to `most`, described by `what`."""

    def parsed(text: str) -> float:
        try:
            value = kind(text)
        except (ValueError, KeyError):
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r}, expected {least:g} to {most:g} {what}".strip())
        return value

    return parsed


_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def _seconds(text: str) -> float:
    number = text.rstrip("mhs")
    return float(number) * _UNITS_S[text[len(number) :] or "s"]


_SECONDS = _number(_seconds, 0.1, 3600, "seconds: 10, 10s, 2m")
_RATE = _number(float, 1, 10_000, "Gb/s")
_COUNT = _number(int, 1, 100_000, "in whole numbers")


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    try:
        is_host = host == "localhost" or bool(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        is_host = False
    if not (is_host and port.isascii() and port.isdecimal() and int(port[:6]) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r}, expected an IP address and a port: {LISTEN}")
    return text


def split(address: str) -> tuple[str, int]:
    """Return host and port of an address that `--listen` accepts."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
