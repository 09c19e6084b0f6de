from __future__ import annotations

import re
import shlex
import subprocess
import tracemalloc
from pathlib import Path

import pytest

from supervisor.admission.program_words import python_flags
from supervisor.admission.shell_text import ShellWord
from supervisor.admission.training_command import (
    MAX_CHARS,
    MAX_WORDS,
    NotUnderstood,
    TrainingCommand,
    understand,
)
from tests.samples.growth import growth

SET_NPROC = "set holdfast.dev/nproc-per-node"
SET_COMMAND = "set the container's command to python, torchrun or accelerate launch"
# A command line, the command of a rank, the ranks on each pod, the number of pods.
UNDERSTOOD: list[tuple[str, str, int | str | None, str]] = [
    ("python train.py", "python train.py", None, ""),
    ("python -u train.py --lr 0.1", "python -u train.py --lr 0.1", None, ""),
    ("python3 -m pkg.train -m x", "python3 -m pkg.train -m x", None, ""),
    ("/usr/bin/python3.11 -um pkg", "/usr/bin/python3.11 -u -m pkg", None, ""),
    ("python -W ignore -X dev -Wonce x.py -u", "python -W ignore -X dev -Wonce x.py -u", None, ""),
    ("python -c 'import x; x.y()'", "python -c 'import x; x.y()'", None, ""),
    ("/usr/bin/env python x.py", "python x.py", None, ""),
    ("env -u X A=b --chdir=/app C=d python x.py", "python x.py", None, ""),
    ("tini -g -- python x.py", "python x.py", None, ""),
    ("torchrun train.py", "python3 -u train.py", None, ""),
    ("torchrun --nproc-per-node 4 train.py -x", "python3 -u train.py -x", 4, ""),
    ("torchrun --nproc_per_node=8 --nnodes=2 x.py", "python3 -u x.py", 8, "2"),
    ("torchrun --nnodes 1:4 --nproc_per_node gpu x.py", "python3 -u x.py", "gpu", "1:4"),
    ("torchrun --standalone --nproc-per-node=auto x.py", "python3 -u x.py", "auto", ""),
    ("torchrun --nproc-per-node 2 -m pkg.train --a=b", "python3 -u -m pkg.train --a=b", 2, ""),
    ("torchrun --module --nproc-per-node 2 pkg", "python3 -u -m pkg", 2, ""),
    ("torchrun --nproc-per-node 2 --no-python ./bin/train -v", "./bin/train -v", 2, ""),
    ("torchrun -r 3 -t3 -r=1 --tee 0:1 --log_dir=/l --role a x.py", "python3 -u x.py", None, ""),
    ("torchrun --rdzv_backend c10d --rdzv_endpoint h:1 --rdzv-id=j --rdzv-conf a=b x.py",
     "python3 -u x.py", None, ""),
    ("torchrun --max-restarts=3 --monitor_interval 1 --start-method spawn -- x.py",
     "python3 -u x.py", None, ""),
    ("torchrun --node_rank=1 --master_addr=h --master-port 1 --local-addr 1.2.3.4 x.py",
     "python3 -u x.py", None, ""),
    ("torchrun --numa-binding node --duplicate-stdout-filters a,b --run-path x.py",
     "python3 -u x.py", None, ""),
    ("torchrun --nproc-per-node 2 --nproc-per-node 3 x.py", "python3 -u x.py", 3, ""),
    ("torchrun --nproc-per-node=$(GPUS) --nnodes=$(PODS) x.py --n=$(PODS)",
     "python3 -u x.py '--n=$(PODS)'", 6, ""),
    ("/opt/venv/bin/torchrun x.py", "/opt/venv/bin/python3 -u x.py", None, ""),
    ("/usr/local/bin/torchrun x.py", "python3 -u x.py", None, ""),
    ("/root/.local/bin/torchrun x.py", "python3 -u x.py", None, ""),
    ("python -m torch.distributed.run --nproc_per_node 2 x.py", "python -u x.py", 2, ""),
    ("python3.12 -um torch.distributed.run --nproc_per_node 2 -m pkg", "python3.12 -u -m pkg", 2, ""),
    ("python -m torch.distributed.launch --use_env --nproc_per_node=2 x.py", "python -u x.py", 2, ""),
    ("accelerate launch x.py", "python3 -u x.py", "gpu", ""),
    ("accelerate launch --num_processes 8 --num_machines 2 --multi_gpu x.py -y",
     "python3 -u x.py -y", 4, "2"),
    ("accelerate launch --num-processes=2 --machine_rank $(R) --main_process_ip h --main_process_port 1"
     " --same_network -m pkg", "python3 -u -m pkg", 2, ""),
    ("accelerate launch --cpu --num_processes 4 x.py", "python3 -u x.py", 1, ""),
    ("accelerate launch --gpu_ids all --num_processes 4 --quiet -t 3 x.py", "python3 -u x.py", 4, ""),
    ("accelerate-launch --num_processes 2 x.py", "python3 -u x.py", 2, ""),
    ("python -m accelerate.commands.launch --num_processes 2 x.py", "python -u x.py", 2, ""),
    ("python -m accelerate.commands.accelerate_cli launch --num_processes 2 x.py", "python -u x.py", 2, ""),
]  # fmt: skip
ENVIRONMENT: dict[str, str | None] = {"GPUS": "6", "PODS": None}


