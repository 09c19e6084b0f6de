from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import BadInput
from holdfast.protocol import defaults
from holdfast.version import __version__
from supervisor.cli import command_options
from supervisor.cli.command_options import Command, RunOptions, Show
from supervisor.cli.option_table import COMMANDS
from supervisor.cli.parser import parse


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('hello')\n")
    return tmp_path


def asked(here: Path, line: str) -> Command:
    return parse(line.split(), environment={}, directory=here)


def run(here: Path, line: str) -> RunOptions:
    options = asked(here, f"run {line}")
    assert isinstance(options, RunOptions)
    return options


def refused(here: Path, line: str) -> str:
    with pytest.raises(BadInput) as error:
        asked(here, line)
    said = str(error.value)
    assert "\n" not in said
    assert said
    return said


SCRIPT = (sys.executable, "train.py", "--lr", "1")


@pytest.mark.parametrize(
    ("line", "command"),
    [
        (f"-- {sys.executable} train.py --lr 1", SCRIPT),
        ("-- train.py --lr 1", SCRIPT),
        ("train.py --lr 1", SCRIPT),
        ("--members 2 train.py --lr 1", SCRIPT),
        ("train.py --members 3 -- x", (sys.executable, "train.py", "--members", "3", "--", "x")),
        ("-m pkg.mod --lr 1", (sys.executable, "-m", "pkg.mod", "--lr", "1")),
        ("--module pkg.mod", (sys.executable, "-m", "pkg.mod")),
        ("-m --members 2 pkg.mod", (sys.executable, "-m", "pkg.mod")),
        ("-- -m pkg.mod -h", (sys.executable, "-m", "pkg.mod", "-h")),
        ("true --members 9", ("true", "--members", "9")),
    ],
)
def test_the_command_begins_at_the_first_word_that_is_not_an_option(
    here: Path, line: str, command: tuple[str, ...]
) -> None:
    assert run(here, line).command == command


def test_a_run_without_options_has_the_defaults(here: Path) -> None:
    assert run(here, "train.py --lr 1") == RunOptions(SCRIPT)


def test_every_option_of_run_reaches_its_field(here: Path) -> None:
    line = (
        "--nproc-per-node 2 --members 3 --standby 1 --min-members 2 --run-dir d --snapshot-every 7"
        " --snapshot-budget 2% --checkpoint-every 5m --keep-checkpoints 4 --max-restarts 5"
        " --skip-bad-batches --loss-jump 20 --hang-factor 4 --hang-floor 250ms"
        " --first-step-timeout 1h --pause-timeout 90 --member-timeout 2.5s --warm cold --port 8080"
        " --quiet --plain --grace 0 --resume train.py"
    )
    assert run(here, line) == RunOptions(
        command=(sys.executable, "train.py"),
        nproc_per_node=2,
        members=3,
        standby=1,
        min_members=2,
        run_dir=Path("d"),
        resume=True,
        snapshot_every=7,
        snapshot_budget=0.02,
        checkpoint_every_s=300.0,
        keep_checkpoints=4,
        max_restarts=5,
        skip_bad_batches=True,
        loss_jump=20.0,
        hang_factor=4.0,
        hang_floor_s=0.25,
        first_step_timeout_s=3600.0,
        pause_timeout_s=90.0,
        member_timeout_s=2.5,
        warm="cold",
        port=8080,
        quiet=True,
        plain=True,
        grace_s=0.0,
    )


def test_the_words_for_off_and_automatic_are_accepted(here: Path) -> None:
    line = "--snapshot-every auto --checkpoint-every 0 --loss-jump 0 train.py"
    options = run(here, line)
    assert options.snapshot_every == defaults.AUTOMATIC
    assert options.checkpoint_every_s == options.loss_jump == 0
    assert run(here, "--snapshot-every -1 train.py").snapshot_every == defaults.AUTOMATIC


@pytest.mark.parametrize(
    "line",
    [
        "--nproc_per_node=2 --nnodes=3",
        "--nproc_per_node 2 --nnodes 3:3",
        "--nproc-per-node=2 --members=3 --standalone",
    ],
)
def test_torchruns_spellings_mean_the_same(here: Path, line: str) -> None:
    options = run(here, f"{line} train.py")
    assert (options.nproc_per_node, options.members, options.notes) == (2, 3, ())


