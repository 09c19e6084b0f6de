"""Data that a script has buffered is written at its end, although its process group still exists."""

from __future__ import annotations

import bz2
import gzip
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from holdfast.protocol.launcher_messages import UNFLUSHED
from tests.torch.holdfast.script_ending import ended

OPENS = """
import atexit, csv, bz2, gzip, threading, zipfile
import torch
from torch.nn.parallel import DistributedDataParallel

log = open("log", "w")
class Meter:
    def __init__(self, name):
        self.file = open(name, "w")
    def add(self):
        self.file.write("x\\n")
    def __del__(self):
        self.file.write(f"closed {count}\\n")
        self.file.close()
        log.write("closed\\n")
        print("a meter is closed")
class Run:
    file = open("class", "w")
meter, writer, zipped = Meter("meter"), csv.writer(open("rows", "w")), gzip.open("zipped", "wt")
archive = zipfile.ZipFile("archive", "w"); archive.writestr("a", "x")
loop = [Meter("cycle")]
loop.append(loop)
closed = open("closed", "w"); closed.write("x\\n"); closed.close()
read = open(__file__); read.readline()
net = DistributedDataParallel(torch.nn.Linear(2, 2))
count = 0
for count in range(1, 4):
    net(torch.ones(1, 2)).sum().backward()
    log.write("x\\n"); writer.writerow(["x"]); zipped.write("x\\n"); meter.add(); Run.file.write("x\\n")
atexit.register(lambda: log.write("exit handler\\n"))
"""
BEATS = """
def beat():
    while True:
        try: count + 1, net.training, log.name, meter.file.name
        except BaseException: os._exit(9)
threading.Thread(target=beat, daemon=True).start()  # it runs until the last moment: nothing is taken from it
"""
ENDS = {"it ends": ("", 0), "it exits": ("sys.exit(5)\n", 5), "it raises": ("raise ValueError('no')\n", 1)}


@pytest.mark.parametrize("beats", ["", BEATS], ids=["alone", "beside a thread"])
@pytest.mark.parametrize("how", ENDS)
def test_files_are_written_and_finalizers_run_once(tmp_path: Path, how: str, beats: str) -> None:
    last, code = ENDS[how]
    done, _ = ended(tmp_path, OPENS + beats + last)
    assert done.returncode == code, done.stderr
    assert done.stdout == "trained\n" + "a meter is closed\n" * 2
    assert done.stderr.count("Traceback") == (how == "it raises"), done.stderr
    assert "ignored" not in done.stderr
    assert (tmp_path / "log").read_text() == "x\n" * 3 + "exit handler\n" + "closed\n" * 2
    assert (tmp_path / "meter").read_text() == "x\n" * 3 + "closed 3\n"
    assert (tmp_path / "cycle").read_text() == "closed 3\n"
    assert (tmp_path / "rows").read_text() == "x\n" * 3
    assert (tmp_path / "class").read_text() == "x\n" * 3
    assert zipfile.ZipFile(tmp_path / "archive").read("a") == b"x"
    assert gzip.decompress((tmp_path / "zipped").read_bytes()) == b"x\n" * 3


def test_files_of_its_own_modules_of_a_tee_and_of_the_frames_of_its_exception_are_also_written(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.py").write_text(
        "log = open('own', 'w'); log.write('x')\n"
        "class Last:\n    def __del__(self): open('last', 'w').write('x')\n"
        "last = Last()\n"
    )
    done, _ = ended(
        tmp_path,
        "import bz2, own, threading\n"
        "class Tee:\n"
        "    def __init__(self, *to): self.to = to\n"
        "    def write(self, text): [each.write(text) for each in self.to]\n"
        "    def flush(self): pass\n"
        "sys.stdout = Tee(open('tee', 'w'), sys.stdout)\n"
        "print('seen')\n"
        "kept, pack = open('kept', 'w'), bz2.open('packed', 'w')\n"
        "kept.write('x'); pack.write(b'x')\n"
        "writing = threading.Event()\n"
        "def wait(kept, pack): writing.set(); threading.Event().wait(); print(kept, pack)\n"
        "threading.Thread(target=wait, args=(kept, pack), daemon=True).start(); writing.wait()\n"
        "def main():\n    log = open('local', 'w'); log.write('x'); raise ValueError('no')\n"
        "main()\n",
    )
    assert (done.returncode, done.stdout) == (1, "trained\nseen\n"), done.stderr
    assert done.stderr.count("Traceback") == 1
    assert {name: (tmp_path / name).read_text() for name in ("own", "last", "tee", "kept", "local")} == {
        "own": "x",
        "last": "x",
        "tee": "seen\n",
        "kept": "x",
        "local": "x",
    }
    assert bz2.decompress((tmp_path / "packed").read_bytes()) == b"x"


def test_unwritable_output_is_reported_and_an_exception_in_a_finalizer_changes_no_exit_code(
    tmp_path: Path,
) -> None:
    done, said = ended(
        tmp_path,
        "import resource\n"
        "log = open('log', 'w'); log.write('x' * 100)\n"
        "class Bad:\n    def __del__(self): sys.exit(7)\n"
        "bad = Bad()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))\n",
    )
    assert (done.returncode, said) == (0, []), done.stderr
    assert done.stderr.count("holdfast: log cannot be written: File too large\n") == 1
    assert "Exception ignored in: <function Bad.__del__" in done.stderr


def test_a_finalizer_that_never_ends_does_not_block_the_run(tmp_path: Path) -> None:
    done, [said] = ended(
        tmp_path,
        "import threading\n"
        "log = open('log', 'w'); log.write('x')\n"
        "class Stuck:\n    def __del__(self): threading.Event().wait()\n"
        "stuck = Stuck()\n",
    )
    assert done.returncode == 120
    assert said.ending is not None
    assert (said.ending.is_good, said.ending.fail) == (True, UNFLUSHED)
    assert "closing files and running finalizers took longer than 5 s" in said.ending.message
    assert said.ending.message in done.stderr
    assert (tmp_path / "log").read_text() == "x", "files must be closed first"


def test_a_forked_child_does_not_write_the_buffered_data_of_its_rank(tmp_path: Path) -> None:
    done, _ = ended(
        tmp_path,
        "log = open('log', 'w'); log.write('x')\nchild = os.fork()\nif child: os.waitpid(child, 0)\n",
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "log").read_text() == "x"


def test_torchs_operators_are_not_removed_one_by_one_at_exit_and_the_scripts_finalizers_run(
    tmp_path: Path,
) -> None:
    """Removing them takes 40 ms, in which the group that replaces this process starts."""
    script = """
import sys, torch, weakref
from holdfast.worker import teardown
removed = []
torch.library._del_library.__code__ = (lambda *a, **k: sys.stdout.write("removed\\n")).__code__
class Own: pass
own = Own()
weakref.finalize(own, print, "finalized")
teardown.keep_libraries_loaded()
"""
    found = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    assert found.stdout.split() == ["finalized"]
    without = script.replace("teardown.keep_libraries_loaded()", "")
    found = subprocess.run([sys.executable, "-c", without], stdout=subprocess.PIPE, text=True, check=True)
    assert "removed" in found.stdout.split(), "torch registers no such finalizers any more"