def words(text: str) -> list[str]:
    return shlex.split(text)


def understood(command: list[str], environment: dict[str, str | None] | None = None) -> TrainingCommand:
    found = understand(command, [], environment or {})
    assert isinstance(found, TrainingCommand), found
    return found


def why(command: list[str], environment: dict[str, str | None] | None = None) -> str:
    found = understand(command, [], environment or {})
    assert isinstance(found, NotUnderstood), found
    return found.why


@pytest.mark.parametrize(("line", "per_rank", "nproc", "nnodes"), UNDERSTOOD)
def test_a_command_is_parsed(line: str, per_rank: str, nproc: int | str | None, nnodes: str) -> None:
    found = understood(words(line), ENVIRONMENT)
    assert (list(found.per_rank), found.nproc, found.nnodes) == (words(per_rank), nproc, nnodes)
    assert found.started_by(["LAUNCH"])[-len(found.per_rank) - 1 :] == ("LAUNCH", *found.per_rank)


@pytest.mark.parametrize("line", [line for line, *_ in UNDERSTOOD])
def test_the_split_between_command_and_args_does_not_matter(line: str) -> None:
    whole = words(line)
    for place in range(1, len(whole)):
        assert understand(whole[:place], whole[place:], ENVIRONMENT) == understand(whole, [], ENVIRONMENT)


