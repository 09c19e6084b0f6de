"""The settings of a sidecar, on one machine and in a pod."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.protocol import defaults
from sidecar import config

HERE = {
    "HOLDFAST_MEMBER": "m0",
    "HOLDFAST_NODE": "n0",
    "HOLDFAST_NPROC": "4",
    "HOLDFAST_DIRECTORY": "/run/holdfast",
    "HOLDFAST_CHECKPOINTS": "/checkpoints",
    "HOLDFAST_SUPERVISOR": "http://127.0.0.1:9",
    "HOLDFAST_TOKEN_FILE": "/token",
}
POD = {
    "HOLDFAST_ADDRESS": "10.0.0.7",
    "HOLDFAST_CA": "PEM\n",
    "HOLDFAST_STORAGE": "reported",
    "HOLDFAST_HANG_FLOOR_S": "600",
}


def test_on_one_machine_no_report_is_prepared_for_a_remote_supervisor() -> None:
    found = config.from_environment(HERE)
    assert (found.member, found.nproc, found.directory) == ("m0", 4, Path("/run/holdfast"))
    assert (found.address, found.certificates, found.reports_storage, found.is_pod) == ("", "", False, False)
    assert found.hang_floor_s == defaults.HANG_FLOOR_S


def test_a_pod_has_its_own_address_certificates_and_storage() -> None:
    found = config.from_environment({**HERE, **POD})
    assert (found.address, found.certificates) == ("10.0.0.7", "PEM\n")
    assert (found.reports_storage, found.is_pod) == (True, True)
    assert found.hang_floor_s == 600.0


def test_checkpoints_may_be_in_object_storage() -> None:
    found = config.from_environment({**HERE, "HOLDFAST_OBJECTS": "s3://bucket/runs/a"})
    assert str(found.objects) == "s3://bucket/runs/a"
    assert config.from_environment({**HERE, "HOLDFAST_OBJECTS": ""}).objects is None
    with pytest.raises(ValueError, match="each job needs its own prefix"):
        config.from_environment({**HERE, "HOLDFAST_OBJECTS": "s3://bucket"})


@pytest.mark.parametrize("word", ["", "read", "REPORTED"])
def test_only_one_value_enables_storage_reports(word: str) -> None:
    assert not config.from_environment({**HERE, "HOLDFAST_STORAGE": word}).reports_storage


@pytest.mark.parametrize("missing", HERE)
def test_missing_settings_are_named(missing: str) -> None:
    with pytest.raises(KeyError, match=missing):
        config.from_environment({key: value for key, value in HERE.items() if key != missing})


def test_the_token_is_read_each_time_because_the_kubelet_renews_it(tmp_path: Path) -> None:
    path = tmp_path / "token"
    found = config.from_environment({**HERE, "HOLDFAST_TOKEN_FILE": str(path)})
    for token in ("first", "second"):
        path.write_text(f"{token}\n")
        assert found.token == token
