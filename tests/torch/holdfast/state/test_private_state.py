from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast.errors import BadInput
from holdfast.state.loss_guard import LossGuard
from holdfast.state.private_state import COMPARED_STEPS, PrivateState, first_changed, parse_sections

CPU = torch.device("cpu")


class Position:
    """A typical sampler of a user."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Buffered(nn.Module):
    slim: torch.Tensor
    scratch: torch.Tensor

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("slim", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("scratch", torch.zeros(9), persistent=False)


def state(model: nn.Module, position: Position, guard: LossGuard | None = None) -> PrivateState:
    return PrivateState({"model": model}, {"data": position}, CPU, guard)


def draw() -> tuple[object, ...]:
    return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()


def test_every_generator_continues_from_its_restored_state() -> None:
    draw()  # leaves a cached Gaussian in two of the generators
    kept = state(Buffered(), Position())
    blob = kept.collect()
    expected = draw()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    sections = kept.restore(blob)
    kept.restore_random(sections)
    assert draw() == expected


def test_saved_buffers_are_restored_bit_for_bit_and_others_are_left_alone() -> None:
    one, other = Buffered(), Buffered()
    one.norm(torch.randn(8, 3))
    one.slim.copy_(torch.tensor([1.0, float("nan")]))
    other.scratch.fill_(7.0)
    blob = state(one, Position()).collect()
    state(other, Position()).restore(blob)
    for (name, here), (_, there) in zip(one.named_buffers(), other.named_buffers(), strict=True):
        if name != "scratch":
            assert here.view(-1).view(torch.uint8).tolist() == there.view(-1).view(torch.uint8).tolist()
    assert other.scratch.tolist() == [7.0] * 9


def test_a_buffer_that_the_module_has_replaced_is_saved() -> None:
    one, other = Buffered(), Buffered()
    kept = state(one, Position())
    one.slim = one.slim + torch.tensor([2.0, 3.0], dtype=torch.bfloat16)
    state(other, Position()).restore(kept.collect())
    assert other.slim.tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int64, torch.uint8, torch.complex64, torch.float64, torch.float8_e4m3fn],
    ids=str,
)
def test_buffers_of_any_type_are_restored(dtype: torch.dtype) -> None:
    def made(content: list[float]) -> nn.Module:
        module = nn.Module()
        module.register_buffer("table", torch.tensor([content, content]).to(dtype).t())
        return module

    one, other = made([1.0, 0.0, 1.0]), made([0.0, 0.0, 0.0])
    blob = PrivateState({"model": one}, {}, CPU).collect()
    PrivateState({"model": other}, {}, CPU).restore(blob)
    assert repr(other.get_buffer("table")) == repr(one.get_buffer("table"))


def test_positions_and_the_loss_guards_history_are_restored() -> None:
    learned, fresh = LossGuard(), LossGuard()
    for loss in range(20):
        learned.learn(loss / 7, 0.5)
    blob = state(Buffered(), Position(41), learned).collect()
    position = Position()
    state(Buffered(), position, fresh).restore(blob)
    assert position.at == 41
    assert fresh.learned() == learned.learned()


def test_a_blob_without_a_guard_leaves_the_guard_empty() -> None:
    blob = state(Buffered(), Position()).collect()
    guard = LossGuard()
    guard.learn(1.0, None)
    state(Buffered(), Position(), guard).restore(blob)
    assert guard.learned() == LossGuard().learned()


def test_a_buffer_of_another_model_is_named() -> None:
    blob = state(Buffered(3), Position()).collect()
    with pytest.raises(BadInput, match=r"from a different model: model\.norm\.running_mean differs"):
        state(Buffered(4), Position()).restore(blob)
    with pytest.raises(BadInput, match=r"from a different model: model\.slim is not in the script's model"):
        state(nn.BatchNorm1d(3), Position()).restore(renamed(blob))


def renamed(blob: bytes) -> bytes:
    """Return the blob with the norm's buffers named like those of a bare norm."""
    return framed(**{name.replace(".norm.", "."): content for name, content in parse_sections(blob).items()})


def test_state_that_is_not_json_is_named() -> None:
    position = Position()
    position.at = {1, 2}  # type: ignore[assignment]
    with pytest.raises(BadInput, match=r"data\['at'\] is a set: state that is private to a rank must be"):
        state(Buffered(), position).collect()


