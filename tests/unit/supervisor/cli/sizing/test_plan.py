"""`holdfast plan` prints a table, a recommendation and its reasons, or all of it as JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from supervisor import __main__ as program
from supervisor.cli import parser
from supervisor.cli.command_options import PlanOptions
from supervisor.planning.model import SizingInputs
from supervisor.planning.planner import MOST, plan, recommended

Printed = pytest.CaptureFixture[str]


def printed(line: str, capsys: Printed) -> str:
    assert program.main(["plan", *line.split()]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def document(line: str, capsys: Printed) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed(f"{line} --json", capsys))
    return found


def rows(text: str) -> dict[int, str]:
    """Return the lines of the table, by their number of standbys."""
    return {int(row[1]): row[0] for row in re.finditer(r"^ +(\d+) +[\d.]+ %.*$", text, re.MULTILINE)}


def test_the_defaults_of_the_command_are_those_of_the_plan() -> None:
    found = parser.parse(["plan", "--nodes", "64"])
    assert found == PlanOptions(64)
    assert plan(PlanOptions(64)).outlooks == plan(SizingInputs(64)).outlooks


def test_every_input_can_be_given_with_its_unit() -> None:
    line = (
        "plan --nodes=16 --gpus-per-node 4 --step 250ms --mtbf 3y --node-loss 50% --repair 36h"
        " --replacement 10m --detection 10s --recovery 4 --outage 90d --state 1.5TB"
        " --checkpoint-bandwidth 2GiB/s --checkpoint-slowdown 0.2 --gpu-hour-cost 2.50 --standbys 3"
        " --simulate --seed 9 --json"
    )
    assert parser.parse(line.split()) == PlanOptions(
        nodes=16,
        gpus_per_node=4,
        step_s=0.25,
        mtbf_s=3 * 365 * 86_400.0,
        node_loss=0.5,
        repair_s=129_600.0,
        replacement_s=600.0,
        detection_s=10.0,
        recovery_s=4.0,
        outage_s=90 * 86_400.0,
        state_bytes=1.5e12,
        bandwidth=2.0 * 2**30,
        slowdown=0.2,
        gpu_hour_cost=2.5,
        standbys=3,
        simulate=True,
        seed=9,
        json=True,
    )


def test_the_table_has_a_row_for_each_small_number_and_marks_the_recommended_one(capsys: Printed) -> None:
    table = rows(printed("--nodes 64", capsys))
    best = recommended(SizingInputs(64))
    assert list(table) == list(range(best + 3))
    assert [at for at, row in table.items() if row.endswith("<- recommended")] == [best]


def test_a_large_job_gets_only_the_rows_that_matter(capsys: Printed) -> None:
    table = rows(printed("--nodes 2048", capsys))
    best = recommended(SizingInputs(2_048))
    assert {0, 1, 2, best - 1, best, best + 1} <= table.keys()
    assert len(table) < 15 < best


def test_the_number_of_the_user_is_marked_and_compared(capsys: Printed) -> None:
    text = printed("--nodes 64 --standbys 9", capsys)
    assert rows(text)[9].endswith("<- yours")
    assert re.search(
        r"^With 9 standbys, ETTR is 99\.\d\d %, and a useful GPU hour costs .* % more\.$", text, re.M
    )
    best = recommended(SizingInputs(64))
    same = printed(f"--nodes 64 --standbys {best}", capsys)
    assert rows(same)[best].endswith("<- recommended, yours")
    assert "more." not in same


def test_the_reasons_name_the_share_the_interval_and_its_setting(capsys: Printed) -> None:
    text = " ".join(printed("--nodes 64", capsys).split())
    assert 'Standbys: 2 (holdfast.dev/standby: "2"). With this number, a useful GPU hour is cheapest' in text
    assert "With 3, a standby is ready for at least 99 % of lost nodes." in text
    assert "Checkpoint interval: 53 min 13 s (holdfast.dev/checkpoint-every: 53m), because Young's" in text
    assert "other nodes have the state in memory" in text


def test_the_recommended_setting_is_accepted_by_the_option(capsys: Printed) -> None:
    for line in (
        "--nodes 64",
        "--nodes 1 --outage 1h",
        "--nodes 8 --state 10TB --checkpoint-bandwidth 10MB/s",
    ):
        [setting] = re.findall(r"checkpoint-every:\s+(\w+)\)", printed(line, capsys))
        parser.parse(["run", "--checkpoint-every", setting, "--", "true"], environment={})


def test_slow_storage_is_named_as_the_reason_for_the_interval(capsys: Printed) -> None:
    text = " ".join(
        printed(
            "--nodes 64 --state 1PB --checkpoint-bandwidth 1GB/s --checkpoint-slowdown 0.1%", capsys
        ).split()
    )
    assert "because storage needs 11 d 13 h to write one" in text


def test_what_would_change_the_answer_is_a_table_of_its_own(capsys: Printed) -> None:
    text = printed("--nodes 64", capsys)
    assert re.search(r"^MTBF halved +3 +99\.\d+ % +53 min 13 s$", text, re.MULTILINE)
    assert re.search(r"^MTBF doubled +2 ", text, re.MULTILINE)


def test_a_price_turns_gpu_hours_into_money(capsys: Printed) -> None:
    hours, money = document("--nodes 64", capsys), document("--nodes 64 --gpu-hour-cost 2", capsys)
    assert (hours["cost_unit"], money["cost_unit"]) == ("GPU hours", "price")
    assert money["outlooks"][2]["standbys_per_day"] == 2 * hours["outlooks"][2]["standbys_per_day"]
    assert "in the currency of --gpu-hour-cost" in " ".join(
        printed("--nodes 64 --gpu-hour-cost 2", capsys).split()
    )


def test_the_json_has_all_inputs_and_results(capsys: Printed) -> None:
    found = document("--nodes 64 --standbys 5", capsys)
    expected = plan(SizingInputs(64), 5)
    assert found["schema"] == 1
    assert found["inputs"]["nodes"] == 64
    assert found["inputs"]["replacement_s"] is None
    assert (found["recommended"], found["standbys"]) == (expected.recommended, 5)
    assert found["for_99_percent"] == expected.for_99
    assert [each["ettr"] for each in found["outlooks"]] == [each.ettr for each in expected.outlooks]
    assert found["checkpoint"]["interval_s"] == expected.checkpoint.interval_s
    assert [each["change"] for each in found["variations"]][:2] == ["MTBF halved", "MTBF doubled"]
    assert found["simulated"] == []


def test_a_simulation_adds_a_column_that_agrees_with_the_ettr(capsys: Printed) -> None:
    text, found = printed("--nodes 64 --simulate", capsys), document("--nodes 64 --simulate", capsys)
    assert "SIMULATED" in text.splitlines()[3]
    assert all(" ± " in row for row in rows(text).values())
    assert [each["standbys"] for each in found["simulated"]] == list(rows(text))
    for each in found["simulated"]:
        ettr = found["outlooks"][each["standbys"]]["ettr"]
        assert abs(each["ettr"] - ettr) <= 4 * each["ettr_error"] + 1e-4


def test_the_seed_decides_the_result_of_a_simulation(capsys: Printed) -> None:
    first, again, other = (document(f"--nodes 4 --simulate --seed {seed}", capsys) for seed in (1, 1, 2))
    assert first == again
    assert first["simulated"] != other["simulated"]


def test_a_hopeless_job_gets_no_recommendation_and_its_json_has_no_infinity(capsys: Printed) -> None:
    line = "--nodes 1000 --mtbf 1h --step 1d --standbys 2"
    text = printed(line, capsys)
    assert "No number of standbys helps" in text
    assert "With 2 standbys, the job makes no progress." in text
    assert "recommended" not in text
    assert document(line, capsys)["outlooks"][0]["cost"] is None


def test_a_job_that_no_pool_can_serve_is_told_so(capsys: Printed) -> None:
    text = " ".join(printed("--nodes 100000 --mtbf 10d", capsys).split())
    assert f"Standbys: {MOST}" in text
    assert f"More than {MOST:,} are not considered: check --mtbf and --repair." in text


def test_no_line_is_wider_than_a_terminal(capsys: Printed) -> None:
    for line in ("--nodes 64", "--nodes 2048", "--nodes 1 --standbys 7", "--nodes 100000 --mtbf 10d"):
        assert max(map(len, printed(line, capsys).splitlines())) <= 110
