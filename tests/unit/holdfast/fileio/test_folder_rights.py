"""New files have the rights of their folder: in a pod's volume all users may use them, elsewhere only one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from holdfast.fileio import folder_rights
from tests.unit.users import Identity, kubelet_volume, needs_root

ONE, OTHER = Identity(1000, 1000), Identity(0, 0)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("of_folder", [0o1777, 0o777, 0o2777])
def test_in_a_folder_of_all_users_everything_is_open_whatever_the_umask(of_folder: int, umask: int) -> None:
    with kubelet_volume(of_folder) as volume:
        before = os.umask(umask)
        try:
            folder_rights.make_folder(volume / "arena")
            os.close(folder_rights.open_file(volume / "arena" / "records"))
            (volume / "page").write_bytes(b"page")
            folder_rights.share(volume / "page")
        finally:
            os.umask(before)
        assert mode(volume / "arena") & 0o1777 == 0o777, "all users replace each other's files there"
        assert mode(volume / "arena" / "records") == mode(volume / "page") == 0o666
        assert [path.name for path in (volume / "arena").iterdir()] == ["records"]


@pytest.mark.parametrize("of_folder", [0o700, 0o755, 0o770])
def test_in_any_other_folder_a_file_is_private(of_folder: int) -> None:
    with kubelet_volume(of_folder) as folder:
        os.close(folder_rights.open_file(folder / "file"))
        assert mode(folder / "file") == folder_rights.file_mode(folder) == 0o600
        folder_rights.make_folder(folder / "inner")
        assert not mode(folder / "inner") & stat.S_IWOTH
        (folder / "page").touch(0o600)
        folder_rights.share(folder / "page")
        assert mode(folder / "page") == 0o600


@needs_root
def test_two_users_open_the_same_file_whoever_creates_it() -> None:
    for first, second in ((ONE, OTHER), (OTHER, ONE)):
        with kubelet_volume() as volume:
            folder, file = volume / "arena", volume / "arena" / "slot"

            def write(text: bytes, folder: Path = folder, file: Path = file) -> None:
                folder_rights.make_folder(folder)
                os.pwrite(folder_rights.open_file(file), text, 0)

            assert first.run(lambda: write(b"first")) == 0
            inode = file.stat().st_ino
            assert second.run(lambda: write(b"other")) == 0
            assert (file.read_bytes(), file.stat().st_ino) == (b"other", inode)


@needs_root
def test_a_user_replaces_and_removes_the_files_of_another_in_a_folder_within_the_volume() -> None:
    with kubelet_volume() as volume:

        def create() -> None:
            folder_rights.make_folder(volume / "restore")
            (volume / "restore" / "a").touch()
            (volume / "restore" / "b").touch()

        def change() -> None:
            (volume / "restore" / "new").touch()
            (volume / "restore" / "new").replace(volume / "restore" / "a")
            (volume / "restore" / "b").unlink()

        assert OTHER.run(create) == 0
        assert ONE.run(change) == 0


def test_processes_that_create_the_same_file_at_once_share_one() -> None:
    """The loser of the race must neither fail nor replace the file of the winner."""
    with kubelet_volume() as volume:
        begin, go = os.pipe()

        def create() -> None:
            os.close(go)
            os.read(begin, 1)  # returns when the parent closes its end
            folder_rights.make_folder(volume / "arena")
            descriptor = folder_rights.open_file(volume / "arena" / "records")
            os.write(
                os.open(volume / "inodes", os.O_WRONLY | os.O_APPEND), b"%d\n" % os.fstat(descriptor).st_ino
            )

        (volume / "inodes").touch()
        children = []
        for _ in range(8):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    create()
                    status = 0
                finally:
                    os._exit(status)
            children.append(pid)
        os.close(go)
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * len(children)
        os.close(begin)
        inodes = (volume / "inodes").read_text().split()
        assert len(inodes) == len(children)
        assert set(inodes) == {str((volume / "arena" / "records").stat().st_ino)}
        assert [path.name for path in (volume / "arena").iterdir()] == ["records"]


@needs_root
def test_a_denial_names_both_users(capfd: pytest.CaptureFixture[str]) -> None:
    with kubelet_volume(0o755) as folder:
        os.chown(folder, 3000, 4000)
        ONE.run(lambda: os.write(1, folder_rights.denial(folder / "missing" / "file").encode()))
        said = f"this process is user 1000, but {folder} belongs to user 3000 and group 4000, with mode 0755"
        assert capfd.readouterr().out == said


def test_a_link_in_a_shared_folder_leads_to_no_other_file() -> None:
    """A pod's script may create any link there, and the sidecar may have rights that the script lacks."""
    with kubelet_volume(0o777) as volume, kubelet_volume(0o755) as storage:
        (storage / "checkpoint").write_bytes(b"intact")
        (volume / "slot").symlink_to(storage / "checkpoint")
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            folder_rights.open_file(volume / "slot")
        assert (storage / "checkpoint").read_bytes() == b"intact"


def test_a_file_that_cannot_be_created_is_an_error_and_leaves_nothing() -> None:
    with kubelet_volume() as volume:
        (volume / "file").symlink_to(volume / "missing" / "file")
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            folder_rights.open_file(volume / "file")
        assert [path.name for path in volume.iterdir()] == ["file"]
        (volume / "folder").write_text("not a folder")
        with pytest.raises(OSError, match="folder"):
            folder_rights.make_folder(volume / "folder")
        assert sorted(path.name for path in volume.iterdir()) == ["file", "folder"]