@pytest.mark.parametrize("line", [line for line, *_ in UNDERSTOOD if "$(" not in line and "'" not in line])
def test_a_shell_around_a_command_is_kept(line: str) -> None:
    whole = words(line)
    alone, found = understood(whole), understood(["bash", "-lc", f"cd /app && {line}"])
    assert (found.per_rank, found.nproc, found.interpreter) == (
        alone.per_rank,
        alone.nproc,
        alone.interpreter,
    )
    (*_, text) = found.started_by(["LAUNCH"])
    start = " ".join((*alone.prefix, "LAUNCH", *alone.per_rank))
    assert text == f"cd /app && exec {start}"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("python", "python has no script"),
        ("python -", "reads its script from standard input"),
        ("python -m", "is missing or not known"),
        ("nvidia-smi -l", "does not know how 'nvidia-smi' starts the training"),
        ("deepspeed train.py", "^deepspeed starts the ranks itself: start the script with torchrun$"),
        ("python -m deepspeed.launcher.runner x.py", "starts the ranks itself"),
        (
            "/opt/mpi/bin/mpirun -np 4 python x.py",
            "^mpirun starts the ranks itself, even in other pods: start the",
        ),
        (
            "/usr/sbin/sshd -De",
            "^sshd waits for mpirun to start the ranks: start the script with python or",
        ),
        (
            "dlrover-run --nnodes=2 x.py",
            "^dlrover-run starts the ranks itself: start the script with torchrun$",
        ),
        ("nsys profile -o x torchrun x.py", "^nsys precedes torchrun, so Holdfast .*: remove nsys$"),
        ("ray start --block", "^ray starts the training's actors itself, which Holdfast does not supervise"),
        ("./train.sh", "does not know how './train.sh' starts the training"),
        ("bash train.sh", "bash runs a file that Holdfast cannot read"),
        ("bash -c", "bash -c has no text"),
        ("env -i python x.py", "env -i may change the command's environment"),
        ("env -S 'python x.py'", "env -S may change"),
        ("env A=b", "does not know how 'A=b' starts"),
        ("torchrun", "torchrun has no script"),
        ("torchrun --nproc-per-node", "torchrun needs a value for --nproc-per-node"),
        ("torchrun --nproc-per-node 2", "torchrun has no script"),
        ("torchrun --nproc 2 x.py", "has an option that Holdfast does not know: --nproc"),
        ("torchrun --standalone=1 x.py", "has an option that Holdfast does not know: --standalone=1"),
        (
            "torchrun --nproc-per-node=xpu x.py",
            f"torchrun starts 'xpu' ranks on each node, but .*{SET_NPROC}",
        ),
        ("torchrun --nproc-per-node=0 x.py", SET_NPROC),
        ("torchrun --nproc-per-node=$(UNKNOWN) x.py", SET_NPROC),
        ("torchrun --nproc-per-node=$(PODS) x.py", SET_NPROC),
        ("torchrun $(OPTIONS) x.py", r"\$\(OPTIONS\) may expand to options of torchrun: write them out"),
        ("torchrun --virtual-local-rank x.py", "it gives every rank the local rank 0"),
        ("torchrun --no-python -m x", "cannot be combined"),
        ("python -m torch.distributed.launch x.py", "passes --local-rank to the script"),
        ("accelerate config", "accelerate without launch does not start a training"),
        ("python -m accelerate.commands.accelerate_cli env", "accelerate without launch"),
        (
            "accelerate launch --config_file c.yaml x.py",
            "the pod does not contain the settings in c.yaml: set the ACCELERATE_\\* variables, and holdfast",
        ),
        (
            "accelerate launch --use_fsdp --num_processes 2 x.py",
            "--use_fsdp: Holdfast does not set its variables",
        ),
        ("accelerate launch --fsdp_version 2 x.py", "--fsdp_version: Holdfast does not set its variables"),
        ("accelerate launch --use_deepspeed x.py", "--use_deepspeed: Holdfast does not set"),
        ("accelerate launch --mixed_precision fp8 x.py", "fp8 needs variables that Holdfast does not set"),
        ("accelerate launch --gpu_ids 0,1 x.py", "the pod's resources determine the devices"),
        ("accelerate launch --tpu x.py", "does not start the ranks as torchrun does"),
        ("accelerate launch --num_processes 3 --num_machines 2 x.py", "3 processes cannot be divided evenly"),
        ("accelerate launch --num_machines 2 x.py", SET_NPROC),
        ("accelerate launch --num_processes $(N) x.py", SET_NPROC),
        (
            "accelerate launch --mixed_precision $(P) x.py",
            r"the value of \$\(P\) is not known: write it out",
        ),
        ("accelerate launch --unheard_of x.py", "has an option that Holdfast does not know: --unheard_of"),
    ],
)
def test_a_command_that_cannot_be_translated_is_refused(line: str, reason: str) -> None:
    found = understand(words(line), [], ENVIRONMENT)
    assert isinstance(found, NotUnderstood)
    assert re.search(reason, found.why)


def test_without_a_command_the_image_decides_and_the_note_asks_to_set_one() -> None:
    found = understand([], ["--lr", "0.1"], {})
    assert isinstance(found, NotUnderstood)
    assert "the container has no command" in found.why
    assert "set the container's command to python, torchrun or accelerate launch" in found.why


