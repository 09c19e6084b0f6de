from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import BadInput
from holdfast.process import gpu_assignment
from supervisor.cli import run_validation
from supervisor.cli.command_options import RunOptions
from supervisor.local import gpus as devices


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    folder = tmp_path / "dev"
    folder.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("chosen", "count"),
    [("0,1", 2), (" 0 , 3 ", 2), ("", 0), ("-1", 0), ("0,7,1", 1), ("0,0", 1),
     ("GPU-8932f937,GPU-12ab", 2), ("MIG-1,MIG-2,MIG-3", 3), ("NoDevFiles", 0)],
)  # fmt: skip
def test_the_gpus_that_cuda_would_show_are_counted(
    dev: Path, tmp_path: Path, chosen: str, count: int
) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": chosen}
    assert devices.gpus(environment, dev, tmp_path / "none") == count


def test_without_a_choice_all_are_counted(dev: Path, tmp_path: Path) -> None:
    assert devices.gpus({}, dev, tmp_path / "none") == 4


def test_without_device_nodes_the_drivers_list_is_counted(tmp_path: Path) -> None:
    for name in ("0000:17:00.0", "0000:65:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    assert devices.gpus({}, tmp_path / "none", tmp_path / "gpus") == 2


def test_a_machine_without_gpus_has_no_limit(tmp_path: Path) -> None:
    chosen = {"CUDA_VISIBLE_DEVICES": "0"}
    assert devices.gpus(chosen, tmp_path / "none", tmp_path / "none") is None


@pytest.mark.parametrize(
    ("line", "uses"),
    [
        ("cuda: Optional[str] = None", False),
        ("cuda = None", False),
        ("cuda: Optional[str] = '12.8'", True),
    ],
)
def test_a_torch_without_cuda_is_detected_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, uses: bool
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "torch", raising=False)
    assert devices.torch_uses_cuda() is uses


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (RunOptions(("x",), nproc_per_node=9), "'9' for --nproc-per-node: 9 ranks, but 8 GPUs;"),
        (RunOptions(("x",), nproc_per_node=5, members=2), "with 2 members: 10 ranks, but 8 GPUs"),
        (RunOptions(("x",), members=9), "expected --members 1-8"),
        (RunOptions(("x",), nproc_per_node=9), "expected 1-8, or CUDA_VISIBLE_DEVICES=''"),
    ],
)
def test_more_ranks_than_gpus_are_refused(options: RunOptions, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        run_validation.check_devices(options, gpus=8, uses_cuda=lambda: True)


@pytest.mark.parametrize(("gpus", "uses_cuda"), [(8, False), (None, True), (0, True), (16, True)])
def test_more_ranks_than_gpus_are_accepted_if_none_would_be_used(gpus: int | None, uses_cuda: bool) -> None:
    options = RunOptions(("x",), nproc_per_node=16)
    run_validation.check_devices(options, gpus, uses_cuda=lambda: uses_cuda)


@pytest.mark.parametrize(("asked", "gpus", "ranks"), [(3, 8, 3), ("gpu", 8, 8), ("auto", 8, 8)])
def test_words_for_the_number_of_ranks_become_the_number(asked: object, gpus: int, ranks: int) -> None:
    assert run_validation.ranks(asked, gpus) == ranks
    assert run_validation.ranks("auto", None) == run_validation.ranks("cpu", gpus) >= 1


def members(environment: dict[str, str], gpus: int, nproc: int, count: int) -> list[str]:
    """Return the devices that the members with the first, second, ... ranks of a group see."""
    given = {**environment, **devices.device_environment(environment, gpus)}
    return [gpu_assignment.visible_devices(given, position * nproc, 0, nproc) for position in range(count)]


def test_each_member_has_the_devices_of_its_ranks_and_no_two_share_one() -> None:
    assert members({}, 4, 2, 2) == ["0,1", "2,3"]
    assert members({"CUDA_VISIBLE_DEVICES": "5, 7"}, 2, 1, 2) == ["5", "7"]
    assert members({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,GPU-12ab"}, 2, 1, 2) == ["GPU-8932f937", "GPU-12ab"]


def test_a_standby_that_takes_a_lost_members_ranks_takes_its_devices() -> None:
    given = devices.device_environment({}, 4)
    lost = [gpu_assignment.visible_devices(given, rank, rank - 2, 2) for rank in (2, 3)]
    assert lost == ["2,3", "2,3"], "this holds for whichever member has ranks 2 and 3"


def test_ranks_beyond_the_devices_get_none_and_without_devices_nothing_is_set() -> None:
    assert members({}, 2, 1, 3) == ["0", "1", ""]
    assert members({}, 3, 2, 2) == ["0,1", ""]
    assert devices.device_environment({}, None) == {}
    assert gpu_assignment.visible_devices({}, 0, 0, 1) == ""
