"""At a rank's end, files of libraries and pipes are completed, and the user's finalizers run."""

from __future__ import annotations

import gzip
import shelve
from pathlib import Path
from types import FunctionType

import pytest

from holdfast.worker.teardown import is_users_own
from tests.torch.holdfast.script_ending import ended

# Modules like h5py and pyarrow, which are no dependencies: a file is complete only once it is closed.
LIBRARIES = """
import types
def library(name, source):
    found = types.ModuleType(name); sys.modules[name] = found
    exec(compile(source, "/usr/lib/site-packages/" + name.replace(".", "/") + ".py", "exec"), found.__dict__)
    return found
h5py = library("h5py._hl.base", '''
class HLObject:
    def __init__(self, file): self.owner = file
    def __bool__(self): return self.file.rows is not None
    @property
    def file(self): return self.owner
class File(HLObject):
    def __init__(self, name): self.filename, self.rows, self.owner = name, [], self
    def flush(self): open(self.filename, "w").write("flushed " + " ".join(self.rows))
    def close(self):
        open(self.filename, "w").write("closed " + " ".join(self.rows)); self.rows = None
''')
parquet = library("pyarrow.parquet.core", '''
class ParquetWriter:
    __slots__ = ("where", "sink", "is_open")
    def __init__(self, name, sink): self.where, self.sink, self.is_open = name, sink, True
    def close(self):
        if self.is_open: self.is_open = False; self.sink.write("footer")
    def __del__(self): self.close()
''')
"""


def test_each_file_of_a_known_library_is_closed_before_the_file_that_it_writes_to(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "mine.py").write_text(
        "class Meter:\n"
        "    def __init__(self, file): self.file = file\n"
        "    def __del__(self): self.file.rows.append('last')\n"
    )
    (tmp_path / "job").mkdir()
    done, said = ended(
        tmp_path / "job",
        LIBRARIES + "import gzip, shelve, tempfile\n"
        "sys.path.insert(0, os.path.abspath('../lib')); import mine\n"
        "full = h5py.File('h5'); meter = mine.Meter(full)\n"
        "part = h5py.HLObject(h5py.File('part')); done = h5py.File('done'); done.close()\n"
        "table = parquet.ParquetWriter('table', gzip.open('zipped', 'wt'))\n"
        "kept = shelve.open('shelf', writeback=True); kept['a'] = []; kept.sync(); kept['a'].append(1)\n"
        "scratch = tempfile.NamedTemporaryFile(dir='.', prefix='scratch')\n"
        "sys.exit(5)\n",
    )
    job = tmp_path / "job"
    assert (done.returncode, "holdfast:" in done.stderr) == (5, False), done.stderr
    assert [each.what for each in said] == ["failing"]
    assert (job / "h5").read_text() == "closed last", "the user's module is in another folder than the script"
    assert (job / "part").read_text() == "closed "
    assert (job / "zipped").read_bytes(), "the archive must be closed after the writer that uses it"
    assert gzip.decompress((job / "zipped").read_bytes()) == b"footer"
    with shelve.open(str(job / "shelf")) as kept:
        assert kept["a"] == [1]
    assert not list(job.glob("scratch*"))


def test_a_file_that_a_thread_still_uses_is_flushed_but_not_closed(tmp_path: Path) -> None:
    done, _ = ended(
        tmp_path,
        LIBRARIES + "import threading\n"
        "class Saver:\n"
        "    def __init__(self): self.file = h5py.File('h5'); self.begun = threading.Event()\n"
        "    def run(self):\n"
        "        while True:\n"
        "            self.begun.set()\n"
        "            if self.file.rows is None or not table.is_open: os._exit(9)\n"
        "saver, table = Saver(), parquet.ParquetWriter('table', open('rows', 'w'))\n"
        "threading.Thread(target=saver.run, daemon=True).start(); saver.begun.wait()\n",
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "h5").read_text() == "flushed "
    line = "table was not closed and may be incomplete, because a thread still uses it"
    assert [each for each in done.stderr.splitlines() if "holdfast" in each] == [f"holdfast: {line}"]


def test_a_file_that_a_library_cannot_close_is_reported(tmp_path: Path) -> None:
    done, _ = ended(tmp_path, LIBRARIES + "kept = h5py.File('no/such/folder')\n")
    assert done.returncode == 0, done.stderr
    assert "holdfast: no/such/folder cannot be closed: FileNotFoundError" in done.stderr


def test_pipes_are_flushed_but_one_without_a_reader_does_not_block_the_run(tmp_path: Path) -> None:
    done, said = ended(
        tmp_path,
        "read, write = os.pipe(); log = open(write, 'w'); log.write('x' * 10)\n"
        "stuck_read, stuck_write = os.pipe(); os.set_blocking(stuck_write, False)\n"
        "try:\n    while True: os.write(stuck_write, bytes(4096))\n"
        "except BlockingIOError: os.set_blocking(stuck_write, True)\n"
        "stuck = open(stuck_write, 'wb'); stuck.write(b'x')\n"
        "if os.fork() == 0:\n"
        "    os.close(write); os.close(stuck_write)\n"
        "    open('seen', 'wb').write(os.read(read, 100)); os._exit(0)\n"
        "os.close(read)\n",
    )
    assert (done.returncode, said) == (0, []), done.stderr
    assert done.stderr.count("could not be written: the other end is not reading") == 1
    assert (tmp_path / "seen").read_text() == "x" * 10


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/me/lib/mine.py", True),
        ("/home/me/.venv/lib/python3.11/site-packages/theirs/a.py", False),
        ("/usr/lib/python3/dist-packages/theirs.py", False),
        (str(Path(__file__).parents[4] / "holdfast" / "training" / "session.py"), False),
        (shelve.__file__, False),
        ("<string>", False),
        ("<frozen importlib>", False),
    ],
)
def test_finalizers_count_as_the_users_own_unless_their_package_is_installed(
    path: str, expected: bool
) -> None:
    code = compile("def close(self): pass", path, "exec")
    names: dict[str, object] = {"__name__": "mine"}
    exec(code, names)
    found = names["close"]
    assert isinstance(found, FunctionType)
    assert is_users_own(found) == expected
