from __future__ import annotations

from collections.abc import Container, Mapping
from math import isfinite

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.sysfs.infiniband import (
    DOWN,
    NOT_EXPECTED,
    SLOW,
    UNUSED,
    UP,
    ExpectedPorts,
    IbPort,
    IbPortState,
    best_rates,
    judge_ports,
    parse_active,
    parse_rate_gbps,
)


def port(
    name: str,
    *,
    active: bool = True,
    rate: float | None = 400.0,
    model: str = "cx7",
    layer: str = "InfiniBand",
    function: str = "0",
) -> IbPortState:
    pci = f"/sys/devices/pci0000:00/0000:3b:00.{function}"
    return IbPortState(IbPort(name, "1", "", pci, name, model, layer), active, rate, "")


def states(
    *ports: IbPortState,
    before: Mapping[str, float] | None = None,
    expected: ExpectedPorts | None = None,
    hidden: int = 0,
    accepted: Container[str] = (),
) -> dict[str, float]:
    found = judge_ports(ports, before or {}, expected or ExpectedPorts(), hidden, accepted)
    return {each.place.device: state for each, state, _ in found}


def test_a_port_that_was_up_and_is_not_active_is_down() -> None:
    assert states(port("a", active=False), before={"a": 400.0}) == {"a": DOWN}


def test_a_port_that_was_never_up_and_has_no_peer_has_no_state() -> None:
    assert states(port("a", active=False)) == {}
    assert states(port("a", active=False), port("b", active=False)) == {}


def test_a_port_that_was_never_up_is_only_unused_if_a_similar_one_is_up() -> None:
    assert states(port("a", active=False), port("b")) == {"a": UNUSED, "b": UP}
    assert states(port("a", active=False), port("b"), accepted={"a"}) == {"a": NOT_EXPECTED, "b": UP}
    assert states(port("a", active=False), port("b"), expected=ExpectedPorts(ports=2)) == {"a": DOWN, "b": UP}


def test_other_adapters_other_link_layers_and_second_ports_are_not_peers() -> None:
    for other in (port("b", model="cx6"), port("b", layer="Ethernet"), port("b", function="1")):
        assert states(port("a", active=False), other) == {"b": UP}


def test_an_operators_expectation_takes_precedence_over_earlier_states() -> None:
    down = port("a", active=False)
    enough = states(down, port("b"), before={"a": 400.0}, expected=ExpectedPorts(ports=1))
    assert enough == {"a": NOT_EXPECTED, "b": UP}
    assert states(down, port("b", model="cx6"), expected=ExpectedPorts(ports=2)) == {"a": DOWN, "b": UP}
    hidden = states(down, port("b"), expected=ExpectedPorts(ports=2), hidden=1)
    assert hidden == {"a": NOT_EXPECTED, "b": UP}


def test_a_port_is_slow_below_its_best_or_expected_rate() -> None:
    assert states(port("a", rate=200.0), before={"a": 400.0}) == {"a": SLOW}
    assert states(port("a", rate=200.0), before={"a": 400.0}, expected=ExpectedPorts(rate_gbps=200.0)) == {
        "a": UP
    }
    assert states(port("a", rate=200.0), expected=ExpectedPorts(rate_gbps=400.0)) == {"a": SLOW}
    assert states(port("a", rate=None), before={"a": 400.0}) == {"a": UP}


def test_the_best_rates_are_those_of_active_ports_and_bounded() -> None:
    found = best_rates(
        {"a": 400.0, "old": 100.0}, [port("a", rate=200.0), port("b"), port("c", active=False)], most=2
    )
    assert found == {"a": 400.0, "b": 400.0}


def test_only_the_state_active_counts_as_active() -> None:
    assert parse_active("4: ACTIVE")
    for state in ("1: DOWN", "2: INIT", "3: ARMED", "5: ACTIVE_DEFER"):
        assert parse_active(state) is False
    assert parse_active("N/A") is None
    assert parse_active("") is None


def test_rates_are_parsed_in_the_kernels_format() -> None:
    assert parse_rate_gbps("400 Gb/sec (4X NDR)") == 400.0
    assert parse_rate_gbps("2.5 Gb/sec (1X SDR)") == 2.5
    assert parse_rate_gbps("N/A") is None


@given(st.text(max_size=30))
def test_no_text_makes_the_parsers_raise(text: str) -> None:
    assert parse_active(text) in (True, False, None)
    rate = parse_rate_gbps(text)
    assert rate is None or isfinite(rate)