def test_torchrun_options_without_effect_are_reported_and_ignored(here: Path) -> None:
    line = "--rdzv-backend c10d --rdzv_endpoint=localhost:0 --rdzv-id 1 --node-rank 0 --tee 3"
    options = run(here, f"{line} --log_dir logs train.py")
    assert options.command == (sys.executable, "train.py")
    assert len(options.notes) == 6
    assert "--rdzv_endpoint has no effect: holdfast forms the process group" in options.notes[1]
    assert "--run-dir" in options.notes[-1]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("--nnodes 1:4", ("'1:4' for --nnodes", "use --members 4 --min-members 1")),
        ("--node-rank 1", ("'1' for --node-rank", "one machine")),
        ("--rdzv-endpoint trainer-7:29500", ("'trainer-7:29500' for --rdzv-endpoint", "one machine")),
        ("--master_addr trainer-7", ("'trainer-7' for --master_addr", "one machine")),
    ],
)
def test_torchrun_options_for_several_machines_are_refused(
    here: Path, line: str, names: tuple[str, ...]
) -> None:
    said = refused(here, f"run {line} train.py")
    assert all(name in said for name in names)


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("run --nproc-per-nod 2 train.py", "--nproc-per-node"),
        ("run --nproc 2 train.py", "--nproc-per-node"),
        ("run --nprocs 2 train.py", "--nproc-per-node"),
        ("run --member 2 train.py", "--members"),
        ("run --snapshot_evry 2 train.py", "--snapshot-every"),
        ("run --checkpoint 5m train.py", "--checkpoint-every"),
        ("run --rdzv_backed x train.py", "--rdzv-backend"),
        ("status --jsn", "--json"),
        ("checkpoints --verfy", "--verify"),
        ("stop --no", "--now"),
        ("status --rundir x", "--run-dir"),
        ("run -n 2 train.py", "--nproc-per-node"),
        ("run -np 2 train.py", "--nproc-per-node"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_name(here: Path, line: str, near: str) -> None:
    assert f"did you mean {near!r}?" in refused(here, line)


def test_an_option_of_the_script_is_not_treated_as_a_misspelling(here: Path) -> None:
    assert "did you mean" not in refused(here, "run --steps 5 train.py")


def test_an_unknown_option_without_a_similar_name_lists_all_options(here: Path) -> None:
    known = "--run-dir, --json, --job, --context, -n"
    assert refused(here, "status -q") == f"unknown option '-q'; options are {known}"


def test_options_of_one_command_are_unknown_to_another(here: Path) -> None:
    assert "unknown option '--verify'" in refused(here, "status --verify")


@pytest.mark.parametrize("word", ["top", "ps", "stp", "injekt", "sotp"])
def test_a_misspelled_command_is_never_corrected_to_one_that_changes_a_run(here: Path, word: str) -> None:
    said = refused(here, word)
    assert "did you mean 'stop'" not in said
    assert "did you mean 'inject'" not in said


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("--run-dir r status", "`holdfast status --run-dir ...`"),
        ("--json incidents", "`holdfast incidents --json ...`"),
        ("--nproc-per-node 2 train.py", "`holdfast run --nproc-per-node ...`"),
    ],
)
def test_an_option_before_its_command_is_checked_against_that_command(
    here: Path, line: str, right: str
) -> None:
    assert right in refused(here, line)


@pytest.mark.parametrize("line", ["train.py --nproc-per-node 2", "-- train.py --nproc_per_node=2"])
def test_a_launcher_option_after_the_script_is_named(here: Path, line: str) -> None:
    [note] = run(here, line).notes
    assert note.startswith("--nproc-per-node comes after the script")


def test_an_option_that_the_script_may_define_itself_is_passed_on_silently(here: Path) -> None:
    assert run(here, "train.py --members 2 --port 1 --warm 0 --quiet").notes == ()


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("--members 2 --run-dir d train.py --run-dir x", "--members 2 train.py --run-dir x"),
        ("--run_dir=d --resume -m --quiet pkg.mod", "-m --quiet pkg.mod"),
        ("--plain --run-dir d -- train.py", "--plain -- train.py"),
    ],
)
def test_the_arguments_that_resume_a_run_lack_only_its_directory(here: Path, line: str, kept: str) -> None:
    assert " ".join(run(here, line).given) == kept


def launched(here: Path, words: str = "", **environment: str) -> RunOptions:
    options = parse(["run", *words.split(), "train.py"], environment=environment, directory=here)
    assert isinstance(options, RunOptions)
    return options


def test_torchruns_variables_are_used_for_options_that_are_not_set(here: Path) -> None:
    found = launched(here, PET_NPROC_PER_NODE="2", PET_NNODES="3:3", PET_STANDALONE="1", PET_OF_OURS="x")
    assert (found.nproc_per_node, found.members) == (2, 3)
    assert found.notes == (
        "PET_NNODES=3:3 is used as --nnodes 3:3",
        "PET_NPROC_PER_NODE=2 is used as --nproc-per-node 2",
    )
    given = launched(here, "--nproc_per_node=4 --members 1", PET_NPROC_PER_NODE="2", PET_NNODES="3")
    assert (given.nproc_per_node, given.members, given.notes) == (4, 1, ())
    assert launched(here, PET_NPROC_PER_NODE="", PET_STANDBY="5") == launched(here)


