from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.process.clock import boot_id
from nodeagent.sensing import baselines, operator_requests
from nodeagent.sensing.baselines import Forgotten
from nodeagent.sensing.clock import Anchor, Clock
from nodeagent.sensing.operator_requests import FILE, OperatorRequests, effective_s

OFFSET_S = 1000.0
ANCHOR = Anchor(boot_id(), OFFSET_S)


def reader(folder: Path, position: object = None, **options: Any) -> OperatorRequests:
    return OperatorRequests(folder, Clock(ANCHOR), position, **options)


def clear(folder: Path, entity: str, why: str = "", anchor: Anchor | None = None) -> None:
    operator_requests.record_clear(folder, entity, why, anchor)


def entities(found: OperatorRequests) -> list[str]:
    return [each.entity for each in found.read()]


def last_line(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / FILE).read_text().splitlines()[-1])
    return found


def test_a_clear_is_read_once(tmp_path: Path) -> None:
    found = reader(tmp_path)
    assert entities(found) == []
    clear(tmp_path, "gpu/a", "exchanged")
    clear(tmp_path, "node")
    assert entities(found) == ["gpu/a", "node"]
    assert entities(found) == []
    clear(tmp_path, "gpu/b")
    assert entities(reader(tmp_path, found.position())) == ["gpu/b"]


def test_the_position_of_an_earlier_version_is_continued(tmp_path: Path) -> None:
    clear(tmp_path, "gpu/a")
    read = (tmp_path / FILE).stat().st_size
    clear(tmp_path, "gpu/b")
    assert entities(reader(tmp_path, read)) == ["gpu/b"]


def test_a_partial_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    found = reader(tmp_path)
    path = tmp_path / FILE
    path.write_bytes(b'{"entity": "gp')
    assert entities(found) == []
    with path.open("ab") as file:
        file.write(b'u/a", "wall_s": 1}\n')
    assert entities(found) == ["gpu/a"]


def test_a_replaced_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    clear(tmp_path, "gpu/a", "x" * 300)
    found = reader(tmp_path)
    assert entities(found) == ["gpu/a"]
    (tmp_path / FILE).write_text('{"entity": "gpu/b", "wall_s": 2}\n')
    assert entities(found) == ["gpu/b"]


@pytest.mark.parametrize("is_new_file", [False, True])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_file_that_was_replaced_by_a_longer_one_is_read_from_its_beginning(
    tmp_path: Path, is_new_file: bool, restarted: bool
) -> None:
    clear(tmp_path, "gpu/a")
    found, path = reader(tmp_path), tmp_path / FILE
    assert entities(found) == ["gpu/a"]
    assert entities(found) == []
    if restarted:
        found = reader(tmp_path, json.loads(json.dumps(found.position())))
    if is_new_file:
        path.rename(tmp_path / "rotated")
    else:
        path.write_text("")
    clear(tmp_path, "gpu/b", "x" * 300)
    clear(tmp_path, "gpu/c")
    assert entities(found) == ["gpu/b", "gpu/c"]
    assert entities(found) == []


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Limit the size of files, so that the last write that fits only in part is a short one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_request_that_fits_only_in_part_is_an_error_and_the_next_one_is_read(tmp_path: Path) -> None:
    clear(tmp_path, "gpu/a")
    size = (tmp_path / FILE).stat().st_size + 40
    with room_for(size), pytest.raises(OSError, match="large"):
        clear(tmp_path, "gpu/b")
    assert (tmp_path / FILE).stat().st_size == size
    clear(tmp_path, "gpu/c")
    assert entities(reader(tmp_path)) == ["gpu/a", "gpu/c"]


@pytest.mark.parametrize("missing", [1, 2, 50])
def test_a_request_that_was_cut_off_anywhere_stays_without_effect(tmp_path: Path, missing: int) -> None:
    clear(tmp_path, "gpu/a")
    os.truncate(tmp_path / FILE, (tmp_path / FILE).stat().st_size - missing)
    clear(tmp_path, "gpu/b")
    assert entities(reader(tmp_path)) == ["gpu/b"]


