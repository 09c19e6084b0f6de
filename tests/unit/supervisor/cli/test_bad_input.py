"""Bad input on the command line results in one line with the option, the value and what is expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import BadInput
from supervisor import __main__ as program
from supervisor.cli.parser import parse

RANKS = "expected 1-512, auto, cpu or gpu"
ONE_MACHINE = "a run is on one machine, where each member acts as one node: use --members N"
COMMANDS = (
    "commands are run, status, incidents, explain, checkpoints, stop, inject, jobs, doctor, nodes,"
    " inject-manifest, plan, demo, node"
)
DRILLS = "expected kill, stop, hang, spin, nan, exit, member, sidecar or supervisor"
DAYS = "expected a time of 1s-7d, such as 30s or 5m"

ANSWERS = [
    ("run --nproc-per-node 0 train.py", f"invalid value '0' for --nproc-per-node: {RANKS}"),
    ("run --nproc-per-node 513 train.py", f"invalid value '513' for --nproc-per-node: {RANKS}"),
    ("run --nproc-per-node -2 train.py", f"invalid value '-2' for --nproc-per-node: {RANKS}"),
    ("run --nproc_per_node=abc train.py", f"invalid value 'abc' for --nproc_per_node: {RANKS}"),
    ("run --nproc-per-node 1.5 train.py", "invalid value '1.5' for --nproc-per-node:"
     " expected a whole number 1-512, auto, cpu or gpu"),
    ("run --nproc-per-node gup train.py", "invalid value 'gup' for --nproc-per-node:"
     f" did you mean 'gpu'? {RANKS}"),
    ("run --nproc-per-node gpu train.py", "invalid value 'gpu' for --nproc-per-node:"
     " no GPU found; expected a number, auto or cpu"),
    ("run --members 0 train.py", "invalid value '0' for --members: expected 1-4096"),
    ("run --members= train.py", "invalid value '' for --members: expected 1-4096"),
    ("run --members --standby 1 train.py", "invalid value '--standby' for --members: expected 1-4096"),
    ("run --nnodes 1:4 train.py", "invalid value '1:4' for --nnodes:"
     " expected one number; for a range, use --members 4 --min-members 1, if the script supports other"
     " numbers of ranks"),
    ("run --nnodes 4:1 train.py", "invalid value '4:1' for --nnodes: expected 4 or 1"),
    ("run --nnodes 2: train.py", "invalid value '2:' for --nnodes: expected 1-4096"),
    ("run --members", "missing value for --members: expected 1-4096"),
    ("run --standby 65 train.py", "invalid value '65' for --standby: expected 0-64"),
    ("run --standby -1 train.py", "invalid value '-1' for --standby: expected 0-64"),
    ("run --warm hot train.py", "invalid value 'hot' for --warm: expected auto, park, spawn or cold"),
    ("run --warm parc train.py", "invalid value 'parc' for --warm: did you mean 'park'?"
     " expected auto, park, spawn or cold"),
    ("run --snapshot-every some train.py", "invalid value 'some' for --snapshot-every:"
     " expected 0-1000000000 or auto"),
    ("run --snapshot-budget 200% train.py", "invalid value '200%' for --snapshot-budget:"
     " expected a share above 0 and up to 1, such as 0.01 or 1%"),
    ("run --checkpoint-every never train.py", "invalid value 'never' for --checkpoint-every:"
     " expected a time of 1s-30d, such as 30s or 5m, or 0 for none"),
    ("run --checkpoint-every 5x train.py", "invalid value '5x' for --checkpoint-every:"
     " expected a time of 1s-30d, such as 30s or 5m, or 0 for none"),
    ("run --keep 0 train.py", "invalid value '0' for --keep: expected 1-100000"),
    ("run --max-restarts many train.py", "invalid value 'many' for --max-restarts: expected 0-1000000"),
    ("run --loss-jump 1 train.py", "invalid value '1' for --loss-jump: expected 1.5-1e12, or 0 for never"),
    ("run --hang-factor 0 train.py", "invalid value '0' for --hang-factor: expected 1.5-1000"),
    ("run --hang-floor 10ms train.py", "invalid value '10ms' for --hang-floor:"
     " expected a time of 50ms-1d, such as 30s or 5m"),
    ("run --hang-floor 1h train.py", "invalid value '1h' for --hang-floor:"
     " expected at most --first-step-timeout (10m)"),
    ("run --stall-limit 0 train.py", f"invalid value '0' for --stall-limit: {DAYS}"),
    ("run --first-step-timeout x train.py", f"invalid value 'x' for --first-step-timeout: {DAYS}"),
    ("run --pause-timeout 8d train.py", f"invalid value '8d' for --pause-timeout: {DAYS}"),
    ("run --member-timeout 0 train.py", "invalid value '0' for --member-timeout:"
     " expected a time of 500ms-1h, such as 30s or 5m"),
    ("run --grace -1 train.py", "invalid value '-1' for --grace:"
     " expected a time of 0s-1d, such as 30s or 5m"),
    ("run --port 99999 train.py", "invalid value '99999' for --port: expected 0-65535"),
    ("run --run-dir --json train.py", "invalid value '--json' for --run-dir:"
     " expected the path of a directory"),
    ("run --plain=yes train.py", "unexpected value 'yes' for --plain: it takes no value"),
    ("run --resume train.py", "--resume needs --run-dir DIR: the directory of the run to resume"),
    ("run --resume --from-scratch --run-dir d train.py", "--resume and --from-scratch cannot be combined:"
     " resume the run or start from step 0"),
    ("run --node-rank 1 train.py", f"invalid value '1' for --node-rank: expected 0 ({ONE_MACHINE})"),
    ("run --master-addr 10.0.0.1 train.py", "invalid value '10.0.0.1' for --master-addr:"
     f" expected localhost ({ONE_MACHINE})"),
    ("run --rdzv-endpoint other:1 train.py", "invalid value 'other:1' for --rdzv-endpoint:"
     f" expected localhost ({ONE_MACHINE})"),
    ("run --nproc 2 train.py", "unknown option '--nproc': did you mean '--nproc-per-node'?"),
    ("run --gpus 2 train.py", "unknown option '--gpus': did you mean '--nproc-per-node'?"),
    ("run --num_gpus 2 train.py", "unknown option '--num_gpus': did you mean '--nproc-per-node'?"),
    ("run --num-machines 2 train.py", "unknown option '--num-machines': did you mean '--members'?"),
    ("run --membres 2 train.py", "unknown option '--membres': did you mean '--members'?"),
    ("run --standbye 2 train.py", "unknown option '--standbye': did you mean '--standby'?"),
    ("run", "no command: pass one after --, such as `-- python train.py`"),
    ("run --", "no command: pass one after --, such as `-- python train.py`"),
    ("run -m", "missing module after -m: expected a name, as in `-m package.train`"),
    ("run other.py", "script 'other.py' not found in {here}: specify a Python file that exists"),
    (
        "plan --nodes 8 --state 5",
        "invalid value '5' for --state: expected a size with its unit, such as 5GB or 5TiB",
    ),
    ("status -q", "unknown option '-q'; options are --run-dir, --json, --job, --context, -n"),
    ("status a-folder", "unexpected argument 'a-folder'; did you mean --run-dir a-folder?"
     " usage: holdfast status [OPTIONS]"),
    ("status now", "unexpected argument 'now'; usage: holdfast status [OPTIONS]"),
    ("explain", "missing ID for explain:"
     " expected an incident from `holdfast incidents`, such as 3, i-0003 or last"),
    ("explain i-0001 2", "unexpected argument '2'; usage: holdfast explain ID [OPTIONS]"),
    ("inject", f"missing KIND for inject: {DRILLS}"),
    ("inject kil", f"invalid value 'kil' for KIND: did you mean 'kill'? {DRILLS}"),
    ("inject burn", f"invalid value 'burn' for KIND: {DRILLS}"),
    ("inject kill 1", "unexpected argument '1'; usage: holdfast inject KIND [OPTIONS]"),
    ("inject kill --rank x", "invalid value 'x' for --rank: expected 0-1000000"),
    ("inject member --member 1", "invalid value '1' for --member:"
     " expected one of the member's ranks, as in `holdfast inject member --rank R`"),
    ("stauts", "unknown command 'stauts': did you mean 'status'?"),
    ("top", f"unknown command 'top'; {COMMANDS}"),
    ("train.py", "unknown command 'train.py': to run a script, use `holdfast run train.py ...`"),
    ("--verbose", f"unknown option '--verbose'; {COMMANDS}"),
    ("--run-dir r status", "option '--run-dir' must come after the command: `holdfast status --run-dir ...`"),
    ("run --nproc-per-node abc train.py", "invalid value 'abc' for --nproc-per-node:"
     " expected 1-512, auto, cpu or gpu"),
    ("run --nproc-per-node atuo train.py", "invalid value 'atuo' for --nproc-per-node:"
     " did you mean 'auto'? expected 1-512, auto, cpu or gpu"),
    ("run --warm spwan train.py", "invalid value 'spwan' for --warm:"
     " did you mean 'spawn'? expected auto, park, spawn or cold"),
    ("run --snapshot-every -5 train.py", "invalid value '-5' for --snapshot-every:"
     " expected 0-1000000000 or auto"),
    ("run --snapshot-every often train.py", "invalid value 'often' for --snapshot-every:"
     " expected 0-1000000000 or auto"),
    ("run --snapshot-budget 0 train.py", "invalid value '0' for --snapshot-budget:"
     " expected a share above 0 and up to 1, such as 0.01 or 1%"),
    ("run --checkpoint-every 31d train.py", "invalid value '31d' for --checkpoint-every:"
     " expected a time of 1s-30d, such as 30s or 5m, or 0 for none"),
    ("run --keep-checkpoints 0 train.py", "invalid value '0' for --keep-checkpoints: expected 1-100000"),
    ("run --min-members 0 train.py", "invalid value '0' for --min-members: expected 1-100000 or all"),
    ("run --members 2 --min-members 3 train.py", "invalid value '3' for --min-members:"
     " expected at most --members (2)"),
    ("run --max-restarts -1 train.py", "invalid value '-1' for --max-restarts: expected 0-1000000"),
    ("run --skip-bad-batches=1 train.py", "unexpected value '1' for --skip-bad-batches: it takes no value"),
    ("run --loss-jump nan train.py", "invalid value 'nan' for --loss-jump:"
     " expected 1.5-1e12, or 0 for never"),
    ("run --hang-floor 1ms train.py", "invalid value '1ms' for --hang-floor:"
     " expected a time of 50ms-1d, such as 30s or 5m"),
    ("run --first-step-timeout soon train.py", "invalid value 'soon' for --first-step-timeout:"
     " expected a time of 1s-7d, such as 30s or 5m"),
    ("run --member-timeout 0.1s train.py", "invalid value '0.1s' for --member-timeout:"
     " expected a time of 500ms-1h, such as 30s or 5m"),
    ("run --grace -1s train.py", "invalid value '-1s' for --grace:"
     " expected a time of 0s-1d, such as 30s or 5m"),
    ("run --run-dir= train.py", "invalid value '' for --run-dir: expected the path of a directory"),
    ("run --help=x train.py", "unexpected value 'x' for --help: it takes no value"),
    ("run --rdzv-endpoint trainer-7:29500 train.py", "invalid value 'trainer-7:29500' for --rdzv-endpoint:"
     " expected localhost (a run is on one machine, where each member acts as one node: use --members N)"),
    ("run --master_addr trainer-7 train.py", "invalid value 'trainer-7' for --master_addr:"
     " expected localhost (a run is on one machine, where each member acts as one node: use --members N)"),
    ("status --verify", "unknown option '--verify'; options are --run-dir, --json, --job, --context, -n"),
    ("status --json=1", "unexpected value '1' for --json: it takes no value"),
    ("explain last a-folder", "unexpected argument 'a-folder'; did you mean --run-dir a-folder? usage:"
     " holdfast explain ID [OPTIONS]"),
    ("checkpoints --verfy", "unknown option '--verfy': did you mean '--verify'?"),
    ("stop --no", "unknown option '--no': did you mean '--now'?"),
    ("inject kill --rank", "missing value for --rank: expected 0-1000000"),
    ("status --job", "missing value for --job: expected the name of a job, or NAMESPACE/NAME"),
    ("status --job GPT", "invalid value 'GPT' for --job: expected the name of a job, or NAMESPACE/NAME"),
    ("status --job gpt --run-dir d", "--job and --run-dir cannot be combined: give a job on a cluster or a"
     " run here"),
    ("stop --context east", "--context needs --job NAME: give the job that `holdfast stop` should access"),
    ("explain last -n research", "-n needs --job NAME: give the job that `holdfast explain` should access"),
    ("status --job a/gpt -n b", "--job 'a/gpt' and -n 'b' name different namespaces: give only one"),
    ("status --jobs gpt", "unknown option '--jobs': did you mean '--job'?"),
    ("jobs -n a_b", "invalid value 'a_b' for -n: expected the name of a namespace"),
    ("demo --context c", "--context needs --cluster: without it, the demo runs on this machine"),
    ("demo --cluster --run-dir d", "--cluster and --run-dir cannot be combined: on a cluster, the demo has no"
     " run directories"),
    ("jobs -A -n a", "-n and -A cannot be combined: give one namespace or list all"),
    ("jobs gpt", "unexpected argument 'gpt'; usage: holdfast jobs [OPTIONS]"),
    ("jobs --run-dir d", "unknown option '--run-dir'; options are -A, --context, -n, --json"),
    ("doctor Pod", "invalid value 'Pod' for POD: expected the name of a pod, or NAMESPACE/NAME"),
    ("doctor a/pod -n b", "POD 'a/pod' and -n 'b' name different namespaces: give only one"),
    ("doctor a b", "unexpected argument 'b'; usage: holdfast doctor [POD] [OPTIONS]"),
    ("inject-manifest", "missing FILE for inject-manifest: expected the path of a manifest, or - for the"
     " standard input"),
    ("run --checkpoint-every 5 minutes train.py", "command 'minutes' not found: specify a program on PATH or"
     " the path of a program; or write a time as one word, 5m"),
    ("inject-manifest f --image=", "invalid value '' for --image: expected the name of an image"),
    ("job", "unknown command 'job': did you mean 'jobs'?"),
    ("plan", "missing --nodes N for plan: expected 1-100000"),
    ("plan --mtbf 1y", "missing --nodes N for plan: expected 1-100000"),
    ("plan 64", "unexpected argument '64'; usage: holdfast plan [OPTIONS]"),
    ("plan --nodes 0", "invalid value '0' for --nodes: expected 1-100000"),
    ("plan --node 64", "unknown option '--node': did you mean '--nodes'?"),
    ("plan --nodes 4 --mtfb 1y", "unknown option '--mtfb': did you mean '--mtbf'?"),
    ("plan --nodes 4 --standby 1", "unknown option '--standby': did you mean '--standbys'?"),
    ("plan --nodes 4 --standbys aut", "invalid value 'aut' for --standbys: did you mean 'auto'?"
     " expected 0-1000 or auto"),
    ("plan --nodes 4 --mtbf 3x", "invalid value '3x' for --mtbf:"
     " expected a time of 1h-100y, such as 90d or 50000h"),
    ("plan --nodes 4 --mtbf 5m", "invalid value '5m' for --mtbf:"
     " expected a time of 1h-100y, such as 90d or 50000h"),
    ("plan --nodes 4 --repair 2y", "invalid value '2y' for --repair:"
     " expected a time of 1m-1y, such as 30s or 5m"),
    ("plan --nodes 4 --state big", "invalid value 'big' for --state: expected a size such as 500GB or 4TiB"),
    ("plan --nodes 4 --checkpoint-bandwidth 2GB", "invalid value '2GB' for --checkpoint-bandwidth:"
     " expected a rate such as 2GB/s or 500MiB/s"),
    ("plan --nodes 4 --gpu-hour-cost free", "invalid value 'free' for --gpu-hour-cost:"
     " expected 0.0001-100000"),
    ("demo now", "unexpected argument 'now'; usage: holdfast demo [OPTIONS]"),
    ("demo --quik", "unknown option '--quik': did you mean '--quick'?"),
    ("--nproc-per-node 2 train.py", "option '--nproc-per-node' must come after the command:"
     " `holdfast run --nproc-per-node ...`"),
    ("--json incidents", "option '--json' must come after the command: `holdfast incidents --json ...`"),
]  # fmt: skip


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('hello')\n")
    (tmp_path / "a-folder").mkdir()
    return tmp_path


@pytest.mark.parametrize(("line", "answer"), ANSWERS, ids=[line for line, _ in ANSWERS])
def test_each_bad_input_has_exactly_its_message(here: Path, line: str, answer: str) -> None:
    with pytest.raises(BadInput) as error:
        parse(line.split(), environment={}, directory=here)
    assert str(error.value) == answer.replace("{here}", str(here))


@pytest.mark.parametrize("line", ["run --nproc-per-node 0 train.py", "inject burn", "stauts"])
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], line: str
) -> None:
    assert program.main(line.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("holdfast: ")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (
            "run -- torchrun --nproc-per-node 2 train.py",
            ("replaces torchrun", "-- python train.py"),
        ),
        ("run -m torch.distributed.run train.py", ("replaces torchrun", "-- python train.py")),
        ("run -- no-such-program", ("command 'no-such-program' not found",)),
        ("run a-file", ("command 'a-file' is a file that cannot be executed", "python a-file")),
        ("run a-folder", ("command 'a-folder' is a directory", "a Python file")),
        ("explain last a-folder", ("did you mean --run-dir a-folder?", "usage: holdfast explain ID")),
    ],
)
def test_a_command_that_cannot_be_run_is_named(here: Path, line: str, parts: tuple[str, ...]) -> None:
    (here / "a-file").touch()
    with pytest.raises(BadInput) as error:
        parse(line.split(), environment={}, directory=here)
    assert "\n" not in str(error.value)
    assert all(part in str(error.value) for part in parts), str(error.value)
