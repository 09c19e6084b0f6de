"""The commands of `holdfast node`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import floor
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from holdfast import exit_codes
from holdfast.errors import BadInput
from nodeagent import model
from nodeagent.agent import claim, saved_state
from nodeagent.agent.agent import Agent, Note
from nodeagent.agent.missed import MissedObservations
from nodeagent.cli import assembly, explanations, output, rendering
from nodeagent.cli.assembly import AgentParts
from nodeagent.cli.disk_calls import DiskCall, NoAnswer
from nodeagent.cli.options import PODS_STATES, ROOT_STATE, split, state_folder
from nodeagent.model import Observation
from nodeagent.policy.validation import close_match
from nodeagent.sensing import baselines, operator_requests
from nodeagent.sensing import clock as clocks
from nodeagent.sensing.releases import GpuRelease
from nodeagent.sensing.small_files import printable
from nodeagent.server import footprint, report
from nodeagent.server.event_log import EventLog
from nodeagent.server.injected_observations import observation_injector
from nodeagent.sysfs.sensor import SysfsSensor

if TYPE_CHECKING:  # the other commands do not load the server
    from aiohttp import web
    from prometheus_client.registry import Collector

    from nodeagent.publishing.publisher import NodePublisher
    from nodeagent.server.retrying import RetryingServer

T = TypeVar("T")
HARD_STOP_S = 1.5  # the longest time from SIGTERM to the exit, even if sensors hang
DRAIN_S = 0.3  # after everything is saved: how long to wait until stdout has been read
ASK_S = 5.0
CODES = {"healthy": 0, "degraded": 1, "unhealthy": 2, report.UNKNOWN: exit_codes.NOT_JUDGED}  # for `check`
HAND_OVER_S = 10.0  # limit for the save after a disk that hung has answered
CLOSE_S = 30.0  # limit for the agent to close NVML, which takes about 10 s, or more if a call is slow
NOT_CLOSED = 1
TESTS = "test"  # the folder that `serve --test` uses within the state folder


def check(options: argparse.Namespace) -> int:
    """Observe for a while, print the health, and exit with the code of the worst level."""
    parts = _parts_of_reader(options, quick_s=options.for_s)
    agent = _agent(parts, lambda _: None)
    began_s = parts.clock.now_s()
    agent.watch(parts.sensors)
    until = time.monotonic() + options.for_s
    while time.monotonic() < until or (
        not agent.published.ready and time.monotonic() < until + options.for_s
    ):
        agent.inbox.wait(min(0.2, max(0.01, until - time.monotonic())))
        agent.run_cycle()
    agent.close()
    undecided = agent.evaluator.undecided(began_s)
    found = report.check_report(
        agent.published, parts.about(), undecided, options.for_s,
        unread=agent.problems, allow_blind=options.allow_blind,
    )  # fmt: skip
    code = CODES[found["level"]]
    try:
        _show_health(found, options.json)
    except BrokenPipeError:
        pass  # the reader has seen enough
    except Exception as error:  # the verdict is known, and a script acts on the exit code
        with suppress(OSError):
            sys.stderr.write(f"holdfast: the node is {found['level']}, but {error}\n")
    _exit(code)


def _show_health(found: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        output.show(json.dumps(found, indent=2))
    else:
        output.show(*rendering.render_health(found, colour=output.has_colour()))


def watch(options: argparse.Namespace) -> int:
    """Watch the node and print each change as it happens, until Ctrl-C."""
    parts = _parts_of_reader(options)

    def report_changes(found: Sequence[Mapping[str, Any]]) -> None:
        for each in found:
            output.show(
                json.dumps(each)
                if options.json
                else rendering.render_change(each, colour=output.has_colour())
            )

    agent = _agent(parts, report_changes)
    _handle_signals(agent)
    agent.watch(parts.sensors)
    ready = threading.Thread(target=_print_when_ready, args=(agent, parts, options.json), daemon=True)
    ready.start()
    agent.run()
    _exit(0)


def serve(options: argparse.Namespace) -> int:
    """Watch the node and serve the HTTP API until SIGTERM."""
    footprint.share_heap()
    with footprint.without_unused_tables():
        from nodeagent.server import http_api

    if options.test:
        options.state_dir = options.state_dir / TESTS
    parts = assembly.assemble(options, keeps=True, trusting=options.test)

    log = EventLog(output.write)

    def report_changes(found: Sequence[Mapping[str, Any]]) -> None:
        for each in found:
            log.write({"event": "finding", **each})

    agent = _agent(parts, report_changes, log.write)
    inject = None
    if options.test:
        inject = observation_injector(agent.inbox, parts.policy, parts.lines, parts.clock.now_s)
    publisher = _publisher(agent, parts, options, log.write) if options.publish else None
    served = http_api.application(
        lambda: agent.published, parts.about, parts.clock.now_s, inject, _publishing_metrics(publisher)
    )
    servers = {"listen": _start_server("--listen", served, options.listen, log.write)}
    if options.probe_listen is not None:
        probes = http_api.probes(lambda: agent.published, parts.clock.now_s)
        servers["probe_listen"] = _start_server("--probe-listen", probes, options.probe_listen, log.write)
    agent.more_problems = lambda: tuple(each.problem for each in servers.values() if each.problem)
    _handle_signals(agent)
    if parts.policy_file is not None:
        reread = parts.policy_file.ask
        signal.signal(signal.SIGHUP, lambda _signum, _frame: reread())
    addresses = {name: each.address for name, each in servers.items() if each.address}
    log.write({"event": "serving", **addresses, **parts.about()})
    for each in agent.more_problems():
        log.write({"event": "listen_problem", "why": each})
    for each in parts.problems:
        log.write({"event": "memory_problem", "why": each})
    if parts.disk_answers is not None:
        _end_once_the_disk_answers(agent, parts, parts.disk_answers)
    agent.watch(parts.sensors)
    if publisher is not None:
        publisher.start()
    agent.run()
    if publisher is not None and not agent.superseded:  # its successor publishes
        publisher.stop()
    for server in servers.values():
        server.stop()
    if agent.superseded:
        log.write({"event": "superseded", "why": f"another agent has taken over {options.state_dir}"})
    if parts.disk_answers is not None and parts.disk_answers.is_set():
        if problem := _hand_over(agent, parts, options.state_dir):
            log.write({"event": "memory_problem", "why": problem})
        log.write({"event": "restart_needed", "why": f"{options.state_dir} answers again"})
    log.drain(DRAIN_S)
    # The threads of the sensors and stdout may hang in calls that cannot be ended.
    os._exit(exit_codes.BAD_INPUT if agent.superseded else 0)


def _publisher(
    agent: Agent, parts: AgentParts, options: argparse.Namespace, note: Callable[[Note], None]
) -> NodePublisher:
    from nodeagent.publishing.node_object import NodeObject
    from nodeagent.publishing.publisher import NodePublisher

    node = NodeObject(*split(options.api_server), options.node_name, options.service_account)
    return NodePublisher(agent, parts.about, node.patch_status, note)


def _publishing_metrics(publisher: NodePublisher | None) -> Sequence[Collector]:
    from nodeagent.publishing.publisher import PublishingMetrics

    return () if publisher is None else (PublishingMetrics(publisher),)


def _end_once_the_disk_answers(agent: Agent, parts: AgentParts, answers: threading.Event) -> None:
    """Report that nothing is saved. When the disk answers, stop the agent; a restart then loads its state."""
    text = parts.problems[0]
    agent.inbox.put(
        (Observation(parts.clock.now_s(), "memory_lost", "sensor/memory", "agent", 1.0, text=text),)
    )

    def end() -> None:
        answers.wait()
        agent.stop()

    threading.Thread(target=end, name="disk", daemon=True).start()


def _hand_over(agent: Agent, parts: AgentParts, folder: Path) -> str:
    """Add what `agent` has seen to the state that the disk has returned; return a problem, or "".

    The agent that starts next loads this state, so no fault ends because of the restart.
    """
    assert parts.answer is not None, "the disk has hung"
    assert agent.missed is not None, "its observations are kept while the disk hangs"
    try:
        found = parts.answer()
    except (BadInput, OSError) as error:
        return f"what this agent has seen is not saved: {error}"
    heir = Agent(
        agent.policy, clocks.begin(found.state.anchor, found.state.last_s), found.state, folder,
        lambda _: None, parts.branch, claim=found.claim, lost=found.lost,
    )  # fmt: skip
    heir.take_over(agent.missed, parts.clock.anchor.offset_s)
    return "" if heir.close(HAND_OVER_S) else f"{folder}: what this agent has seen is not saved"


def _start_server(
    option: str, app: web.Application, address: str, note: Callable[[Note], None]
) -> RetryingServer:
    from nodeagent.server.http_api import CannotListen, HttpServer
    from nodeagent.server.retrying import RetryingServer

    server = RetryingServer(option, HttpServer(app, *split(address)), note)
    try:
        server.start()
    except CannotListen as error:
        raise BadInput(f"{option} {error}") from None
    return server


def history(options: argparse.Namespace) -> int:
    """Print the newest changes."""
    folder = options.state_dir / TESTS if options.test else options.state_dir
    found, problems = _remembered(folder)
    newest = found.history[-options.limit :]
    if options.json:
        output.show(json.dumps({"events": newest, "problems": list(problems)}, indent=2))
        return 0
    output.show(*(f"! {each}" for each in problems))
    output.show(*(rendering.render_change(each, colour=output.has_colour()) for each in newest))
    if not newest:
        output.show(f"no changes recorded in {folder} yet")
    return 0


def inject(options: argparse.Namespace) -> int:
    """Inject an observation into a running `serve --test`."""
    asked = {"what": options.kind, "value": options.value, "entity": options.entity}
    request = urllib.request.Request(
        f"http://{options.to}/v1/inject", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=ASK_S) as answer:
            output.show(f"injected: {json.load(answer)['injected']}")
            return 0
    except urllib.error.HTTPError as error:
        if error.code in (404, 405):
            raise BadInput(
                f"the agent at {options.to} refuses injections: start `holdfast node serve --test`"
            ) from None
        raise BadInput(error.read(2000).decode(errors="replace").strip()) from None
    except OSError as error:
        cause = getattr(error, "reason", error)  # urllib wraps the cause
        why = getattr(cause, "strerror", None) or cause
        raise BadInput(f"no agent at {options.to}: {why}") from None


def explain(options: argparse.Namespace) -> int:
    """Print the meaning of a code or check."""
    policy = assembly.load_policy(options.policy)
    found = explanations.look_up(policy, options.subject, options.code)
    if isinstance(found, explanations.UnknownCode):
        raise BadInput(found.line)
    output.show(json.dumps(found, indent=2) if options.json else explanations.explanation(found))
    return 0


def clear(options: argparse.Namespace) -> int:
    """Record that an operator declares an entity healthy."""
    folder = options.state_dir / TESTS if options.test else options.state_dir
    name = options.entity
    remembered, _ = _remembered(folder)
    entity = _known_entity(name, _entities(remembered), folder)
    _recorded(folder, lambda: operator_requests.record_clear(folder, entity, options.why, remembered.anchor))
    output.show(
        f"{entity}: recorded; the agent clears its findings within seconds. "
        "Findings about samples return with the next bad sample"
    )
    return 0


def forget(options: argparse.Namespace) -> int:
    """Record an operator's request to forget a baseline."""
    folder = options.state_dir / TESTS if options.test else options.state_dir
    _must_exist(folder)
    entity = _entity_with_baseline(options.baseline, options.entity, folder) if options.entity else ""
    _recorded(folder, lambda: operator_requests.record_forget(folder, options.baseline, entity, options.why))
    of = f" of {entity}" if entity else ""
    output.show(f"{options.baseline}{of}: recorded; the agent will forget it within seconds and relearn it")
    return 0