def test_the_longest_reason_in_any_script_is_read(tmp_path: Path) -> None:
    clear(tmp_path, "gpu/a", "\U0001f525" * 500)
    assert entities(reader(tmp_path)) == ["gpu/a"]


def test_a_clear_follows_what_was_seen_before_it_whatever_the_wall_clock_shows(tmp_path: Path) -> None:
    """Agent time is ahead of the wall clock, by years, because that clock was wrong at the first start."""
    clock = Clock(Anchor(boot_id(), time.time() + 1e8))
    before_s = clock.now_s()
    clear(tmp_path, "gpu/a")
    [found] = OperatorRequests(tmp_path, clock).read()
    assert before_s - 0.0001 <= found.at_s <= clock.now_s()


def test_a_clear_of_a_former_boot_keeps_its_agent_time(tmp_path: Path) -> None:
    clear(tmp_path, "gpu/a", anchor=ANCHOR)
    line = last_line(tmp_path)
    assert line["agent_s"] == OFFSET_S + line["boottime_s"]
    later = Anchor("another boot", line["agent_s"] + 500.0)
    assert effective_s(line, later, later.offset_s + 10.0) == line["agent_s"]


def test_a_clear_of_a_boot_that_the_agent_has_not_seen_precedes_this_boot() -> None:
    line = {"entity": "gpu/a", "wall_s": 5.0, "boot_id": "b", "boottime_s": 3.0}
    assert effective_s(line, Anchor("c", 700.0), 900.0) == 700.0
    assert effective_s({**line, "agent_s": 1e9}, Anchor("c", 700.0), 900.0) == 700.0


def test_a_line_of_an_earlier_version_is_placed_by_the_wall_clock_and_never_later_than_now() -> None:
    assert effective_s({"entity": "gpu/a", "wall_s": 5.0}, ANCHOR, 7.0) == 5.0
    assert effective_s({"entity": "gpu/a", "wall_s": 1e9}, ANCHOR, 7.0) == 7.0
    assert effective_s({"entity": "gpu/a", "wall_s": float("nan")}, ANCHOR, 7.0) is None


def test_a_release_lasts_for_its_time_survives_a_restart_and_ends_with_the_boot(tmp_path: Path) -> None:
    found = reader(tmp_path)
    asked = operator_requests.record_release(tmp_path, 600.0, "driver upgrade")
    assert entities(found) == []
    assert found.release == asked
    assert found.released_until_s() == OFFSET_S + asked.until_boottime_s
    assert reader(tmp_path, found.position()).release == asked
    elsewhere = OperatorRequests(tmp_path, Clock(Anchor("another boot", 0.0)), found.position())
    assert elsewhere.released_until_s() == float("-inf")
    operator_requests.record_release(tmp_path, 0.0, "")
    assert entities(found) == []
    assert found.released_until_s() <= Clock(ANCHOR).now_s()


def test_a_release_is_known_before_the_sensors_start(tmp_path: Path) -> None:
    clear(tmp_path, "gpu/a")
    asked = operator_requests.record_release(tmp_path, 600.0, "")
    found = reader(tmp_path)
    found.read_ahead()
    assert found.release == asked
    assert entities(found) == ["gpu/a"]


def test_a_release_is_acknowledged_once_nvml_is_closed_and_until_it_ends(tmp_path: Path) -> None:
    found, other = reader(tmp_path, acknowledges=True), reader(tmp_path)
    asked = operator_requests.record_release(tmp_path, 600.0, "")
    entities(found)
    assert not operator_requests.closed_for(tmp_path, asked)
    found.is_closed = other.is_closed = lambda: True
    entities(other)
    assert not operator_requests.closed_for(tmp_path, asked), "a check acknowledges nothing"
    entities(found)
    assert operator_requests.closed_for(tmp_path, asked)
    operator_requests.record_release(tmp_path, 0.0, "")
    entities(found)
    assert not operator_requests.closed_for(tmp_path, asked)
    assert not (tmp_path / operator_requests.CLOSED).exists()