def framed(**sections: bytes) -> bytes:
    parts = [b"HFPS\x01"]
    for name, content in sections.items():
        parts += [len(name).to_bytes(2, "little"), len(content).to_bytes(8, "little"), name.encode(), content]
    return b"".join(parts)


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"PK\x03\x04",
        b"HFPS\x01\x00",
        b"HFPS\x01" + b"\xff" * 10,
        framed(objects=b"{"),
        framed(objects=b"[]"),
        framed(objects=b"[" * 100_000),
        framed(objects=b'{"data":[]}'),
        framed(**{"guard:losses": b"123"}),
        framed(**{"guard:losses": b"\xff" * 8}),
    ],
)
def test_a_blob_that_no_rank_wrote_is_bad_input(blob: bytes) -> None:
    with pytest.raises(BadInput):
        PrivateState({}, {"data": Position()}, CPU, LossGuard()).restore(blob)


class Given:
    """An object whose state is always the same mapping, changed in place."""

    def __init__(self, **state: object) -> None:
        self.state = state

    def state_dict(self) -> dict[str, object]:
        return self.state

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.state = state


@pytest.mark.parametrize(
    ("before", "after"),
    [(1, 2), (1, True), (1, 1.0), (0.0, -0.0), (None, 0), ("a", "b"), ([1], [2]), ({"a": 1}, {"a": 2})],
)
def test_each_change_within_an_object_is_detected(before: object, after: object) -> None:
    held = Given(value=before, other=7)
    kept = PrivateState({}, {"data": held}, CPU)
    first = kept.quick()
    assert kept.quick() == first
    held.state["value"] = after
    assert kept.quick() != first
    assert json.loads(dict(kept.quick())["objects"])["data"]["value"] == after


def test_a_change_within_a_list_of_an_object_is_detected() -> None:
    order = [3, 1, 2]
    kept = PrivateState({}, {"data": Given(order=order, at=1)}, CPU)
    first = kept.quick()
    order.reverse()
    assert kept.quick() != first


@pytest.mark.parametrize("name", ["torch", "python", "numpy"])
@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 17, b"\xff" * 2509, b"\xff" * 5000])
def test_random_states_that_no_generator_produced_are_bad_input(name: str, content: bytes) -> None:
    kept = PrivateState({}, {}, CPU)
    before = dict(kept.random())
    try:
        with pytest.raises(BadInput, match="a random generator cannot load its state"):
            kept.restore_random({name: content})
    finally:
        kept.restore_random(before)


@given(st.integers(0, 6000), st.integers(1, 255))
def test_a_flipped_byte_is_bad_input_or_another_state(at: int, mask: int) -> None:
    kept = PrivateState({"norm": nn.BatchNorm1d(3)}, {"data": Position()}, CPU, LossGuard())
    before = dict(kept.random())
    blob = bytearray(kept.collect())
    blob[at % len(blob)] ^= mask
    try:
        kept.restore_random(kept.restore(bytes(blob)))
        assert kept.collect()
    except BadInput:
        pass
    finally:
        kept.restore_random(before)


class Growing(nn.Module):
    """Buffers that are created and enlarged during training."""

    made: torch.Tensor | None
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("made", None)
        self.register_buffer("table", torch.zeros(2))


def test_buffers_that_grow_are_restored() -> None:
    one, other = Growing(), Growing()
    kept = PrivateState({"model": one}, {}, CPU)
    PrivateState({"model": other}, {}, CPU).restore(kept.collect())
    assert other.made is None
    one.made, one.table = torch.arange(3), torch.ones(2, 2, dtype=torch.bfloat16)
    PrivateState({"model": other}, {}, CPU).restore(kept.collect())
    assert repr((other.made, other.table)) == repr((one.made, one.table))


@pytest.mark.parametrize("shape", [b"", b"[", b"[1]", b'["int64",-4]', b'["load",3]', b'["int64",9]', b"{}"])
def test_shapes_that_no_rank_wrote_are_bad_input(shape: bytes) -> None:
    blob = framed(**{"buffer:model.table": bytes(8), "shape:model.table": shape})
    with pytest.raises(BadInput, match=r"model\.table has an invalid type or shape"):
        PrivateState({"model": Growing()}, {}, CPU).restore(blob)


def test_a_changing_buffer_that_is_not_saved_is_named() -> None:
    def named(changes: list[int]) -> list[str | None]:
        model = Buffered()
        kept = state(model, Position())
        found = []
        for done in range(8):
            if done in changes:
                model.scratch.add_(1)
            found.append(kept.transient(done))
        return found

    assert named([]) == named([0, 1]) == [None] * 8
    assert named(list(range(8))) == [None] * 4 + ["model.scratch"] + [None] * 3