def _entity_with_baseline(baseline: str, name: str, folder: Path) -> str:
    """Return the entity whose baseline is to be forgotten. Raises BadInput if there is no such entity."""
    kind = baselines.KIND_OF.get(baseline)
    if kind is None:
        raise BadInput(f"--entity {name!r}: {baseline} is a baseline of the node: expected no --entity")
    remembered, _ = _remembered(folder)
    known = [each for each in _entities(remembered) if model.kind_of(each) == kind]
    return _known_entity(name, known, folder, f"{kind}/... with {baseline}: ")


def _known_entity(name: str, known: Sequence[str], folder: Path, what: str = "") -> str:
    """Return the entity that the user has named. Raises BadInput, with the known ones, if it is unknown."""
    entity = model.gpu_entity(name[4:]) if name.lower().startswith("gpu/") else name
    if not known:
        raise BadInput(f"unknown entity {name!r}: no agent has recorded such an entity in {folder} yet")
    if entity not in known:
        near = close_match(entity, known)
        hint = f"did you mean {near}? " if near else ""
        raise BadInput(f"unknown entity {name!r} ({folder}): {hint}expected {what}{', '.join(known)}")
    return entity


def release(options: argparse.Namespace) -> int:
    """Ask the running agent to close NVML for a while, and return when NVML is closed.

    A command that fails, or that a signal ends, leaves no request in force, because an agent would obey it
    later, when nobody expects that. It also fails without a running agent on the folder: the agent that holds
    NVML may use another.
    """
    folder = options.state_dir / TESTS if options.test else options.state_dir
    _must_exist(folder)
    if options.end:
        return _end_release(folder, options.why)
    with _noted_signals() as signals:
        return _release(folder, options, signals)