def test_a_release_counts_as_closed_for_a_later_one_but_not_for_an_earlier_one(tmp_path: Path) -> None:
    found = reader(tmp_path, acknowledges=True)
    found.is_closed = lambda: True
    first = operator_requests.record_release(tmp_path, 3600.0, "first")
    entities(found)
    second = operator_requests.record_release(tmp_path, 600.0, "second")
    assert operator_requests.closed_for(tmp_path, second) is None, "the agent has not read it yet"
    third = operator_requests.record_release(tmp_path, 60.0, "third")
    entities(found)
    assert operator_requests.closed_for(tmp_path, first) == third
    assert operator_requests.closed_for(tmp_path, second) == third
    (tmp_path / FILE).unlink()
    assert operator_requests.closed_for(tmp_path, second) is None
    assert operator_requests.closed_for(tmp_path, third) == third


def test_a_withdrawal_ends_no_other_release_and_what_it_would_restore_survives_a_restart(
    tmp_path: Path,
) -> None:
    found = reader(tmp_path)
    first = operator_requests.record_release(tmp_path, 600.0, "first")
    second = operator_requests.record_release(tmp_path, 3600.0, "second")
    operator_requests.record_withdrawal(tmp_path, first)
    third = operator_requests.record_release(tmp_path, 60.0, "third")
    entities(found)
    assert found.release == third
    again = reader(tmp_path, json.loads(json.dumps(found.position())))
    operator_requests.record_withdrawal(tmp_path, third)
    entities(again)
    assert again.release == second
    assert last_line(tmp_path)["release_s"] == 0.0, "an agent of an earlier version ends the release"


def test_a_release_that_has_been_ended_does_not_return_with_an_older_copy_of_the_file(tmp_path: Path) -> None:
    found, file = reader(tmp_path), tmp_path / FILE
    operator_requests.record_release(tmp_path, 600.0, "")
    copy = file.read_bytes()
    operator_requests.record_release(tmp_path, 0.0, "")
    entities(found)
    file.write_bytes(copy)
    entities(found)
    assert found.released_until_s() <= Clock(ANCHOR).now_s()


def test_a_request_to_forget_is_handed_over_once_and_clears_nothing(tmp_path: Path) -> None:
    operator_requests.record_forget(tmp_path, "gpus", "", "two GPUs were removed")
    found = reader(tmp_path)
    found.read_ahead()
    assert entities(found) == []
    operator_requests.record_forget(tmp_path, "nvlinks", "gpu/a", "")
    assert entities(found) == []
    handed_over = [(1, Forgotten("gpus")), (2, Forgotten("nvlinks", "gpu/a"))]
    assert list(found.forgets.after(0)) == handed_over
    again = reader(tmp_path, json.loads(json.dumps(found.position())))
    assert list(again.forgets.after(0)) == handed_over, "a sensor may not have taken them yet"
    assert entities(again) == []
    assert list(again.forgets.after(0)) == handed_over


def test_a_malformed_request_to_forget_is_ignored(tmp_path: Path) -> None:
    at = {"boot_id": boot_id(), "boottime_s": 1.0}
    for wrong in ({"baseline": "all"}, {"baseline": ["gpus"]}, {"baseline": "gpus", "of": 3}):
        with (tmp_path / FILE).open("a") as file:
            file.write(f"{json.dumps({**wrong, **at})}\n")
    found = reader(tmp_path)
    assert entities(found) == []
    assert list(found.forgets.after(0)) == []


@given(st.binary(max_size=300))
def test_any_bytes_are_read_without_an_error(tmp_path_factory: object, raw: bytes) -> None:
    folder = tmp_path_factory.mktemp("requests")  # type: ignore[attr-defined]
    (folder / FILE).write_bytes(raw + b"\n")
    found = reader(folder)
    assert all(isinstance(each, str) and each for each in entities(found))
    assert found.position()["offset"] == len(raw) + 1


