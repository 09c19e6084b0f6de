from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.errors import BadInput
from holdfast.worker.program import Program, check_module, check_syntax, launcher_refusal, parse

PYTHON = sys.executable


def put(root: Path, **files: str) -> None:
    """Write modules: `a_b` is a/b.py, and `a_` is a/__init__.py."""
    for name, text in files.items():
        folder, _, module = name.rpartition("_")
        path = root / folder / f"{module or '__init__'}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_script_is_split_from_its_interpreter_and_arguments(tmp_path: Path) -> None:
    put(tmp_path, train="import os\n")
    found = parse([PYTHON, "-u", "-X", "dev", "train.py", "-m", "--lr", "1"], tmp_path)
    assert (found.kind, found.target, found.args) == ("script", "train.py", ("-m", "--lr", "1"))
    assert (found.flags, found.argv[0]) == (("-u", "-X", "dev"), PYTHON)
    assert (found.joins, found.imports) == (False, ("os",))


def test_a_module_is_found_in_the_folder_or_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, job="import holdfast\n", pack_="")
    (tmp_path / "pack" / "__main__.py").write_text("import math\n")
    assert parse([PYTHON, "-m", "job", "x"], tmp_path).joins
    package = parse([PYTHON, "-m", "pack"], tmp_path)
    assert (package.kind, package.target, package.imports) == ("module", "pack", ("math",))
    monkeypatch.syspath_prepend(tmp_path / "site")
    put(tmp_path / "site", theirs_="", theirs_tool="import holdfast\n", single="import math\n")
    assert parse([PYTHON, "-m", "theirs.tool"], tmp_path).joins
    assert parse([PYTHON, "-m", "single"], tmp_path).imports == ("math",)
    missing = parse([PYTHON, "-m", "no_such_module_anywhere"], tmp_path)
    assert (missing.kind, missing.imports) == ("module", ())


def test_a_script_that_is_a_link_has_the_folder_of_what_it_links_to(tmp_path: Path) -> None:
    put(tmp_path / "real", train="import base\n", base="import holdfast\nimport math\n")
    link = tmp_path / "link.py"
    link.symlink_to(Path("real") / "train.py")
    found = parse([PYTHON, "link.py"], tmp_path)
    assert (found.target, found.joins, found.imports) == ("link.py", True, ("math",))
    seen = parse([PYTHON, str(link)], tmp_path).entered("pass", tmp_path)
    assert seen[-2] == str((tmp_path / "real").resolve())


def test_a_missing_module_is_named_before_the_start(tmp_path: Path) -> None:
    put(tmp_path, pack_="", pack_tool="", single="")
    for name in ("pack", "pack.tool", "single", "json.tool", "pack.made_by_its_init"):
        assert check_module(parse([PYTHON, "-m", name], tmp_path), tmp_path) is None, name
    for name in ("nosuch", "nosuch.module"):
        said = check_module(parse([PYTHON, "-m", name], tmp_path), tmp_path)
        assert said is not None
        assert said.startswith(f"module {name!r} not found")


@pytest.mark.parametrize("words", [["-c", "pass"], ["-"], [], ["-u"], ["-V"]])
def test_a_program_that_is_neither_file_nor_module_is_started_unchanged(
    words: list[str], tmp_path: Path
) -> None:
    found = parse([PYTHON, *words], tmp_path)
    assert found == Program("other", PYTHON, (), "", (), (PYTHON, *words))


def test_another_program_is_started_unchanged(tmp_path: Path) -> None:
    assert parse(["sh", "-c", "true"], tmp_path).kind == "other"