def _release(folder: Path, options: argparse.Namespace, signals: Sequence[int]) -> int:
    asked = _recorded(folder, lambda: _record_if_owned(folder, options.for_s, options.why))
    if asked is None:
        sys.stderr.write(
            f"holdfast: nothing was released: {_no_agent(folder)}, and no request was recorded\n"
        )
        return NOT_CLOSED
    closed = _waited_until_closed(folder, asked, signals)
    if signals:
        name = signal.Signals(signals[0]).name
        sys.stderr.write(f"holdfast: nothing was released: {name} came first, {_withdraw(folder, asked)}\n")
        return 128 + signals[0]
    if closed is None:
        withdrawn = _withdraw(folder, asked)
        sys.stderr.write(
            f"holdfast: the agent has not closed NVML within {CLOSE_S:g} s, {withdrawn}: {_HANGS}\n"
        )
        return NOT_CLOSED
    output.show(f"released: the agent keeps NVML closed for {_length(asked, options.for_s, closed)}")
    return 0


@contextmanager
def _noted_signals() -> Iterator[Sequence[int]]:
    """Yield the signals that have asked this process to end in this block, where they do not end it.

    A signal that was ignored before, as by nohup, is ignored further.
    """
    found: list[int] = []
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for signum, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(signum, lambda signum, _frame: found.append(signum))
    try:
        yield found
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _length(asked: GpuRelease, for_s: float, closed: GpuRelease) -> str:
    """Return for how long NVML stays closed, in words."""
    until = "or until `holdfast node release --end`"
    if closed == asked:
        return f"{model.duration(for_s)}, {until}"
    left_s = max(0, floor(closed.until_boottime_s - time.clock_gettime(time.CLOCK_BOOTTIME)))
    at_least_s = left_s - left_s % 60 if left_s > 60 else left_s
    why = f" ({printable(closed.why)})" if closed.why else ""
    return f"{model.duration(at_least_s)} because of a later `holdfast node release`{why}, {until}"


