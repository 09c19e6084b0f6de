from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint import writer
from holdfast.errors import BadInput
from supervisor.__main__ import obey
from supervisor.cli import command_options, incidents
from supervisor.store.run_directory import RunDir, open_for_run
from tests.unit.supervisor.api_stub import api
from tests.unit.supervisor.status_samples import incident, opened, status

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    """Yield a live run, the newest one in the working directory."""
    monkeypatch.chdir(tmp_path)
    made = open_for_run(None, 0.0)
    yield made
    made.close()


def shown(printed: Printed, command: command_options.Command, code: int = 0) -> str:
    assert obey(command) == code
    return printed.readouterr().out


def test_the_status_of_a_live_run_comes_from_its_supervisor(run: RunDir, capsys: Printed) -> None:
    run.write_status(status(step=1))
    with api(lambda *_: (200, json.dumps(status(step=2)).encode())) as url:
        run.write_run({"api": url})
        said = json.loads(shown(capsys, command_options.Status(json=True)))
        text = shown(capsys, command_options.Status())
    assert (said["step"], said["alive"], said["ettr"]) == (2, True, 0.9921)
    assert text.startswith("run a-run: running\n")


def test_while_the_supervisor_is_down_the_last_stored_status_is_shown(run: RunDir, capsys: Printed) -> None:
    run.write_status(status(step=1))
    with api(lambda *_: (503, b"")) as url:
        run.write_run({"api": url})
        said = json.loads(shown(capsys, command_options.Status(json=True)))
    assert (said["step"], said["alive"]) == (1, True)
    assert "its supervisor does not respond" in shown(capsys, command_options.Status())


def test_the_status_of_an_ended_run_is_read_from_its_directory(run: RunDir, capsys: Printed) -> None:
    run.write_status(status(phase="ended", exit_code=3))
    run.close()
    assert shown(capsys, command_options.Status()).startswith("run a-run: ended with exit code 3\n")
    said = json.loads(shown(capsys, command_options.Status(run.path, json=True)))
    assert (said["alive"], said["exit_code"]) == (False, 3)


def test_a_run_without_a_status_is_reported_with_the_reason(run: RunDir, capsys: Printed) -> None:
    assert "is starting" in shown(capsys, command_options.Status())
    run.close()
    assert "ended before" in shown(capsys, command_options.Status())
    assert json.loads(shown(capsys, command_options.Status(json=True))) == {"schema": 1, "alive": False}


def test_incidents_are_a_table_or_json_with_the_open_one_last(run: RunDir, capsys: Printed) -> None:
    run.write_incident(incident(1))
    run.write_status(status(open_incident=opened(2, kind="hang")))
    lines = shown(capsys, command_options.Incidents()).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["i-0001", "crash"], ["i-0002", "hang"]]
    said = json.loads(shown(capsys, command_options.Incidents(json=True)))
    assert [each["id"] for each in said] == ["i-0001", "i-0002"]
    asked = {"id", "kind", "rank", "step", "detected_s", "recovered_s", "lost_steps", "remedy", "why"}
    assert asked <= set(said[0])


def test_a_number_that_json_cannot_represent_is_null(run: RunDir, capsys: Printed) -> None:
    run.write_incident(incident(loss=float("nan"), losses=[float("inf"), 1.0]))
    [said] = json.loads(shown(capsys, command_options.Incidents(json=True)))
    assert (said["loss"], said["losses"]) == (None, [None, 1.0])


@pytest.mark.parametrize("word", ["i-0002", "2", "0002", "last"])
def test_an_incident_is_selected_by_id_number_or_last(run: RunDir, capsys: Printed, word: str) -> None:
    for number in (1, 2):
        run.write_incident(incident(number))
    assert shown(capsys, command_options.Explain(word)).startswith("i-0002  rank 1 was killed")
    said = json.loads(shown(capsys, command_options.Explain(word, json=True)))
    assert said["id"] == "i-0002"