def mean(model: Buffered) -> torch.Tensor:
    found = model.norm.running_mean
    assert isinstance(found, torch.Tensor)
    return found


def all_of_it(model: Buffered) -> None:
    mean(model).add_(1)


def through_data(model: Buffered) -> None:
    mean(model).data[1] = 7.0


def other_memory(model: Buffered) -> None:
    model.slim.data = model.slim.data + 1


def another_shape(model: Buffered) -> None:
    model.slim = model.slim.view(1, 2)


def gone(model: Buffered) -> None:
    model._buffers["slim"] = None


@pytest.mark.parametrize("change", [all_of_it, through_data, other_memory, another_shape, gone])
def test_a_change_of_a_buffer_is_detected_however_it_is_written(change: Callable[[Buffered], None]) -> None:
    model = Buffered()
    kept = state(model, Position())
    core = kept.core()
    assert kept.is_still(core, closely=False)
    change(model)
    assert not kept.is_still(core, closely=False)


def test_the_largest_buffers_are_named() -> None:
    assert state(Buffered(), Position()).largest(2) == [
        ("model.norm.running_mean", 12),
        ("model.norm.running_var", 12),
    ]


def test_a_buffer_that_is_assigned_in_inference_mode_is_saved_and_its_changes_are_detected() -> None:
    one, other = Growing(), Growing()
    kept = PrivateState({"model": one}, {}, CPU)
    core, versions = kept.core(), kept.versions()
    with torch.inference_mode():
        one.table = torch.ones(2) + 1
    assert kept.versions() != versions
    assert not kept.is_still(core, closely=False)
    core, versions = kept.core(), kept.versions()
    assert kept.versions() == versions
    assert kept.is_still(core, closely=True)
    PrivateState({"model": other}, {}, CPU).restore(kept.collect())
    assert other.table.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "value",
    [
        {0: 5, 1: 7},
        {True: 1, None: 2, 1.5: 3, "a": 4},
        (1, (2, [3, ("a",)])),
        [[1, 2], ({3: (4,)},)],
        {"holdfast.tuple": [1], "holdfast.pairs": {}},
        {"holdfast.pairs": [[1, 2]]},
        {"holdfast.generator": "AAAA"},
        {"holdfast.tuple": (1,)},
        {},
        (),
        {"seen": {}, "where": ()},
    ],
    ids=repr,
)
def test_keys_and_tuples_are_restored_with_their_types(value: Any) -> None:
    one, other = Given(value=value), Given()
    blob = PrivateState({}, {"data": one}, CPU).collect()
    PrivateState({}, {"data": other}, CPU).restore(blob)
    assert repr(other.state) == repr({"value": value})


def test_a_state_with_numbers_as_keys_is_restored() -> None:
    one, other = Given(), Given()
    one.state = {0: 5, 1: 7}  # type: ignore[dict-item]
    PrivateState({}, {"data": other}, CPU).restore(PrivateState({}, {"data": one}, CPU).collect())
    assert repr(other.state) == "{0: 5, 1: 7}"


@pytest.mark.parametrize(
    "inner",
    [
        '{"holdfast.pairs":5}',
        '{"holdfast.pairs":[[[1],2]]}',
        '{"holdfast.tuple":{}}',
        '{"holdfast.generator":5}',
        '{"holdfast.generator":"a"}',
        '{"holdfast.generator":""}',
    ],
)
def test_marks_that_no_rank_wrote_are_bad_input(inner: str) -> None:
    blob = framed(objects=f'{{"data":{inner}}}'.encode())
    with pytest.raises(BadInput, match="the states of its objects are not JSON"):
        PrivateState({}, {"data": Given()}, CPU).restore(blob)


class Tables(nn.Module):
    """A buffer with any memory layout."""

    table: torch.Tensor

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda each: each,
    "expanded": lambda each: each[:1, :1].expand(4, 6),
    "expanded along one": lambda each: each[:, :1].expand(4, 6),
    "windows": lambda each: each.flatten().unfold(0, 6, 2)[:4],
    "strided": lambda each: each.t().contiguous().t(),
    "every other": lambda each: torch.cat([each, each], 1)[:, ::2],
    "channels last": lambda each: each.view(1, 4, 2, 3).to(memory_format=torch.channels_last),
    "empty": lambda each: each[:0],
    "complex": lambda each: torch.complex(each, each + 1),
    "conjugate": lambda each: torch.complex(each, each + 1).conj(),
    "negative": lambda each: torch.complex(each, each + 1).conj().imag,
    "bool": lambda each: each > 1,
}


