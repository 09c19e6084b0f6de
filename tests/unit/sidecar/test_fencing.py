from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.protocol import codec
from holdfast.protocol.launcher_messages import Launch
from holdfast.protocol.lineage import MOST, Lineage
from holdfast.protocol.member_messages import MAX_SKIPPED, KnownHistory, MemberOrder
from holdfast.snapshot.member_directory import OBEYED, TOLD
from sidecar.fencing import OrderFence, OrderVersion


def test_orders_older_than_one_already_obeyed_are_refused_even_after_a_restart(tmp_path: Path) -> None:
    obeyed = OrderFence(tmp_path)
    assert obeyed.refusal(OrderVersion()) == ""
    obeyed.accept(OrderVersion(2, 5))
    obeyed.accept(OrderVersion(1, 9))  # an older version is never accepted
    for each in (obeyed, OrderFence(tmp_path)):
        assert each.newest == OrderVersion(2, 5)
        assert "a supervisor of epoch 2 has taken over the run" in each.refusal(OrderVersion(1, 9))
        assert "this member is already in generation 5" in each.refusal(OrderVersion(2, 4))
        assert not any(
            each.refusal(at) for at in (OrderVersion(2, 5), OrderVersion(2, 6), OrderVersion(3, 0))
        )
    assert [path.name for path in tmp_path.iterdir()] == [OBEYED]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"epoch": "3"}', '{"epoch": 1, "more": 2}', "9" * 9000])
def test_a_damaged_file_loses_only_its_content(content: str, tmp_path: Path) -> None:
    (tmp_path / OBEYED).write_text(content)
    assert OrderFence(tmp_path).newest == OrderVersion()


def test_a_folder_that_cannot_be_written_does_not_prevent_obeying_an_order(tmp_path: Path) -> None:
    obeyed = OrderFence(tmp_path / "missing")
    obeyed.accept(OrderVersion(3, 1))
    assert obeyed.newest == OrderVersion(3, 1)


def test_the_history_in_orders_survives_the_sidecar_and_an_older_supervisor(
    tmp_path: Path,
) -> None:
    began, anew = (Lineage(1, 0),), (Lineage(2, 0),)
    launch = Launch(2, 1, 1, "", 0, 0, 0.0, skip=(7,))
    obeyed = OrderFence(tmp_path)
    assert obeyed.history == KnownHistory()
    assert obeyed.learn(MemberOrder("run", 1, lineage=began)) == began
    assert obeyed.learn(MemberOrder("run", 2, launch, lineage=anew)) == anew
    assert obeyed.learn(MemberOrder("secure", 1, lineage=began)) == anew, (
        "this supervisor does not know the newer generation"
    )
    assert obeyed.learn(MemberOrder("secure", 2, lineage=anew)) == anew
    for each in (obeyed, OrderFence(tmp_path)):
        assert each.history == KnownHistory(2, anew, (7,))
    back = (*began, Lineage(3, 9))
    assert obeyed.learn(MemberOrder("idle", 3, lineage=back)) == back, "a failed start must be undone"
    assert [path.name for path in tmp_path.iterdir()] == [TOLD]


def test_the_longest_possible_history_is_read_back(tmp_path: Path) -> None:
    longest = tuple(Lineage(1_000_000 + n, 1_000_000_000 + n) for n in range(MOST))
    OrderFence(tmp_path).learn(MemberOrder("idle", 1_000_300, lineage=longest))
    assert OrderFence(tmp_path).history.lineage == longest
    (tmp_path / TOLD).write_text("{")
    assert OrderFence(tmp_path).history == KnownHistory()


def test_a_history_has_no_more_skipped_steps_than_a_report_may_list(tmp_path: Path) -> None:
    skip = tuple(range(2 * MAX_SKIPPED))
    launch = Launch(4, 1, 1, "127.0.0.1", 1, -1, 0.01, skip)
    OrderFence(tmp_path).learn(MemberOrder("run", 4, launch))
    history = OrderFence(tmp_path).history
    assert history.skip == skip[MAX_SKIPPED:]
    assert codec.decode(KnownHistory, codec.encode(history)) == history