@pytest.mark.parametrize(
    ("line", "nproc"),
    [
        ("torchrun --nproc-per-node=$(UNKNOWN) x.py", 4),
        ("torchrun --nproc-per-node=xpu x.py", 4),
        ("bash -c 'torchrun --nproc-per-node=$NPROC x.py'", 4),
        ("accelerate launch --config_file c.yaml x.py", 4),
        ("accelerate launch --num_processes $(N) x.py", "gpu"),
        ("torchrun --nproc-per-node=2 x.py", 4),
        ("python x.py", 4),
    ],
)
def test_the_annotation_determines_the_number_of_ranks(line: str, nproc: int | str) -> None:
    found = understand(words(line), [], {"PET_NPROC_PER_NODE": "8"}, nproc)
    assert isinstance(found, TrainingCommand)
    assert found.nproc == nproc


def test_accelerates_config_file_is_reported_as_having_no_effect() -> None:
    found = understand(words("accelerate launch --config_file c.yaml x.py"), [], {}, 2)
    assert isinstance(found, TrainingCommand)
    assert found.notes == ("c.yaml has no effect: set the ACCELERATE_* variables in the pod instead",)


def test_torchrun_reads_its_variables_and_plain_python_does_not() -> None:
    given: dict[str, str | None] = {"PET_NPROC_PER_NODE": "4", "PET_NNODES": "2"}
    assert (
        understood(["torchrun", "x.py"], given).nproc,
        understood(["torchrun", "x.py"], given).nnodes,
    ) == (4, "2")
    assert understood(words("torchrun --nproc-per-node 3 x.py"), given).nproc == 3
    assert understood(["python", "x.py"], given).nproc is None
    assert understood(["torchrun", "pkg"], {"PET_MODULE": "1"}).per_rank == ("python3", "-u", "-m", "pkg")
    assert understood(["torchrun", "a"], {"PET_NO_PYTHON": "1"}).per_rank == ("a",)
    assert understood(["torchrun", "a"], {"PYTHON_EXEC": "pypy"}).per_rank == ("pypy", "-u", "a")


@pytest.mark.parametrize("value", [None, "$(OTHER)", "", "many"])
def test_a_torchrun_variable_with_an_unknown_value_needs_the_annotation(value: str | None) -> None:
    assert SET_NPROC in why(["torchrun", "x.py"], {"PET_NPROC_PER_NODE": value})
    assert understood(["torchrun", "x.py"], {"PET_NNODES": None}).nnodes == ""


def test_the_variables_that_accelerate_would_set_are_set() -> None:
    line = (
        "accelerate launch --num_processes 2 --mixed_precision bf16 --dynamo_backend inductor --dynamo_mode"
        " max-autotune --dynamo_use_dynamic --num_cpu_threads_per_process=4 --debug x.py"
    )
    assert dict(understood(words(line)).environment) == {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_DYNAMO_MODE": "max-autotune",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "True",
        "OMP_NUM_THREADS": "4",
        "ACCELERATE_DEBUG_MODE": "true",
    }
    same: dict[str, str | None] = {"OMP_NUM_THREADS": "4"}
    assert understood(words(line), same).environment == understood(words(line)).environment
    for other in ("8", None):
        assert "sets OMP_NUM_THREADS to 4, but the container sets it too" in why(
            words(line), {"OMP_NUM_THREADS": other}
        )


SCRIPT = r"""
set -euo pipefail
# Install what the image lacks; torchrun comes below.
pip install -r "requirements.txt" 2>&1 | tail -1
python -m pip install 'extra; torchrun fake.py'
export NCCL_DEBUG=INFO OUT=$(mktemp -d)
cd /work\
space && OMP_NUM_THREADS=4 torchrun \
  --nproc_per_node=8 --nnodes "$WORLD_SIZE" \
  --node_rank=${RANK} --master_addr=$MASTER_ADDR \
  train.py --out "$OUT" \
  --lr ${LR:-0.1} > "log $RANK" 2>&1
"""


