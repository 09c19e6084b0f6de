"""The node agent's pages agree with its code: commands, fields, metrics, limits, the policy file."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import node_report
from nodeagent.agent import agent, changes, claim, inbox, saved_state, sensor_threads, state_writer
from nodeagent.agent.agent import Published, Released
from nodeagent.agent.clean_time import CleanTime
from nodeagent.agent.sensor_threads import SensorStatus
from nodeagent.cli import assembly, options, signals
from nodeagent.cli import commands as node_commands
from nodeagent.cli.commands import COMMANDS, HARD_STOP_S, TESTS
from nodeagent.evaluation import bursts, company, events, quotas, retention, samples
from nodeagent.evaluation.evaluator import verdicts
from nodeagent.host import stuck_threads
from nodeagent.model import Action, HealthFinding, Level, word
from nodeagent.policy import checks, meanings, overriding
from nodeagent.policy.loading import load, shipped
from nodeagent.publishing import conditions, evidence, publisher, schedule
from nodeagent.sensing.sensor import Omission
from nodeagent.server import http_api, listening, metrics, report

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS / "node-agent.md", DOCS / "signals.md", DOCS / "runbooks" / "node.md")
PAGE = PAGES[0].read_text()
WORDS = " ".join(PAGE.split())
SET = " ".join((DOCS / "adr" / "0008-the-set-and-not-the-order.md").read_text().split())
PROC = " ".join((DOCS / "adr" / "0009-proc-by-hand.md").read_text().split())
POLICY = shipped()
# Accepted by `nvidia-smi -q -d`, according to its manual.
DISPLAYS = frozenset({"ECC", "ROW_REMAPPER", "PAGE_RETIREMENT", "PERFORMANCE", "TEMPERATURE", "POWER"})


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def commands() -> Iterator[str]:
    for path in PAGES:
        yield from re.findall(r"^\$ holdfast node (.+)$", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("line", sorted(set(commands())))
def test_each_command_in_the_docs_is_accepted(line: str) -> None:
    asked = options.parse(shlex.split(line, comments=True))
    assert asked.command in COMMANDS


def test_every_command_and_every_option_is_in_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert {line.split()[0] for line in commands()} >= COMMANDS.keys() - {"watch"}
    for name in COMMANDS:
        assert f"\n| `{name}` |" in PAGE
        with pytest.raises(SystemExit):
            options.parse([name, "--help"])
        for option in set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}:
            assert re.search(rf"`{option}[ `]", PAGE), f"{name} {option}"


FOUND = HealthFinding(
    "gpu/0000:3b:00.0", "xid", 79, Level.UNHEALTHY, Action.REBOOT_NODE, 5.0, 6.0, "Xid 79: gone",
    ("NVRM: Xid 79",), "a reboot", ("kmsg",), origins=("driver log",), device="GPU-1", of_events=True,
)  # fmt: skip
SEES = SensorStatus("sysfs", True, "", 3, 2, 0.01, False, (Omission("aer", "the firmware keeps it"),))
PUBLISHED = Published(
    100.0, verdicts([FOUND], []), (SEES,),
    clean_time=CleanTime(1.0, 100.0, 100.0, needs=(frozenset({"kmsg"}), frozenset({"kmsg"}))),
    facts={
        "driver": {"driver": "575"},
        "gpu/0000:3b:00.0": {
            "uuid": "GPU-1", "name": "H100", "serial": "1", "persistence": "on", "mig": "off",
        },
    },
    released=Released(5.0, True),
)  # fmt: skip
ABOUT = {
    "node": "vm", "machine_id": "m", "provider_id": "", "boot_id": "b", "booted_s": 1.0,
    "version": "v", "policy": "p", "test": False,
}  # fmt: skip
HEALTH = report.health_report(PUBLISHED, ABOUT)


def change() -> dict[str, Any]:
    raised, _ = changes.find_changes({}, [FOUND], 7.0)
    return saved_state.SavedState().add([changes.change_as_json(each) for each in raised])[0]


def shape(value: Any) -> Any:
    """Return `value` with types in place of values, and with one element of each list."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value else type(value).__name__


def keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from keys(each)