@pytest.mark.parametrize(
    ("line", "launcher"),
    [
        ("torchrun --nproc-per-node 2 train.py", "torchrun"),
        ("/opt/venv/bin/torchrun train.py", "torchrun"),
        ("python3 -u -m torch.distributed.run train.py", "torchrun"),
        ("python /opt/venv/bin/torchrun train.py", "torchrun"),
        ("python -m torch.distributed.launch --nproc_per_node 2 train.py", "torch.distributed.launch"),
        ("accelerate launch --num_processes 2 train.py", "accelerate launch"),
        ("accelerate-launch train.py", "accelerate launch"),
        ("python -m accelerate.commands.launch train.py", "accelerate launch"),
        ("python -m accelerate.commands.accelerate_cli launch train.py", "accelerate launch"),
    ],
)
def test_another_launcher_is_refused_with_the_command_to_use_instead(line: str, launcher: str) -> None:
    expected = (
        f"holdfast run replaces {launcher}, so pass the script itself:"
        " holdfast run --nproc-per-node N -- python train.py"
    )
    assert launcher_refusal(line.split()) == expected


@pytest.mark.parametrize(
    "line",
    [
        "python train.py torchrun",
        "python start_torchrun.py",
        "python -m job torch.distributed.run",
        "sh -c torchrun",
        "accelerate test",
        "python -V",
        "python -",
        "python -c pass",
        "",
    ],
)
def test_a_command_that_only_mentions_a_launcher_is_not_refused(line: str) -> None:
    assert not launcher_refusal(line.split())


@pytest.mark.parametrize("line", ["python", "/usr/bin/python3 -u", "python -X dev"])
def test_an_interpreter_without_a_script_is_refused(line: str) -> None:
    assert "without a script would only read its input" in launcher_refusal(line.split())


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ([], "no command: pass one after --, such as `-- python train.py`"),
        (["no-such-program-anywhere"], "command 'no-such-program-anywhere' not found: specify a program"),
        ([PYTHON, "missing.py"], "script 'missing.py' not found in "),
        ([PYTHON, "."], "script '.' not found in "),
        ([PYTHON, "a\0b.py"], "script 'a\\x00b.py' not found in "),
    ],
)
def test_a_program_that_cannot_run_is_named(argv: list[str], why: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        parse(argv, tmp_path)
    assert str(caught.value).startswith(why)
    assert "\n" not in str(caught.value)


def test_imports_are_followed_through_the_scripts_own_modules(tmp_path: Path) -> None:
    put(
        tmp_path,
        train="from lib import model\nimport lib.data as d\n",
        lib_="",
        lib_model="from . import layers\nfrom .layers import x\nimport math\n",
        lib_layers="from ..train import nothing\nimport holdfast.errors\nx = 1\n",
        lib_data="import json, os.path\n",
    )
    found = parse([PYTHON, "train.py"], tmp_path)
    assert found.joins
    assert {"math", "json", "os.path"} <= set(found.imports)
    assert not any(name.startswith(("lib", "holdfast")) for name in found.imports)


def test_modules_that_import_each_other_are_read_once(tmp_path: Path) -> None:
    put(tmp_path, train="import a\n", a="import b\n", b="import a\nimport train\n")
    assert parse([PYTHON, "train.py"], tmp_path).imports == ()


def test_a_name_that_only_looks_like_holdfast_is_not_an_import(tmp_path: Path) -> None:
    put(tmp_path, train="import holdfaster\nfrom a import holdfast\n# import holdfast\n")
    assert not parse([PYTHON, "train.py"], tmp_path).joins


@pytest.mark.parametrize("text", ["def (:\n", "x" * (4 << 20) + "y", "\0", "(" * 5000])
def test_an_unreadable_source_is_left_to_the_run_itself(text: str, tmp_path: Path) -> None:
    put(tmp_path, train=text)
    found = parse([PYTHON, "train.py"], tmp_path)
    assert (found.kind, found.joins, found.imports) == ("script", False, ())


def test_syntax_errors_are_reported_in_pythons_words(tmp_path: Path) -> None:
    put(tmp_path, good="x = 1\n", bad="def (:\n")
    assert check_syntax(parse([PYTHON, "good.py"], tmp_path)) is None
    said = check_syntax(parse([PYTHON, "bad.py"], tmp_path))
    assert said is not None
    assert "SyntaxError" in said
    assert check_syntax(parse(["sh", "-c", "true"], tmp_path)) is None