_VALUES = st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3)
_KEYS = (
    "entity",
    "release_s",
    "withdraws",
    "wall_s",
    "boot_id",
    "boottime_s",
    "agent_s",
    "why",
    "baseline",
    "of",
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(_KEYS, _VALUES | st.just(boot_id()))))
def test_any_fields_are_read_without_an_error(tmp_path_factory: object, fields: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("requests")  # type: ignore[attr-defined]
    (folder / FILE).write_text(json.dumps(fields) + "\n")
    found = reader(folder)
    assert all(each.at_s <= Clock(ANCHOR).now_s() for each in found.read())
    again = reader(folder, found.position())
    assert (again.release, again.position()) == (found.release, found.position())


def forgotten(found: OperatorRequests, after: int) -> list[str]:
    list(found.read())
    return [request.entity for _, request in found.forgets.after(after)]


@pytest.mark.parametrize("how", ["edited", "restored", "rotated", "removed"])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_request_to_forget_takes_effect_once_even_if_the_file_gets_shorter(
    tmp_path: Path, how: str, restarted: bool
) -> None:
    operator_requests.record_forget(tmp_path, "nvlinks", "gpu/a", "x" * 200)
    operator_requests.record_forget(tmp_path, "nvlinks", "gpu/b", "x" * 200)
    found, file = reader(tmp_path), tmp_path / FILE
    assert forgotten(found, 0) == ["gpu/a", "gpu/b"]
    text = file.read_text()
    if how == "removed":
        file.unlink()
        assert forgotten(found, 2) == []
    if restarted:
        found = reader(tmp_path, json.loads(json.dumps(found.position())))
    shorter = {"edited": text.replace("xxxx", ""), "restored": text.splitlines(keepends=True)[0]}
    file.write_text(shorter.get(how, text if how == "removed" else ""))
    operator_requests.record_forget(tmp_path, "nvlinks", "gpu/c", "")
    assert forgotten(found, 2) == ["gpu/c"]
    assert forgotten(found, 3) == []


def test_a_request_to_clear_takes_effect_once_even_if_the_file_gets_shorter(tmp_path: Path) -> None:
    clear(tmp_path, "gpu/a", "x" * 200)
    clear(tmp_path, "gpu/b")
    found, file = reader(tmp_path), tmp_path / FILE
    assert entities(found) == ["gpu/a", "gpu/b"]
    file.write_text(file.read_text().replace("xxxx", ""))
    assert entities(reader(tmp_path, json.loads(json.dumps(found.position())))) == []
    clear(tmp_path, "gpu/c")
    assert "gpu/c" in entities(reader(tmp_path, json.loads(json.dumps(found.position()))))


def test_what_an_earlier_version_has_read_does_not_take_effect_again(tmp_path: Path) -> None:
    operator_requests.record_forget(tmp_path, "gpus", "", "x" * 40)
    found = reader(tmp_path, {"offset": (tmp_path / FILE).stat().st_size})
    (tmp_path / FILE).write_text((tmp_path / FILE).read_text().replace("xxxx", ""))
    assert forgotten(found, 0) == []


def test_the_wall_clock_orders_only_requests_of_boots_that_have_ended() -> None:
    at = operator_requests.RequestTime
    assert at("now", 5.0, 0.0).is_after(at("now", 4.0, 9.0), "now")
    assert at("now", 5.0, 0.0).is_after(at("a", 6.0, 9.0), "now")
    assert not at("a", 6.0, 9.0).is_after(at("now", 5.0, 0.0), "now")
    assert at("b", 1.0, 9.0).is_after(at("a", 6.0, 8.0), "now")


def test_all_requests_of_the_time_without_an_agent_take_effect_at_its_start(tmp_path: Path) -> None:
    for number in range(500):
        operator_requests.record_forget(tmp_path, "nvlinks", f"gpu/{number}", "x" * 200)
    assert (tmp_path / FILE).stat().st_size > operator_requests.MAX_BYTES
    found = reader(tmp_path)
    found.read_ahead()
    assert len(list(found.forgets.after(0))) == 500
    assert found.left_out() == ()


def test_requests_that_are_dropped_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "MAX_KEPT", 2)
    for number in range(3):
        operator_requests.record_forget(tmp_path, "nvlinks", f"gpu/{number}", "")
    found = reader(tmp_path)
    found.read_ahead()
    assert [each.why for each in found.left_out()] == ["1 requests were dropped; repeat them"]
