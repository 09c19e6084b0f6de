"""Any content of an operator's file results in a policy or in a list of mistakes."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from nodeagent.model import Action, Level
from nodeagent.policy.loading import load, shipped
from nodeagent.policy.rules import Bound, Clears, HealthPolicy
from nodeagent.policy.validation import BadPolicy

POLICY = shipped()


_words = st.sampled_from(
    [
        "level", "action", "clears", "hold_s", "recurs_bursts", "degraded", "unhealthy", "states",
        "at", "need", "clear_at", "healthy", "reset_gpu", "lost", "79", "145", "ecc_sbe",
        "gpu_state", "oom", "x\ty",
    ]
)  # fmt: skip
# More digits than Python converts to decimal, which TOML can write only in hexadecimal.
_huge = st.integers(4000, 6000).map(lambda digits: 16**digits - 1)
_scalars = st.one_of(
    _words, st.booleans(), st.integers(), _huge, st.floats(), st.text(max_size=8), st.integers(0, 9)
)
_values: st.SearchStrategy[Any] = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_words, inner, max_size=4),
    max_leaves=8,
)
_entries = st.dictionaries(_words, st.dictionaries(_words, _values, max_size=4), max_size=3)
_documents = st.dictionaries(
    st.sampled_from(["checks", "xid", "sxid", "kernel", "xids"]), _entries, max_size=4
)


_levels = st.sampled_from([each.name.lower() for each in Level])
_actions = st.sampled_from([each.name.lower() for each in Action])
_meanings = st.fixed_dictionaries(
    {},
    optional={
        "level": _levels,
        "action": _actions,
        "clears": st.sampled_from([each.value for each in Clears]),
        "hold_s": st.integers(0, 600),
        "recurs_bursts": st.sampled_from([0, 2, 3]),
        "recurs_level": _levels,
        "recurs_action": _actions,
    },
)
_bounds = st.just(False) | st.fixed_dictionaries({"at": st.integers(0, 20)}, optional={"of": st.just(4)})
_limits = st.fixed_dictionaries(
    {}, optional={"degraded": _bounds, "unhealthy": _bounds, "clear_at": st.integers(0, 20)}
)
_sensible = st.fixed_dictionaries(
    {},
    optional={
        "xid": st.dictionaries(
            st.sampled_from(["13", "31", "74", "79", "145", "200"]), _meanings, max_size=2
        ),
        "sxid": st.dictionaries(st.sampled_from(["12020", "7"]), _meanings, max_size=1),
        "kernel": st.dictionaries(st.just("oom"), _meanings, max_size=1),
        "checks": st.dictionaries(st.just("gpu_temperature_margin"), _limits, max_size=1),
    },
)


def toml(value: Any) -> str:
    """Return a value as TOML writes it inline."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(key)} = {toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(char):08x}" for char in value) + '"'
    if isinstance(value, int) and value.bit_length() > 64 and value > 0:
        return hex(value)
    return str(value).lower()


@given(_documents)
@example({"xid": {"79": {"action": "replace"}}})
@example({"xid": {"79": {"hold_s": 16**5000}}})
@example({"checks": {"ecc_sbe": {"degraded": {"at": 16**5000}, "unhealthy": [16**5000], "states": 16**5000}}})
@example({"xid": {"79": {"level": {"a": [16**5000]}, "recurs_bursts": 16**5000}}})
@example({"xid": {"79": {"level": "x", "hold_s": 16**300}}})
def test_any_document_is_a_policy_or_a_list_of_mistakes(document: dict[str, Any]) -> None:
    assert is_one_or_the_other("\n".join(f"{key} = {toml(value)}" for key, value in document.items()))


@given(_sensible)
@example({"xid": {"79": {"level": "healthy"}, "13": {"level": "unhealthy"}}})
@example({"checks": {"gpu_temperature_margin": {"degraded": {"at": 7}}}})
def test_an_accepted_policy_never_contradicts_itself(document: dict[str, Any]) -> None:
    found = loaded("\n".join(f"{key} = {toml(value)}" for key, value in document.items()))
    if not isinstance(found, HealthPolicy):
        return
    for meaning in (found.meaning("kernel_oom", 0), *found.xids.values(), found.meaning("sxid", 7)):
        assert meaning.level is not Level.HEALTHY or meaning.action <= Action.RESTART_APP
        recurs = meaning.recurs
        assert recurs is None or (recurs.level, recurs.action) > (meaning.level, meaning.action)
    margin = found.rules["gpu_temperature_margin"]
    limits = [each.at for each in (margin.clear_at and Bound(margin.clear_at), margin.degraded) if each]
    limits += [margin.unhealthy.at] if margin.unhealthy else []
    assert limits == sorted(limits, reverse=True), (
        "a falling value must pass clear, degraded and unhealthy in this order"
    )


@given(st.text(max_size=60))
def test_any_text_is_a_policy_or_a_list_of_mistakes(text: str) -> None:
    assert is_one_or_the_other(text)


def is_one_or_the_other(text: str) -> bool:
    found = loaded(text)
    if isinstance(found, HealthPolicy):
        return bool(found.meaning("xid", 79).name)
    return bool(found) and all(message.isprintable() for message in found)


def loaded(text: str) -> HealthPolicy | tuple[str, ...]:
    try:
        return load(text)
    except BadPolicy as error:
        return error.messages