def test_torchrun_variables_without_effect_are_noted_and_those_for_several_machines_refused(
    here: Path,
) -> None:
    [note] = launched(here, PET_RDZV_BACKEND="c10d").notes
    assert note.startswith("PET_RDZV_BACKEND has no effect: holdfast forms the process group")
    for variable, value in (("PET_NODE_RANK", "1"), ("PET_MASTER_ADDR", "job-0"), ("PET_NNODES", "1:4")):
        with pytest.raises(BadInput, match=f"'{value}' for {variable}:"):
            launched(here, **{variable: value})
    with pytest.raises(BadInput, match="'x' for PET_NPROC_PER_NODE: expected"):
        launched(here, PET_NPROC_PER_NODE="x")


def test_resuming_needs_a_directory(here: Path) -> None:
    assert "--resume needs --run-dir" in refused(here, "run --resume train.py")
    assert run(here, "--resume --run-dir d train.py").resume


def test_resuming_and_starting_over_exclude_each_other(here: Path) -> None:
    assert "cannot be combined" in refused(here, "run --resume --from-scratch --run-dir d train.py")
    assert run(here, "--from-scratch --run-dir d train.py").from_scratch


def test_a_directory_is_not_accepted_as_a_script(here: Path) -> None:
    (here / "package.py").mkdir()
    assert "is a directory" in refused(here, "run package.py")


def test_the_other_commands_have_their_options(here: Path) -> None:
    there = Path("d")
    assert asked(here, "status --run-dir d --json") == command_options.Status(there, True)
    assert asked(here, "incidents") == command_options.Incidents()
    assert asked(here, "explain -1") == command_options.Explain("-1"), "the command says what is expected"
    assert asked(here, "explain --json i-0001") == command_options.Explain("i-0001", None, True)
    assert asked(here, "checkpoints --verify") == command_options.Checkpoints(True)
    assert asked(here, "stop --now --run_dir=d") == command_options.Stop(True, there)
    assert asked(here, "inject kill --rank 3") == command_options.Inject("kill", 3)
    assert asked(here, "status --job a/gpt") == command_options.Status(job="a/gpt")
    assert asked(here, "stop --job gpt -n a --context=c") == command_options.Stop(
        job="gpt", namespace="a", context="c"
    )
    assert asked(here, "jobs -A --json") == command_options.Jobs(True, True)
    assert asked(here, "jobs --namespace a") == command_options.Jobs(namespace="a")
    assert asked(here, "doctor") == command_options.Doctor()
    assert asked(here, "doctor gpt-0 -n=a") == command_options.Doctor("gpt-0", namespace="a")
    assert asked(here, "inject-manifest - --image i") == command_options.InjectManifest("-", "i")
    assert asked(here, "demo --run-dir d --keep") == command_options.Demo(there, True)
    assert asked(here, "demo --cluster --context c") == command_options.Demo(cluster=True, context="c")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_option_of_a_command_and_an_example(here: Path, name: str) -> None:
    shown = asked(here, f"{name} --help")
    assert isinstance(shown, Show)
    assert all(option.names[0] in shown.text for option in COMMANDS[name].options)
    assert f"holdfast {name}" in shown.text.partition("Examples")[2]
    assert max(map(len, shown.text.splitlines())) <= 120
    assert asked(here, f"help {name}") == shown


def test_help_of_run_is_printed_despite_later_mistakes_but_not_after_the_command(here: Path) -> None:
    assert isinstance(asked(here, "run --members 2 -h"), Show)
    assert run(here, "train.py -h").command[-1] == "-h"


@pytest.mark.parametrize("line", ["", "--help", "-h", "help"])
def test_help_without_a_command_lists_the_commands(here: Path, line: str) -> None:
    shown = asked(here, line)
    assert isinstance(shown, Show)
    assert all(f"  {name} " in shown.text for name in COMMANDS)


def test_the_version_is_printed(here: Path) -> None:
    assert asked(here, "--version") == Show(f"holdfast {__version__}")


_HARD = """--help -- -m train.py --members --nproc_per_node=2 0 -1 = --run-dir --json --rank kill - --=
    --members= --rdzv-id -t x,y"""
_WORDS = st.sampled_from([*COMMANDS, *_HARD.split()])


@given(st.lists(_WORDS | st.text(max_size=5), max_size=6))
def test_any_words_are_a_command_or_one_line_of_error(words: list[str]) -> None:
    said = ""
    try:
        parse(words, environment={}, directory=Path("nowhere"))
    except BadInput as error:
        said = str(error)
    assert said.isprintable()