def test_a_script_of_several_lines_keeps_everything_but_the_launcher() -> None:
    found = understood(["bash", "-c", SCRIPT])
    assert (found.nproc, found.nnodes, found.interpreter) == (8, "", "python3")
    assert found.per_rank == ("python3", "-u", "train.py", "--out", '"$OUT"', "--lr", "${LR:-0.1}")
    (shell, flag, text) = found.started_by(["python3", "-c", "a; b", "/lib"])
    begin = SCRIPT.index("torchrun \\")
    end = SCRIPT.index("train.py")
    start = "exec python3 -c 'a; b' /lib python3 -u "
    assert (shell, flag) == ("bash", "-c")
    assert text == SCRIPT[:begin] + start + SCRIPT[end:]
    assert found.notes == ()


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("torchrun x.py", "exec L python3 -u x.py"),
        ("exec torchrun x.py;", "exec L python3 -u x.py;"),
        ("set -e; cd dir && exec torchrun x.py", "set -e; cd dir && exec L python3 -u x.py"),
        ("A=b C=$D torchrun x.py", "A=b C=$D exec L python3 -u x.py"),
        ("A=b exec torchrun x.py", "A=b exec L python3 -u x.py"),
        ("env A=b torchrun x.py", "exec env A=b L python3 -u x.py"),
        ("monitor & torchrun x.py\n", "monitor & exec L python3 -u x.py\n"),
        ("exec python -u 'my script.py' \"$@\"", "exec L python -u 'my script.py' \"$@\""),
        ("if a; then b; fi; torchrun x.py", "if a; then b; fi; exec L python3 -u x.py"),
        ("(sleep 9 &) && torchrun x.py", "(sleep 9 &) && exec L python3 -u x.py"),
        ("cat <<E >x\ntorchrun y\nE\npython x", "cat <<E >x\ntorchrun y\nE\nexec L python x"),
        ("python - <<E\n1\nE\npython x.py", "python - <<E\n1\nE\nexec L python x.py"),
        ("sshd; python x.py", "sshd; exec L python x.py"),
        ("ls -l torchrun; python x.py", "ls -l torchrun; exec L python x.py"),
        ("echo torchrun y.py; python x.py", "echo torchrun y.py; exec L python x.py"),
        ("python \"$SCRIPT\" --x", "exec L python \"$SCRIPT\" --x"),
        ("python3 -c 'prepare()'; python3 /app/$N.py", "python3 -c 'prepare()'; exec L python3 /app/$N.py"),
    ],
)  # fmt: skip
def test_the_launcher_replaces_the_shell_if_nothing_follows(text: str, start: str) -> None:
    found = understood(["sh", "-c", text, "zero", "one"])
    assert found.started_by(["L"]) == ("sh", "-c", start, "zero", "one")
    assert found.notes == ()