def test_the_health_example_has_the_fields_of_the_report() -> None:
    shown = json.loads(blocks("json")[0])
    expected = shape(HEALTH)
    expected["driver"] = {"driver": "str", "nvml": "str"}
    expected["problems"] = "list"
    found = shape(shown)
    assert found == expected


def test_the_events_example_has_the_fields_of_an_event() -> None:
    shown = json.loads(blocks("json")[1])
    assert shape(shown["events"][0]) == shape(change())
    assert shown.keys() == {"events", "after", "state_id", "restarted"}


def test_every_field_is_explained() -> None:
    for field in {*keys(HEALTH), *change()}:
        assert f"`{field}`" in PAGE, field
    for kind in (changes.RAISED, changes.WORSE, changes.BETTER, changes.CLEARED):
        assert f"`{kind}`" in PAGE
    for value in (*Level, *Action):
        assert f"`{word(value)}`" in PAGE


def test_every_path_is_in_the_page() -> None:
    app = http_api.application(lambda: PUBLISHED, lambda: ABOUT, lambda: 0.0, lambda asked: "")
    for route in app.router.routes():
        assert route.resource is not None
        path = route.resource.canonical
        assert f"`{path}`" in PAGE or f"`{path}?" in PAGE or f"`POST {path}`" in PAGE, path


def test_every_metric_is_in_the_page_with_its_labels() -> None:
    for metric in metrics.registry(lambda: PUBLISHED).collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        labels = ",".join(metric.samples[0].labels)
        assert f"| `{name}{{{labels}}}` |" in PAGE or (not labels and f"| `{name}` |" in PAGE), name


def test_what_the_agent_publishes_is_in_the_page() -> None:
    sources = Path(publisher.__file__).read_text() + Path(conditions.__file__).read_text()
    reasons = set(re.findall(r'"([A-Z][a-z]+(?:[A-Z][a-z]+)*)"', sources)) - {"PATCH"}
    assert {"AgentStopped", "SensorsBlind", "Degraded", "True"} <= reasons
    for name in (*reasons, node_report.REPORT, node_report.REPORT_AT, conditions.GPU, conditions.TRAINING):
        assert f"`{name}`" in PAGE, name
    for name in re.findall(r'"(holdfast_node_publishing_\w+)"', sources):
        assert f"`{name}`" in PAGE or f"`{name}_total`" in PAGE, name
    assert f"otherwise every {schedule.HEARTBEAT_S:g} s" in WORDS
    assert f"then every {schedule.REFILL_S:g} s" in WORDS
    again = f"again after {schedule.RETRY_S:g} s, later every {schedule.MAX_RETRY_S:g} s"
    assert again in WORDS
    assert f"at most {evidence.MAX_BYTES >> 10} KiB: the findings" in WORDS


def test_every_sensor_is_in_the_page() -> None:
    for name in signals._SEES:
        assert name == "agent" or f"`{name}`" in PAGE, name


@pytest.mark.parametrize("text", blocks("toml"))
def test_each_example_of_a_policy_file_is_accepted_and_changes_the_policy(text: str) -> None:
    policy = load(text)
    assert policy.overrides
    assert (policy.rules, policy.xids) != (POLICY.rules, POLICY.xids)


def test_the_examples_of_a_policy_file_do_what_their_comments_say() -> None:
    codes, sampled = (load(text) for text in blocks("toml"))
    assert codes.xids[63].clears.value == "reset"
    assert codes.xids[94].level is Level.HEALTHY
    assert codes.xids[31].recurs is None
    assert sampled.rules["disk_used"].unhealthy is None
    assert sampled.rules["kernel_task_hung"].meaning != POLICY.rules["kernel_task_hung"].meaning


def test_every_key_of_a_policy_file_is_in_the_page() -> None:
    accepted = {*meanings.OPERATOR, *checks.BOUND, *checks.STATE}.union(*checks.OPERATOR.values())
    for key in accepted:
        assert f"`{key}`" in PAGE, key
    for section in overriding.SECTIONS:
        assert f"`[{section}.N" in PAGE, section


