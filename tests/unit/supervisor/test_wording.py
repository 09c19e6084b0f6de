from __future__ import annotations

from typing import Any

import pytest

from supervisor import wording
from supervisor.wording import sentence
from tests.unit.supervisor.status_samples import incident, opened


def fault(kind: str, rank: int, detail: str, hung: str = "", **changed: Any) -> dict[str, Any]:
    faults = [{"kind": kind, "rank": rank, "member": "m-1", "detail": detail, "hung": hung}]
    return incident(kind=kind, rank=rank, faults=faults, **changed)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            incident(),
            "rank 1 was killed by SIGKILL at step 812; back in 0.13 s, 0 steps lost",
        ),
        (
            fault("hang", 3, "rank 3 hangs: it is stopped (state T)", "it is stopped (state T)"),
            "rank 3 hung at step 812: it is stopped (state T); back in 0.13 s, 0 steps lost",
        ),
        (
            fault("hang", 3, "rank 3 hangs: it is stopped (state T)", recovered_s=2.25),  # an older record
            "rank 3 hangs: it is stopped (state T) at step 812; back in 2.2 s, 0 steps lost",
        ),
        (
            fault("nan", 0, "rank 0 computed a loss of nan at step 7", step=7, lost_steps=1),
            "rank 0 computed a loss of nan at step 7; back in 0.13 s, 1 step lost",
        ),
        (
            incident(skipped_steps=[812]),
            "rank 1 was killed by SIGKILL at step 812; back in 0.13 s, 0 steps lost; step 812 is skipped from"
            " now on",
        ),
        (
            opened(),
            "rank 1 was killed by SIGKILL at step 812; not recovered yet",
        ),
        (
            incident(recovered_s=None, remedy="stop"),
            "rank 1 was killed by SIGKILL at step 812; the run stopped",
        ),
        (
            incident(faults=[], kind="hang"),
            "rank 1 hung at step 812; back in 0.13 s, 0 steps lost",
        ),
        (
            incident(faults=[], kind="member_lost"),
            "member m-1 was lost at step 812; back in 0.13 s, 0 steps lost",
        ),
        (
            fault("member_lost", 0, "member m0 is lost", lost_steps=2, lost_at_least=True),
            "member m0 is lost at step 812; back in 0.13 s, at least 2 steps lost",
        ),
        (
            fault("member_lost", 0, "member m0 is lost", lost_steps=0, lost_at_least=True),
            "member m0 is lost at step 812; back in 0.13 s, number of lost steps unknown",
        ),
        ({"id": "i-0001"}, "a rank failed; not recovered yet"),
    ],
)
def test_an_incident_is_one_plain_sentence(told: dict[str, Any], said: str) -> None:
    assert sentence(told) == said


@pytest.mark.parametrize("kind", ["exception", "exit", "victim"])
def test_words_of_the_script_do_not_replace_the_step(kind: str) -> None:
    text = "rank 1 raised ValueError: stepsize must exceed the step of the schedule"
    assert wording.what(fault(kind, 1, text)) == f"{text} at step 812"


def test_a_detail_in_our_own_words_that_names_a_step_is_not_followed_by_another() -> None:
    text = "rank 1 exited with code 0 in the middle of its loop, after step 811"
    assert wording.what(fault("crash", 1, text)) == text
    assert wording.what(fault("crash", 1, "rank 1 exited in stepping.py")).endswith(" at step 812")


def test_the_sentence_names_the_blamed_fault_and_not_its_victim() -> None:
    faults = [
        {"kind": "victim", "rank": 0, "detail": "rank 0 raised ConnectionError"},
        {"kind": "crash", "rank": 1, "detail": "rank 1 was killed by SIGSEGV"},
    ]
    assert sentence(incident(faults=faults)).startswith("rank 1 was killed by SIGSEGV at step 812;")


def test_a_detail_of_any_length_and_shape_stays_one_short_line() -> None:
    said = sentence(fault("exception", 1, "rank 1 raised ValueError:\n\n" + "x" * 10_000))
    assert said.startswith("rank 1 raised ValueError: xxx")
    assert "\n" not in said
    assert len(said) < 250


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0 ms"), (0.0042, "4 ms"), (0.0994, "99 ms"), (0.0996, "0.10 s"), (0.131, "0.13 s"),
     (0.996, "1.0 s"), (2.25, "2.2 s"), (9.96, "10 s"), (41.4, "41 s"), (119.4, "119 s"),
     (120, "2 min"), (200, "3 min 20 s"), (7199.6, "2 h"), (7500, "2 h 5 min"),
     (200_000, "2 d 7 h")],
)  # fmt: skip
def test_durations_have_the_significant_digits(value: float, said: str) -> None:
    assert wording.seconds(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0.0 %"), (0.5, "50.0 %"), (0.99214, "99.21 %"), (0.999999, "99.99 %"), (1, "100.00 %")],
)
def test_a_share_below_one_is_never_shown_as_all(value: float, said: str) -> None:
    assert wording.percent(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [(None, "-"), (2.41312, "2.413"), (0.012345, "0.0123"), (116_000.0, "116,000"), (0.0, "0.0000"),
     (1e-7, "1.000e-07"), (1e9, "1.000e+09"), (-3.5, "-3.500"), (float("nan"), "nan")],
)  # fmt: skip
def test_numbers_have_the_significant_digits(value: float | None, said: str) -> None:
    assert wording.number(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "0.977 KiB"), (3_000_000, "2.86 MiB"),
     (2**40, "1 TiB")],
)  # fmt: skip
def test_sizes_have_suitable_units(value: int, said: str) -> None:
    assert wording.size(value) == said


def test_a_table_is_aligned() -> None:
    rows = [("a", "1", "x"), ("long", "22", "")]
    assert wording.table(("NAME", "N", "REST"), rows, frozenset({1})) == [
        "NAME   N  REST",
        "a      1  x",
        "long  22",
    ]


def test_unknown_figures_of_a_script_that_keeps_its_own_state_are_named() -> None:
    resume = {"step": 0, "source": "none", "generation": 3}
    said = wording.sentence(incident(lost_steps=None, resume=resume, own_state=True))
    assert said == (
        "rank 1 was killed by SIGKILL at optimizer step 812 since the restart;"
        " back in 0.13 s, number of lost steps unknown"
    )
    first = incident(own_state=True, generation=1)
    assert wording.what(first) == "rank 1 was killed by SIGKILL at step 812"


def test_a_row_of_a_table_is_one_line_whatever_its_cells_contain() -> None:
    rows = [("a\nb", "\x1b[31m1\x1b[0m"), ("c\td\r\n\u2028e", "22")]
    assert wording.table(("NAME", "N"), rows, frozenset({1})) == ["NAME    N", "a b     1", "c d e  22"]