@pytest.mark.parametrize(
    "text",
    [
        "torchrun x.py | tee log",
        "torchrun x.py && echo done",
        "torchrun x.py; cp -r out /data",
        "trap cleanup EXIT; torchrun x.py",
        "yes | torchrun x.py",
        "(yes) | torchrun x.py",
        "if a; then b; fi || torchrun x.py",
        "torchrun x.py; if a; then b; fi",
    ],
)
def test_a_shell_with_further_commands_stays_and_the_note_warns_about_signals(text: str) -> None:
    found = understood(["sh", "-c", text])
    assert found.started_by(["L"])[2] == text.replace("torchrun", "L python3 -u")
    assert found.notes == ("the shell does not pass SIGTERM on to the training: start it last, with `exec`",)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("torchrun --nproc_per_node=$NPROC x.py", f"(torchrun --nproc-per-node $NPROC): {SET_NPROC}"),
        ("torchrun --nproc_per_node=$(NPROC) x.py", SET_NPROC),
        ("accelerate launch --num_processes $N x.py", SET_NPROC),
        ("torchrun $ARGS train.py", "$ARGS may expand to options of torchrun: write them out"),
        ("torchrun `cat args` train.py", "may expand to options of torchrun"),
        ("python $SCRIPT", "$SCRIPT may expand to several words: write out the script"),
        ("A=b nsys profile torchrun x.py", "nsys precedes torchrun"),
        ("nsys profile torchrun x.py; python report.py", "nsys precedes torchrun"),
        ("if true; then torchrun x.py; fi", f"the training is within a compound command (if): {SET_COMMAND}"),
        ("if a; then torchrun x.py; else torchrun y.py; fi", "several commands could be the training"),
        ("case $A in a) torchrun x.py;; esac", f"it has a compound command (case): {SET_COMMAND}"),
        ("for i in 1 2; do python x.py; done", "the training is within a compound command (for)"),
        ("(cd a && torchrun x.py)", f"the training is within a subshell: {SET_COMMAND}"),
        ("run() { torchrun x.py; }; run", f"it defines a function: {SET_COMMAND}"),
        ("{ torchrun x.py; }", "the training is within a compound command ({)"),
        ("! torchrun x.py", "the training is within a compound command (!)"),
        ("python - <<EOF\nprint(1)\nEOF", "python reads its script from standard input"),
        ("python <<EOF\nprint(1)\nEOF", "python has no script"),
        ("cat <<EOF\ntorchrun x.py\nEOF", "none of its commands starts Python"),
        ("sshd; mpiexec -np 3 python x.py", "mpiexec starts the ranks itself, even in other pods"),
        ("mkdir /run/sshd; /usr/sbin/sshd -D", "sshd waits for mpirun"),
        ("ray start --head; python x.py", "ray starts the training's actors itself"),
        ("python a.py && python b.py", "several commands could be the training"),
        ("torchrun a.py; torchrun b.py", "several commands could be the training"),
        ("a; bash /app/train.sh -x", f"starts Python (the last one is 'bash /app/train.sh'): {SET_COMMAND}"),
        ("~/venv/bin/python x.py", "none of its commands starts Python"),
        ("$PYTHON x.py", "none of its commands starts Python"),
        ("env -i python x.py", "none of its commands starts Python"),
        ("", "none of its commands starts Python"),
        ("torchrun x.py &", "the training runs in the background"),
        ("torchrun > log --nproc-per-node 2 x.py", "a redirection precedes the script"),
        ("torchrun 'x.py", "a ' is not closed"),
        ('torchrun "x.py', 'a " is not closed'),
        ("torchrun ${X x.py", "a { is not closed"),
        ("torchrun x.py >", "a redirection has no target"),
    ],
)
def test_ambiguous_shell_text_is_refused(text: str, reason: str) -> None:
    found = why(["bash", "-ec", text])
    assert found.startswith("the text of bash -c: ")
    assert reason in found


def test_options_of_a_shell_are_kept() -> None:
    for options in (["-euxo", "pipefail", "-c"], ["--login", "-c"], ["-l", "-c"], ["-c", "-e"], ["-c", "--"]):
        found = understood(["/bin/bash", *options, "exec python x.py"])
        assert found.started_by(["L"]) == ("/bin/bash", *options, "exec L python x.py")


@pytest.mark.parametrize("shell", ["bash", "dash"])
def test_a_real_shell_passes_the_launcher_the_same_arguments_as_torchrun(shell: str, tmp_path: Path) -> None:
    text = (
        "set -e; N=2; cd '{0}' && LR='0.1 0.2' torchrun --nproc_per_node=2 --nnodes $N \\\n"
        ' "my script.py" --n=$N "$LR" \'a b\'  # a comment\n'
    )
    show = ["env", "printf", "%s|"]
    found = understood([shell, "-c", text.format(tmp_path)])
    done = subprocess.run(found.started_by(show), check=True, capture_output=True, text=True)
    assert done.stdout == "python3|-u|my script.py|--n=2||a b|"


@pytest.mark.parametrize(
    ("text", "nproc", "nnodes"),
    [
        ("torchrun --nproc_per_node=$GPUS --nnodes=${PODS} x.py", 8, "2"),
        ("torchrun --nproc_per_node=$(GPUS) --nnodes=$(PODS) x.py", 8, "2"),
        ('export GPUS=4 PODS=3\ntorchrun --nproc_per_node="$GPUS" --nnodes "$PODS" x.py', 4, "3"),
        ("GPUS=4; accelerate launch --num_processes $GPUS --num_machines $PODS x.py", 2, "2"),
        ("PODS=`wc -l hosts`; torchrun --nproc_per_node=2 --nnodes=$PODS x.py", 2, ""),
    ],
)
def test_numbers_may_be_in_variables_whose_value_is_certain(text: str, nproc: int, nnodes: str) -> None:
    found = understood(["bash", "-c", text], {"GPUS": "8", "PODS": "2"})
    assert (found.nproc, found.nnodes) == (nproc, nnodes)