def test_an_unknown_incident_lists_similar_ones(run: RunDir) -> None:
    with pytest.raises(BadInput, match="incident 'i-0001': this run has had no incidents"):
        obey(command_options.Explain("i-0001"))
    for number in (1, 2, 13):
        run.write_incident(incident(number))
    with pytest.raises(BadInput, match=r"unknown incident 'i-0003': expected .*i-0013.* or last$"):
        obey(command_options.Explain("i-0003"))
    with pytest.raises(BadInput, match=r"'x' for ID: .* such as 3, i-0003 or last$"):
        obey(command_options.Explain("x"))
    with pytest.raises(BadInput, match="invalid value '-1' for ID: expected an incident from"):
        obey(command_options.Explain("-1"))


def test_checkpoints_are_listed_and_verified_on_request(run: RunDir, capsys: Printed) -> None:
    for step in (1, 2):
        content = {"model.safetensors": b"x" * 100}
        writer.write(
            run.checkpoints, generation=1, step=step, world_size=2, files=content, meta={}, created_at=0.0
        )
    assert "step-00000002" in shown(capsys, command_options.Checkpoints())
    assert "intact, newest" in shown(capsys, command_options.Checkpoints(verify=True))
    (run.checkpoints / "step-00000003").mkdir()
    (run.checkpoints / "step-00000003" / "rank-0").touch()
    assert "damaged" in shown(capsys, command_options.Checkpoints(), code=1)
    shutil.rmtree(run.checkpoints / "step-00000003")
    damaged = run.checkpoints / "step-00000002" / "model.safetensors"
    damaged.write_bytes(b"x" * 99 + b"y")
    assert "complete, newest" in shown(capsys, command_options.Checkpoints())
    text = shown(capsys, command_options.Checkpoints(verify=True), code=1)
    assert f"newest intact: {run.checkpoints / 'step-00000001'}" in text
    said = json.loads(shown(capsys, command_options.Checkpoints(verify=True, json=True), code=1))
    assert [(each["step"], each["newest_whole"]) for each in said] == [(2, False), (1, True)]


def test_unreadable_checkpoints_are_reported_as_unreadable(run: RunDir, capsys: Printed) -> None:
    run.write_incident(incident(1))
    (run.path / "incidents" / "i-0002.json").write_text("{")
    (run.path / "status.json").write_text("{")
    assert obey(command_options.Incidents()) == 0
    printed = capsys.readouterr()
    assert "i-0001" in printed.out
    assert "i-0002.json cannot be read" in printed.err
    run.close()
    text = shown(capsys, command_options.Status(), 1)
    assert "cannot be read" in text
    assert str(run.path / "status.json") in text
    assert json.loads(shown(capsys, command_options.Status(json=True), 1)) == {"schema": 1, "alive": False}


def test_a_record_of_an_older_version_has_every_field(run: RunDir, capsys: Printed) -> None:
    run.write_incident(incident(1))
    [said] = json.loads(shown(capsys, command_options.Incidents(json=True)))
    assert (said["schema"], said["overtaken_by"]) == (1, None)


def test_help_is_printed(capsys: Printed) -> None:
    assert shown(capsys, command_options.Show("hello")) == "hello\n"


def test_stop_and_inject_also_find_the_newest_run(run: RunDir) -> None:
    run.close()
    for command in (command_options.Stop(), command_options.Inject("kill")):
        with pytest.raises(BadInput, match="is not running"):
            obey(command)


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[1;1Hboom"


def test_messages_of_scripts_reach_the_terminal_without_escape_codes(run: RunDir, capsys: Printed) -> None:
    run.write_status(status(message=HOSTILE, last_incident=incident(1, why=HOSTILE, message=HOSTILE)))
    faults = [
        {"kind": "crash", "rank": 1, "member": "m0", "step": 812, "detail": HOSTILE, "message": HOSTILE}
    ]
    run.write_incident({**incident(1, why=HOSTILE, message=HOSTILE), "faults": faults})
    for command in (
        command_options.Status(run.path),
        command_options.Incidents(run.path),
        command_options.Explain("last", run.path),
    ):
        printed = shown(capsys, command)
        assert "boom" in printed
        assert "\x1b" not in printed


@pytest.mark.parametrize("word", ["3", "i-3", "i-0003", "03", "last"])
def test_an_incident_has_several_names(word: str) -> None:
    assert incidents._choose([{"id": "i-0002"}, {"id": "i-0003"}], word) == {"id": "i-0003"}
