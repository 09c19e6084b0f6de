from __future__ import annotations

import json
from typing import Any

import pytest

from nodeagent.cli import explanations
from nodeagent.cli.explanations import UnknownCode, look_up
from nodeagent.policy.loading import load, shipped
from nodeagent.policy.rules import HealthPolicy

POLICY = shipped()


def described(policy: HealthPolicy, subject: str, code: str) -> dict[str, Any]:
    found = look_up(policy, subject, code)
    assert not isinstance(found, UnknownCode), found.line
    return found


def explain(policy: HealthPolicy, subject: str, code: str) -> str:
    return explanations.explanation(described(policy, subject, code))


def test_an_xid_is_explained_from_its_meaning_to_the_operators_settings() -> None:
    assert explain(POLICY, "xid", "79").splitlines()[:-1] == [
        "Xid 79: GPU dropped off the PCIe bus",
        "  fault     hardware",
        "  level     unhealthy: the node gets no new work",
        "  action    reboot_node",
        "  ends      a reboot, then 10 min without another",
        "  again     2 times within 7 d: unhealthy, replace",
        "  driver    its own verdict (Xid 154) takes precedence, on R565 and later",
        "  source    NVIDIA Xid catalogue; NVIDIA cause matrix; gpud; AWS health check",
        "  note      drain first",
        "  operator  sets nothing here",
    ]


def test_the_operators_settings_are_shown() -> None:
    text = explain(load('[xid.79]\naction = "replace"'), "xid", "79")
    assert "action    replace" in text
    assert "is overridden by the operator" in text
    assert "operator  sets action" in text
    assert "a repetition changes nothing" in text
    bound = explain(load("[checks.ecc_sbe]\ndegraded.at = 200"), "check", "ecc_sbe")
    assert "degraded  more than 200 errors in 1 min -> none" in bound
    assert "operator  sets degraded" in bound


def test_a_decoded_code_shows_what_its_line_can_contain() -> None:
    assert "register 1, bit 0, bit 23, bit 30 -> healthy, none" in explain(POLICY, "xid", "74")
    assert "NETIR_LINK_DOWN/NETIR_LINK_EVT, reason 2, reason 4, reason 10 ->" in explain(POLICY, "xid", "149")
    assert "drain_p2p -> degraded, reset_gpu" in explain(POLICY, "xid", "154")
    assert "non-fatal -> degraded, none" in explain(POLICY, "sxid", "12001")
    assert "details in its line" not in explain(POLICY, "sxid", "12020"), "this SXid is always fatal"
    assert "details in its line" not in explain(load('[xid.74]\nlevel = "healthy"'), "xid", "74")


def test_a_counter_that_a_boot_restarts_says_so() -> None:
    line = "  counted   from the first reading after a boot"
    assert line in explain(POLICY, "check", "net_carrier").splitlines()
    assert line not in explain(POLICY, "check", "ecc_dbe").splitlines()


def test_a_check_shows_its_limits_and_its_clearing_condition() -> None:
    margin = explain(POLICY, "check", "gpu_temperature_margin")
    assert "degraded  5 °C or less, in 3 of 4 samples -> none" in margin
    assert "unhealthy 0 °C or less, for 1 min -> contact_support" in margin
    assert "ends      after 2 min above 10" in margin
    lost = explain(POLICY, "check", "gpu_state")
    assert "state     lost -> unhealthy, reboot_node: NVML reports the GPU as lost" in lost
    assert "ends      a reboot" in explain(POLICY, "kernel", "mlx5_hardware_error")


@pytest.mark.parametrize(
    ("subject", "code", "told"),
    [
        ("xid", "7x", ["did you mean 7?", "expected 1-178, 185"]),
        ("xid", "200", ["not in the table", "1-178, 185", "treated as healthy (action: none)"]),
        ("xid", "-1", ["is not a code"]),
        ("xid", "9" * 5000, ["is not a code"]),
        ("xid", "٧٩", ["is not a code"]),
        ("sxid", "99", ["11000-11099", "treated as degraded (action: none)"]),
        ("check", "ecc_sb", ["did you mean ecc_sbe?", "gpu_state"]),
        ("check", "kernel_oom", ["is not known"]),
        ("kernel", "nfs", ["did you mean nfs_lock_lost?"]),
        ("xids", "79", ["did you mean xid?", "xid, sxid, check, kernel"]),
    ],
)
def test_an_unknown_name_gives_one_line_with_the_known_ones(subject: str, code: str, told: list[str]) -> None:
    found = look_up(POLICY, subject, code)
    assert isinstance(found, UnknownCode)
    assert "\n" not in found.line
    assert all(each in found.line for each in told), found.line


def test_everything_can_be_explained_as_text_and_as_json() -> None:
    names = [name for name in POLICY.rules if not name.startswith("kernel_")]
    kernel = [name.removeprefix("kernel_") for name in POLICY.rules if name.startswith("kernel_")]
    subjects = [("xid", str(code)) for code in POLICY.xids] + [("sxid", "12020"), ("sxid", "24000")]
    for subject, code in (
        subjects + [("check", each) for each in names] + [("kernel", each) for each in kernel]
    ):
        text = explain(POLICY, subject, code)
        assert "source    " in text, text
        assert "  ends      " in text, text
        assert json.loads(json.dumps(described(POLICY, subject, code)))["policy"] == POLICY.version


def test_json_contains_values_instead_of_text() -> None:
    found = described(load('[xid.79]\naction = "replace"'), "xid", "79")
    assert (found["action"], found["clears"], found["overridden"]) == ("replace", "replaced", True)
    assert found["operator_set"] == ["action"]
    found = described(POLICY, "xid", "39")
    assert found["recurs"] == {
        "bursts": 5, "within_s": 86400, "level": "degraded", "action": "contact_support",
        "same_variant": False,
    }  # fmt: skip
