"""The version of the script at the run's start is executed and shown, even if its file changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.worker import script_source
from holdfast.worker.program import MAX_SOURCE_BYTES, parse
from holdfast.worker.script_source import ProgramSources, SourceChanges

PYTHON = "python3"
MAIN = "import helper, os\nVERSION = 'one'\ndef fails():\n    raise ValueError(VERSION)\n"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProgramSources:
    monkeypatch.chdir(tmp_path)
    Path("helper.py").write_text("A = 1\n")
    Path("train.py").write_text(MAIN)
    return script_source.read_sources(parse([PYTHON, "train.py", "--lr", "1"], tmp_path))


def test_program_and_source_are_handed_down_and_cannot_be_written(
    kept: ProgramSources,
) -> None:
    Path("train.py").write_text("VERSION = 'two'\n")
    assert script_source.load(kept.descriptor) == kept
    assert kept.main == MAIN.encode()
    assert [Path(file.path).name for file in kept.files] == ["train.py", "helper.py"]
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(kept.descriptor, b"x", 0)
    assert script_source.load_main(kept.descriptor) == MAIN.encode()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(kept.descriptor)


def test_a_script_that_cannot_be_stored_is_read_by_each_process(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_bytes(b"#" * (MAX_SOURCE_BYTES + 1))
    large = script_source.read_sources(parse([PYTHON, "large.py"], tmp_path))
    assert (large.main, large.files) == (None, ())
    assert script_source.load_main(large.descriptor) is None
    other = script_source.read_sources(parse(["sh", "-c", "true"], tmp_path))
    assert (other.main, other.files) == (None, ())
    assert script_source.load_main(other.descriptor) is None
    assert script_source.load_main(-1) is None


def test_a_file_that_was_only_touched_has_not_changed(kept: ProgramSources) -> None:
    main, helper = kept.files
    os.utime("train.py", ns=(0, 0))
    Path("helper.py").write_text("A = 2\n")
    assert (script_source.change_of(main), script_source.change_of(helper)) == ("", "changed")
    Path("train.py").unlink()
    assert script_source.change_of(main) == "removed"
    Path("train.py").write_text(MAIN)
    assert script_source.change_of(main) == "", "the file is back to its first version"


def looked(changes: SourceChanges, now_s: float) -> tuple[str, ...]:
    """Return the changes that one look reports."""
    changes.check(now_s)
    assert changes._checking is not None
    changes._checking.result(10)
    changes.check(now_s)
    return changes.messages


def test_a_change_is_reported_once_after_two_looks_have_seen_it(kept: ProgramSources) -> None:
    changes = SourceChanges(kept)
    assert looked(changes, 0.0) == ()
    Path("train.py").unlink()  # as an editor does, for a moment
    assert looked(changes, 10.0) == ()
    Path("train.py").write_text("VERSION = 'two'\n")
    assert looked(changes, 20.0) == (), "this version differs from the one seen before"
    messages = looked(changes, 30.0)
    assert messages == (
        "train.py has changed since the run began: the run continues to use the version from its start;"
        " restart it to use the new one",
    )
    Path("helper.py").unlink()
    assert changes.check_at_once()[0] == messages[0]
    [_, helper] = changes.messages
    assert helper.startswith("helper.py was removed since the run began: ranks that start from now on")
    assert looked(changes, 40.0) == changes.messages
    assert len(changes.messages) == 2


def test_the_removal_of_a_folder_is_reported_like_that_of_its_files(
    kept: ProgramSources, tmp_path: Path
) -> None:
    changes = SourceChanges(kept)
    for name in ("train.py", "helper.py"):
        (tmp_path / name).unlink()
    tmp_path.rmdir()
    looked(changes, 0.0)
    assert [each.partition(" was removed")[0] for each in looked(changes, 10.0)] == ["train.py", "helper.py"]
    odd = script_source.SourceFile("/a/b\udcff\nc.py", 1, 1, 1)
    assert script_source.change_message(odd, "changed", kept.program, "").startswith("/a/b??c.py has changed")


RUN = """
import sys
from pathlib import Path
from holdfast.worker import script as ending; from holdfast.worker import script_source as sources
from holdfast.worker.program import parse
kept = sources.read_sources(parse(["python3", *sys.argv[1:]], Path.cwd()))
main = Path(kept.program.source)
main.unlink() if "gone" in sys.argv else main.write_text("VERSION = (\\n\\n# another line\\n# and another\\n")
sys.path[0] = str(Path.cwd())
ending.run_unsupervised(kept.program, kept.main)
"""
SHOWS = """
import inspect, sys, traceback
VERSION = 'one'
def fails():
    raise ValueError(VERSION)  # as it was
try:
    fails()
except ValueError:
    print(traceback.format_exc().count("# as it was"), "# as it was" in inspect.getsource(fails))
print(VERSION, __name__, __file__, sys.argv)
"""


@pytest.mark.parametrize("how", ["broken", "gone"])
@pytest.mark.parametrize(
    ("words", "file"),
    [(["train.py"], "train.py"), (["-m", "pkg.train"], "pkg/train.py"), (["-m", "pkg"], "pkg/__main__.py")],
)
def test_the_version_from_the_start_of_the_run_is_executed_and_shown(
    words: list[str], file: str, how: str, tmp_path: Path
) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / file).write_text(SHOWS)
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words, how], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    place = str(tmp_path / file)
    argv = [words[0] if words[0] == file else place, how]
    assert (done.stdout, done.stderr) == (f"1 True\none __main__ {place} {argv}\n", "")
    assert not list(tmp_path.rglob(f"{Path(file).stem}.*.pyc")), (
        "no cached file may pass for the new version's"
    )


def test_a_module_whose_file_is_unchanged_is_found_in_the_usual_way(kept: ProgramSources) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from holdfast.worker import script_source as sources; from holdfast.worker.program import parse\n"
        "kept = sources.read_sources(parse(['python3', '-m', 'train'], Path.cwd()))\n"
        "before = list(sys.meta_path)\n"
        "assert kept.main; sources.pin_module(kept.program, kept.main); import train\n"
        "print(type(train.__spec__.loader).__name__, sys.meta_path == before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("SourceFileLoader True\n", "")
