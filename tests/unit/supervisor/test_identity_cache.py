from __future__ import annotations

from supervisor.identity_cache import by_identity


def test_a_result_is_reused_for_the_identical_arguments_only() -> None:
    asked: list[tuple[list[int], int]] = []

    @by_identity(2)
    def total(numbers: list[int], factor: int) -> int:
        asked.append((numbers, factor))
        return factor * sum(numbers)

    first, equal, third = [1, 2], [1, 2], [4]
    assert [total(first, 2), total(first, 2), total(equal, 2), total(first, 2)] == [6, 6, 6, 6]
    assert [each[0] is first for each in asked] == [True, False]
    assert (total(third, 1), total(first, 2), len(asked)) == (4, 6, 4), "only the last two are kept"