@pytest.mark.parametrize("there", LAYOUTS)
@pytest.mark.parametrize("here", LAYOUTS)
def test_a_buffer_is_restored_bit_for_bit_in_any_layout(there: str, here: str) -> None:
    saved = LAYOUTS[there](torch.randn(4, 6))
    live = LAYOUTS[here](torch.zeros(4, 6))
    if (saved.shape, saved.dtype) != (live.shape, live.dtype):
        return
    blob = PrivateState({"model": Tables(saved)}, {}, CPU).collect()
    other = Tables(live)
    PrivateState({"model": other}, {}, CPU).restore(blob)
    assert torch.equal(other.table, saved)
    if there == here:
        assert other.table.stride() == saved.stride()


def test_an_expanded_buffer_that_was_replaced_by_a_contiguous_one_is_restored_as_contiguous() -> None:
    one, other = (Tables(torch.ones(1, 1).expand(8, 8)) for _ in range(2))
    kept = PrivateState({"model": one}, {}, CPU)
    one.table = torch.randn(8, 8)
    PrivateState({"model": other}, {}, CPU).restore(kept.collect())
    assert torch.equal(other.table, one.table)
    other.table.add_(1)


def test_a_buffer_that_was_created_in_inference_mode_is_replaced_by_a_restore() -> None:
    with torch.inference_mode():
        other = Tables(torch.zeros(3))
    PrivateState({"model": other}, {}, CPU).restore(
        PrivateState({"model": Tables(torch.ones(3))}, {}, CPU).collect()
    )
    assert other.table.tolist() == [1.0] * 3


class Shared(nn.Module):
    """Buffers that share memory with a parameter, with each other, and with parts of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        table = torch.zeros(4)
        self.register_buffer("tied", self.weight.data)
        self.register_buffer("scratch", table, persistent=False)
        self.register_buffer("table", table)
        self.register_buffer("same", table)
        self.register_buffer("part", table[1:])

    def buffers_of(self) -> dict[str, list[float]]:
        return {name: buffer.tolist() for name, buffer in self.named_buffers(remove_duplicate=False)}


def test_buffers_that_share_memory_still_share_it_after_a_restore() -> None:
    one, other = Shared(), Shared()
    kept = PrivateState({"model": one}, {}, CPU)
    one.get_buffer("table").copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    core = kept.core()
    with torch.no_grad():
        one.weight.add_(1)  # as the optimizer does, which does not concern the private state
        other.weight.copy_(one.weight)
    assert kept.is_still(core, closely=True)
    PrivateState({"model": other}, {}, CPU).restore(kept.collect())
    assert other.buffers_of() == one.buffers_of()
    with torch.no_grad():
        other.weight.add_(1)
    other.get_buffer("same").add_(1)
    assert other.get_buffer("tied").tolist() == [2.0] * 4
    assert other.get_buffer("table").tolist() == [2.0, 3.0, 4.0, 5.0]
    assert other.get_buffer("part").tolist() == [3.0, 4.0, 5.0]


@pytest.mark.parametrize("name", ["tied", "table", "same", "part"])
def test_buffers_that_no_longer_share_memory_are_restored_apart(name: str) -> None:
    one, other = Shared(), Shared()
    kept = PrivateState({"model": one}, {}, CPU)
    setattr(one, name, one.get_buffer(name) + 5)
    PrivateState({"model": other}, {}, CPU).restore(kept.collect())
    assert {**other.buffers_of(), "scratch": 0} == {**one.buffers_of(), "scratch": 0}
    assert other.weight.tolist() == [0.0] * 4
    other.get_buffer(name).add_(1)
    assert other.weight.tolist() == [0.0] * 4


def test_a_blob_of_an_earlier_version_leaves_a_buffer_tied_to_its_parameter() -> None:
    other = Shared()
    with torch.no_grad():
        other.weight.fill_(7)
    raw_of = {f"buffer:model.{n}": b.numpy().tobytes() for n, b in other.named_buffers() if n != "scratch"}
    raw_of.pop("buffer:model.same", None)
    raw_of["buffer:model.table"] = bytes(16)
    PrivateState({"model": other}, {}, CPU).restore(framed(**raw_of))
    with torch.no_grad():
        other.weight.add_(1)
    assert other.get_buffer("tied").tolist() == [8.0] * 4


class Flat(nn.Module):
    """A parameter and a buffer in one storage, as when a file of weights is loaded."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.zeros(8)
        self.weight = nn.Parameter(both[:4])
        self.register_buffer("table", both[4:])