def _end_release(folder: Path, why: str) -> int:
    """Record the end also if no agent runs, because the one that starts next resumes a release."""

    def end() -> bool:
        operator_requests.record_release(folder, 0.0, why)
        return claim.is_owned(folder)

    if _recorded(folder, end):
        output.show("ended: the agent opens NVML again within seconds")
    else:
        output.show(f"ended: {_no_agent(folder)}; one that starts opens NVML")
    return 0


def _record_if_owned(folder: Path, for_s: float, why: str) -> GpuRelease | None:
    return operator_requests.record_release(folder, for_s, why) if claim.is_owned(folder) else None


def _no_agent(folder: Path) -> str:
    return f"no agent is running on {folder}"


def _waited_until_closed(folder: Path, asked: GpuRelease, signals: Sequence[int]) -> GpuRelease | None:
    """Return the release for which NVML is closed, or None once the time is up or a signal has come."""
    until = time.monotonic() + CLOSE_S
    while (closed := _closed_for(folder, asked, until)) is None:
        if time.monotonic() >= until or signals:
            return None
        time.sleep(0.1)
    return closed


def _withdraw(folder: Path, asked: GpuRelease) -> str:
    """Withdraw a release that was not completed, but no other; return what became of the request."""
    try:
        _recorded(folder, lambda: operator_requests.record_withdrawal(folder, asked))
    except BadInput as error:
        return f"and the request remains in force ({error})"
    return "and the request was withdrawn"


def _must_exist(folder: Path) -> None:
    """Raise BadInput if no agent has ever used the folder. A request must not create it."""
    if not _recorded(folder, folder.is_dir):
        raise BadInput(f"--state-dir {folder}: no such folder: expected the one that the agent uses")


def _closed_for(folder: Path, asked: GpuRelease, until: float) -> GpuRelease | None:
    with suppress(NoAnswer):
        call = DiskCall(lambda: operator_requests.closed_for(folder, asked))
        return call.result(max(0.0, until - time.monotonic()))
    return None


def _recorded(folder: Path, record: Callable[[], T]) -> T:
    """Return the result of a call that records a request in the folder.

    Raises BadInput if the disk rejects the request or does not answer.
    """
    try:
        return DiskCall(record).result(ASK_S)
    except NoAnswer:
        why = f"the disk has not answered for {ASK_S:g} s; the request may be recorded later"
        raise BadInput(f"--state-dir {folder}: {why}") from None
    except OSError as error:
        raise BadInput(f"--state-dir {folder}: {error.strerror}") from None


_HANGS = "a call to the driver may hang; `holdfast node check` names the sensor"