@pytest.mark.parametrize(
    "said",
    [
        f"127.0.0.1:{options.PORT}",
        f"{options.POLICY_FILE}",
        f"{options.ROOT_STATE}",
        f"the folder `{TESTS}`",
        f"503 if it has not done so for {http_api.SILENT_S:g} s",
        f"at most {http_api.MAX_EVENTS}; waits up to {http_api.MAX_WAIT_S:g} s",
        f"newest {saved_state.MAX_HISTORY} changes",
        f"newest {saved_state.MAX_HISTORY}.",
        f"`{saved_state.NAME}` in the state folder, and keeps the previous version in `{saved_state.BEFORE}`",
        f"at most every {agent.SAVE_S:g} s, and every {agent.SAVE_AT_REST_S:g} s if nothing changes",
        f"tries it again every {sensor_threads.RETRY_S:g} s",
        f"within {bursts.GAP_S:g} s of each other",
        f"up to {samples.LATE_S:g} s late",
        f"from {events.BEFORE_S:g} s before to {events.AFTER_S:g} s after a code",
        f"For {retention.FORGET_S / 86400:g} days after it has ended, the agent keeps evidence: for each "
        f"kind of entity up to {quotas.MAX_SERIES} series of samples, and up to {quotas.MAX_EVENTS} "
        f"codes of events, each with {quotas.MAX_VARIANTS} variants of {bursts.MAX_BURSTS} bursts; "
        f"for GPUs, NVSwitches and "
        f"the node itself up to {quotas.MAX_OWN} of each",
        f"{quotas.MAX_OWN // quotas.LOST_SHARE} of {quotas.MAX_OWN}, "
        f"{quotas.MAX_EVENTS // quotas.LOST_SHARE} of {quotas.MAX_EVENTS}",
        f"has left the node for {retention.DEPARTED_S / 86400:g} days",
        f"arrives more than {events.AFTER_S:g} s after the code",
        f"within {company.TOGETHER_S:g} s of the growth",
        f"{inbox.MAX_EVENTS} events and {inbox.MAX_SAMPLES} samples",
        f"A policy file may have {overriding.MAX_CHARACTERS} characters",
        f"at most {metrics.MAX_ENTITIES} entities",
        f"If a save takes longer than {agent.SAVE_DEADLINE_S:g} s",
        f"the agent starts within {assembly.DISK_S:g} s without its state",
        f"answers within {state_writer.ANSWER_EVERY_S:g} s",
        f"does not answer within {claim.ANSWER_S:g} s",
        f"nothing has answered on it for {listening.ANSWER_S:g} s",
        f"up to {http_api.MAX_IDLE} idle connections, each for {http_api.MAX_IDLE_S:g} s",
        f"Up to {http_api.MAX_WAITING} requests can wait",
        f"1 if it is not after {node_commands.CLOSE_S:g} s",
    ],
)
def test_each_number_in_the_page_equals_the_number_in_the_code(said: str) -> None:
    assert said in WORDS


def test_a_stop_takes_no_longer_than_the_page_says() -> None:
    assert "SIGTERM ends it within 2 s" in WORDS
    assert HARD_STOP_S < 2


def test_the_numbers_in_the_decision_records_equal_those_in_the_code() -> None:
    assert f"more than {samples.LATE_S:g} s older than" in SET
    assert f"within {bursts.GAP_S:g} s of each other" in SET
    assert f"{events.BEFORE_S:g} s before to {events.AFTER_S:g} s after it" in SET
    assert (
        f"at most {stuck_threads.MAX_PROCESSES} processes and {stuck_threads.MAX_THREADS} further threads"
        in PROC
    )
    assert f"stuck after {stuck_threads.STUCK_S:g} s" in PROC
    assert f"at most {stuck_threads.MAX_STACKS} per walk" in PROC
    assert f"more than {stuck_threads.MAX_SUSPECTS} suspects" in PROC


def test_nvidia_smi_accepts_each_display_that_a_runbook_requests() -> None:
    asked = re.findall(r"nvidia-smi -q -d ([A-Z_,]+)", PAGES[2].read_text())
    assert asked
    assert {each for some in asked for each in some.split(",")} <= DISPLAYS