def test_a_buffer_in_the_storage_of_a_parameter_is_restored() -> None:
    one, other = Flat(), Flat()
    one.get_buffer("table").fill_(3)
    PrivateState({"model": other}, {}, CPU).restore(PrivateState({"model": one}, {}, CPU).collect())
    assert other.get_buffer("table").tolist() == [3.0] * 4
    assert other.weight.tolist() == [0.0] * 4


def test_a_buffer_that_is_registered_later_is_named() -> None:
    model = Shared()
    kept = PrivateState({"model": model}, {}, CPU)
    assert kept.added(COMPARED_STEPS[0]) is None
    model.register_buffer("later", torch.zeros(2), persistent=False)
    assert kept.added(COMPARED_STEPS[1]) is None
    model.register_buffer("table_of_later", torch.zeros(2))
    assert kept.added(COMPARED_STEPS[0] + 1) is None
    assert kept.added(COMPARED_STEPS[1]) == "model.table_of_later"


def test_a_buffer_that_copies_another_is_expected_to_continue_until_it_does_not() -> None:
    model, average = (nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)) for _ in range(2))
    kept = PrivateState({"model": model, "ema": average}, {}, CPU)

    def learn(*copied: int) -> tuple[bool, bool]:
        """Return whether the change of these layers is explained, and whether it was expected."""
        model(torch.randn(5, 2))
        core = kept.core(expected=True)
        for n in copied:
            average[n].load_state_dict(model[n].state_dict())
        still = kept.is_still(core, closely=True)
        return still or kept.learn_copies(core), still

    assert learn() == (True, True)
    assert learn(0) == (True, False), "all counts are equal, and each matches its own layer"
    assert learn(0) == (True, True)
    assert learn(0, 1) == (True, False)
    assert learn(0, 1) == (True, True)
    assert learn(1) == (True, False), "the other layer's change is no longer expected"
    assert learn(1) == (True, True)
    assert learn(0, 1) == (False, False)
    average[0].running_mean.fill_(7.0)  # type: ignore[operator]
    core = kept.core(expected=True)
    average[0].running_var.mul_(0.5)  # type: ignore[operator]
    assert not kept.learn_copies(core), "no other buffer has this content"


def test_buffers_that_change_after_a_commit_are_named_unless_they_copy_another() -> None:
    model, average = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    kept = PrivateState({"model": model, "ema": average}, {}, CPU)
    model(torch.randn(5, 2))
    core = kept.core()
    assert kept.changed_after(core) is None
    average.load_state_dict(model.state_dict())
    assert kept.changed_after(core) is None
    average.running_mean.mul_(0.5)  # type: ignore[union-attr]
    assert kept.changed_after(core) == "ema.running_mean"
    assert kept.changed_after(kept.with_buffers(core)) is None


class Drawn:
    """A script's own sampler, with its own generator."""

    def __init__(self, seed: int) -> None:
        self.generator, self.drawn = torch.Generator().manual_seed(seed), 0

    def draw(self) -> list[int]:
        self.drawn += 1
        found: list[int] = torch.randint(1000, (4,), generator=self.generator).tolist()
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "states": [self.generator.get_state()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]
        self.generator.set_state(*state["states"])


def test_a_sampler_with_its_own_generator_resumes_its_draws() -> None:
    one, other = Drawn(1), Drawn(2)
    one.draw()
    private = PrivateState({}, {"data": one}, CPU)
    before, blob = private.core(), private.collect()
    assert private.is_still(before, closely=True)
    expected = one.draw()
    assert first_changed(before, private.core()) == "data"
    PrivateState({}, {"data": other}, CPU).restore(blob)
    assert (other.draw(), other.drawn) == (expected, 2)


def test_a_tensor_in_a_private_object_is_named_unless_it_is_a_generator_state() -> None:
    given = Given()
    given.state = {"generator": torch.Generator().get_state(), "order": torch.ones(2)}
    with pytest.raises(BadInput, match=r"order.* is a Tensor"):
        PrivateState({}, {"data": given}, CPU).collect()