def _entities(found: saved_state.SavedState) -> list[str]:
    """Return the entities in a saved state: those with evidence, and the hardware that the sensors know."""
    raw = found.evidence
    entities = {str(each[0]) for kind in ("series", "events") for each in raw.get(kind, ())}
    position = found.positions.get(SysfsSensor.name)
    of_sysfs: dict[str, Any] = position if isinstance(position, dict) else {}
    for kind in ("known_devices", "known_ports", "known_interfaces"):
        known = of_sysfs.get(kind)
        entities |= {str(each) for each in known} if isinstance(known, dict) else set()
    return sorted(entities)


def _remembered(folder: Path) -> tuple[saved_state.SavedState, tuple[str, ...]]:
    try:
        return DiskCall(lambda: saved_state.load(folder)).result(ASK_S)
    except NoAnswer:
        raise BadInput(f"--state-dir {folder}: the disk has not answered for {ASK_S:g} s") from None
    except OSError as error:
        raise BadInput(f"--state-dir {folder}: {error}") from None


def _parts_of_reader(options: argparse.Namespace, quick_s: float | None = None) -> AgentParts:
    """Return the parts of an agent that only reads the state, and note if that is another user's."""
    parts = assembly.assemble(options, keeps=False, quick_s=quick_s)
    try:
        foreign = DiskCall(lambda: _foreign_memory(options)).result(ASK_S)
    except NoAnswer:
        foreign = f"{ROOT_STATE}: the disk has not answered for {ASK_S:g} s; it may have a saved state"
    if foreign is not None:
        parts.problems = (*parts.problems, foreign)
    return parts


def _foreign_memory(options: argparse.Namespace) -> str | None:
    """Return a problem if an agent saves its state in another folder, which this does not read.

    That is the case if this user's folder is empty, but a service's is not. Without --state-dir, it is also
    the case if the agent of a pod has saved its state here, and the host's folder is empty or that agent runs
    now.
    """
    mine = options.state_dir
    is_empty = not any(each.exists() for each in map(mine.joinpath, saved_state.names(0)))
    for folder in (ROOT_STATE, *(_pods_folders() if mine == state_folder() else ())):
        if mine == folder or not (_is_used(folder) if is_empty else _runs_in(folder)):
            continue
        why = f"{mine} is empty, so this" if is_empty else "This"
        return (
            f"{why} does not include what the agent saved in {folder}; run this as the agent's user, or with"
            f" --state-dir {folder}"
        )
    return None


def _pods_folders() -> list[Path]:
    """Return the folders of the agents in pods, one for each node that uses this storage; none if unreadable.

    The host's own folder may be older than the pods', so it does not hide them.
    """
    try:
        return sorted(PODS_STATES.iterdir())
    except OSError:
        return []


def _is_used(folder: Path) -> bool:
    """Return whether an agent has ever used a folder, as far as this user can tell."""
    if not os.access(folder.parent, os.F_OK):
        return False
    try:
        return bool(claim.newest_generation(folder)) or (folder / claim.LOCK).exists()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # the folder exists, and belongs to another user


def _runs_in(folder: Path) -> bool:
    """Return whether an agent in a pod uses a folder now, as far as this user can tell."""
    try:
        return folder != ROOT_STATE and claim.is_owned(folder)
    except OSError:
        return False


def _agent(parts: AgentParts, report_changes: Any, note: Callable[[Note], None] = lambda _: None) -> Agent:
    made = Agent(
        parts.policy, parts.clock, parts.state, parts.folder, report_changes, parts.branch, parts.problems,
        parts.policy_file, note, claim=parts.claim, released_until_s=parts.requests.released_until_s,
        lost=parts.lost,
    )  # fmt: skip
    parts.requests.is_closed = made.gpus_are_closed
    made.missed = MissedObservations() if parts.answer is not None else None
    return made


def _print_when_ready(agent: Agent, parts: AgentParts, as_json: bool) -> None:
    with agent.looked:
        agent.looked.wait_for(lambda: agent.published.ready)
    if not as_json:
        _show_health(report.watch_report(agent.published, parts.about(), agent.problems), as_json)


def _handle_signals(agent: Agent) -> None:
    def end(_signum: int, _frame: FrameType | None) -> None:
        agent.stop()
        # A hung disk also blocks the last save. In that case, the process exits without saving, and the file
        # keeps its old content.
        timer = threading.Timer(HARD_STOP_S, os._exit, (0,))
        timer.daemon = True
        timer.start()

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, end)


def _exit(code: int) -> NoReturn:
    """Exit immediately: a sensor's thread may hang in a call that cannot be ended."""
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


COMMANDS = {
    "check": check,
    "watch": watch,
    "serve": serve,
    "history": history,
    "inject": inject,
    "explain": explain,
    "clear": clear,
    "release": release,
    "forget": forget,
}
