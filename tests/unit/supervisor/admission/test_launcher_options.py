from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from supervisor.admission.launcher_options import ACCELERATE, TORCHRUN, LaunchOption, scan
from supervisor.admission.shell_text import ShellWord, UnclearCommand
from supervisor.options.run_options import TORCHRUN_OPTIONS

# The options of `accelerate launch` in release 1.10 that concern the ranks.
OF_ACCELERATE = {
    "--config_file", "--quiet", "--cpu", "--multi_gpu", "--mixed_precision", "--num_processes",
    "--num_machines", "--num_cpu_threads_per_process", "--enable_cpu_affinity", "--dynamo_backend",
    "--dynamo_mode", "--dynamo_use_fullgraph", "--dynamo_use_dynamic", "--dynamo_use_regional_compilation",
    "--gpu_ids", "--same_network", "--machine_rank", "--main_process_ip", "--main_process_port", "--tee",
    "--log_dir", "--role", "--rdzv_backend", "--rdzv_conf", "--max_restarts", "--monitor_interval",
    "--module", "--no_python", "--debug",
}  # fmt: skip
_OPTION = re.compile(r'add_argument\(\s*((?:"-[-\w]+",\s*)+)(.*?)\n    \)', re.DOTALL)


def given(*texts: str) -> list[tuple[str, str]]:
    found = scan([ShellWord(each) for each in texts], TORCHRUN, "torchrun")
    return [(option.names[0], word.text) for option, word in found.given]


def test_options_are_read_up_to_the_script_in_all_spellings() -> None:
    found = scan(
        [ShellWord(each) for each in ("--nnodes=2", "-m", "-r3", "x", "--tee", "1")], TORCHRUN, "torchrun"
    )
    assert found.script == 3
    assert given("--nproc_per_node", "2", "--tee=1", "-t", "0:1", "-r=3", "s") == [
        ("--nproc-per-node", "2"),
        ("--tee", "1"),
        ("--tee", "0:1"),
        ("--redirects", "3"),
    ]
    assert given("--standalone", "--", "--script") == [("--standalone", "--standalone")]


def test_a_value_may_look_like_a_variable_but_an_option_may_not() -> None:
    value = ShellWord("$RANK", expands=True)
    assert (
        scan([ShellWord("--node-rank"), value, ShellWord("x")], TORCHRUN, "torchrun").value("--node-rank")
        == value
    )
    with pytest.raises(UnclearCommand, match=r"\$RANK may expand to options of torchrun"):
        scan([value, ShellWord("x")], TORCHRUN, "torchrun")


def test_an_option_is_found_by_each_of_its_names() -> None:
    options = [*TORCHRUN.values(), *ACCELERATE.values()]
    assert all(isinstance(each, LaunchOption) and each.names for each in options)
    assert all(name.startswith("-") and "_" not in name for each in options for name in each.names)


def test_torchrun_options_accepted_by_run_are_known() -> None:
    assert {name for each in TORCHRUN_OPTIONS for name in each.names} <= TORCHRUN.keys()


def test_the_options_of_the_installed_torchrun_are_known() -> None:
    torch = importlib.util.find_spec("torch")  # finds the package without importing it
    if torch is None or torch.origin is None:
        pytest.skip("there is no torch")
    source = (Path(torch.origin).parent / "distributed/run.py").read_text()
    source = source[source.index("def get_args_parser") :]
    options = [(re.findall(r'"(-[-\w]+)"', names), rest) for names, rest in _OPTION.findall(source)]
    assert len(options) > 25
    for names, rest in options:
        known = TORCHRUN.get(names[-1].replace("_", "-"))
        assert known is not None, names
        assert known.takes_value == ("check_env" not in rest and "store_true" not in rest), names


def test_accelerate_options_about_ranks_are_known() -> None:
    assert {name.replace("_", "-") for name in OF_ACCELERATE} <= ACCELERATE.keys()


@pytest.mark.parametrize(
    ("word", "hint"),
    [("--nproc_per_nod=2", "; did you mean --nproc-per-node?"), ("--colour", ""), ("-z", "")],
)
def test_a_misspelt_option_is_refused_with_the_closest_one(word: str, hint: str) -> None:
    with pytest.raises(UnclearCommand) as caught:
        given(word, "train.py")
    assert str(caught.value) == f"torchrun has an option that Holdfast does not know: {word}{hint}"