@pytest.mark.parametrize("shell", ["bash", "dash"])
def test_a_real_shell_reaches_the_launcher_after_its_preparations(shell: str, tmp_path: Path) -> None:
    text = (
        "set -e\ncd '{0}'\ncat <<'EOF' >train.py\nif (it's no shell\ntorchrun z.py\nEOF\n"
        'if [ -n "$HOME" ]; then N=1; else exit 3; fi\nfor n in 1 2; do N=$N$n; done\n'
        "{{ true || exit 4; }} && (exit 0)\ntorchrun train.py --n=$N\n"
    )
    found = understood([shell, "-c", text.format(tmp_path)])
    done = subprocess.run(
        found.started_by(["env", "printf", "%s|"]), check=True, capture_output=True, text=True
    )
    assert done.stdout == "python3|-u|train.py|--n=112|"
    assert (tmp_path / "train.py").read_text() == "if (it's no shell\ntorchrun z.py\n"


def test_the_time_to_read_flags_is_proportional_to_their_number() -> None:
    def flags(count: int) -> list[ShellWord]:
        return [
            ShellWord(each) for each in ("python", *["--check-hash-based-pycs", "always"] * count, "x.py")
        ]

    small, large = flags(4_000), flags(16_000)
    assert growth(lambda: python_flags(small), lambda: python_flags(large)) < 9


@pytest.mark.parametrize(
    ("command", "args"),
    [
        (["torchrun", "x.py"], ["x"] * (MAX_WORDS - 1)),
        (["torchrun", "x.py", "x" * MAX_CHARS], []),
        (["torchrun", "x.py"], ["x" * (MAX_CHARS // 2)] * 2),
        (["python"], ["--check-hash-based-pycs", "a"] * 100_000),
    ],
)
def test_a_command_that_is_too_long_is_left_alone_and_the_note_gives_the_limits(
    command: list[str], args: list[str]
) -> None:
    found = understand(command, args, {})
    assert isinstance(found, NotUnderstood)
    assert f"at most {MAX_WORDS:,} and {MAX_CHARS:,}" in found.why


def test_a_command_of_the_greatest_length_is_read() -> None:
    rest = ["x"] * (MAX_WORDS - 3) + ["x" * (MAX_CHARS - MAX_WORDS - 10)]
    assert understood(["torchrun", "x.py", *rest]).per_rank == ("python3", "-u", "x.py", *rest)


_LONG = "9" * 5_000  # more digits than Python converts


@pytest.mark.parametrize(
    "line",
    [
        f"torchrun --nproc-per-node {_LONG} x.py",
        f"accelerate launch --num_processes {_LONG} x.py",
        f"accelerate launch --num_processes 4 --num_machines {_LONG} x.py",
        "torchrun --nproc-per-node $(LONG) x.py",
        f"torchrun --nproc-per-node {'$(DIGITS)' * 20} x.py",
        f"bash -c 'N={_LONG}; torchrun --nproc-per-node $N x.py'",
    ],
)
def test_a_number_of_too_many_digits_is_not_known(line: str) -> None:
    found = why(words(line), {"LONG": _LONG, "DIGITS": "9" * 200})
    assert "not known" in found or "cannot tell how many processes" in found


def test_a_number_of_pods_with_too_many_digits_is_not_known() -> None:
    assert understood(words(f"torchrun --nnodes {_LONG} x.py")).nnodes == ""


def test_a_variable_that_is_repeated_in_a_number_is_not_copied_each_time() -> None:
    """Kubernetes would not start the container. The webhook would run out of memory before that."""
    line = ["torchrun", "--nproc-per-node", "$(LONG)" * 70_000, "x.py"]
    tracemalloc.start()
    try:
        why(line, {"LONG": "9" * 1_000})
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()
