from __future__ import annotations

from pathlib import Path

from holdfast.checkpoint import writer
from holdfast.protocol.lineage import Lineage
from supervisor.cli import checkpoints
from supervisor.cli.checkpoints import survey


def write(root: Path, step: int, generation: int = 2, known: tuple[Lineage, ...] = ()) -> Path:
    return writer.write(
        root,
        generation=generation,
        step=step,
        world_size=4,
        files={"model.safetensors": b"x" * 3000},
        meta={},
        created_at=1000.0,
        known=known,
    )


def listed(root: Path, *, verify: bool) -> list[str]:
    return checkpoints.lines(survey(root, verify=verify, reading=lambda _: None), 1090.0, verified=verify)


def test_the_newest_whole_checkpoint_is_named_and_damage_is_described(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000003" / "rank-0").touch()
    (tmp_path / "step-00000002" / "model.safetensors").write_bytes(b"y" * 3000)
    assert listed(tmp_path, verify=True) == [
        "CHECKPOINT     GENERATION  RANKS      SIZE   WRITTEN  STATE",
        "step-00000003           -      -         -         -  damaged: manifest.json is missing",
        "step-00000002           2      4  2.93 KiB  90 s ago  damaged: model.safetensors is"
        " damaged: checksum differs in bytes 0 to 2999",
        "step-00000001           2      4  2.93 KiB  90 s ago  intact, newest",
        "",
        f"newest intact: {tmp_path / 'step-00000001'}",
    ]


def test_without_reading_only_the_sizes_are_checked(tmp_path: Path) -> None:
    newest = write(tmp_path, 1)
    lines = listed(tmp_path, verify=False)
    assert lines[1].endswith("complete, newest")
    assert lines[-2:] == [
        f"newest: {newest}",
        "only sizes were compared; --verify reads the contents",
    ]


def test_progress_of_reading_is_shown(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    told: list[str] = []
    found = survey(tmp_path, verify=True, reading=told.append)
    assert told == ["step-00000002", "step-00000001"]
    assert [each.newest_whole for each in found] == [True, False]
    assert found[0].as_json()["bytes"] == 3000


def test_a_missing_directory_has_no_checkpoints(tmp_path: Path) -> None:
    assert listed(tmp_path / "none", verify=True) == ["no checkpoints"]


def test_if_no_checkpoint_is_whole_the_output_says_so(tmp_path: Path) -> None:
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000003" / "rank-0").touch()
    assert listed(tmp_path, verify=True)[-1] == "no checkpoint is intact"


def test_void_checkpoints_are_marked_and_never_the_newest(tmp_path: Path) -> None:
    write(tmp_path, 9)
    write(tmp_path, 4)
    newest = write(tmp_path, 5, generation=3, known=(Lineage(3, 4),))
    lines = listed(tmp_path, verify=True)
    assert lines[1].endswith("intact, void: the run resumed from an earlier step")
    assert lines[-1] == f"newest intact: {newest}"
    found = survey(tmp_path, verify=False, reading=lambda _: None, known=(Lineage(4, 3),))
    assert [each.void for each in found] == [True, True, True]
    assert checkpoints.lines(found, 1090.0, verified=True)[-1] == "no checkpoint can be used"
