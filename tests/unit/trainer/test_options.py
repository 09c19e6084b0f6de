import argparse

import pytest

from trainer.gpt.options import make_parser as gpt_parser
from trainer.gpt.options import read as read_gpt
from trainer.options import number, whole
from trainer.vision.options import make_parser as vision_parser
from trainer.vision.options import read as read_vision


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("--layers 0", "argument --layers: '0' is not a whole number of at least 1"),
        ("--layers", "argument --layers: expected one argument"),
        ("--steps ten", "argument --steps: 'ten' is not a whole number of at least 0"),
        ("--lr -1", "argument --lr: '-1' is not a number above 0"),
        ("--lr nan", "argument --lr: 'nan' is not a number above 0"),
        ("--clip inf", "argument --clip: 'inf' is not a number above 0"),
        ("--dropout 1", "argument --dropout: '1' is not a number of at least 0 and below 1"),
        ("--laeyrs 3", "unknown option --laeyrs; did you mean --layers?"),
        ("--laeyrs=3", "unknown option --laeyrs=3; did you mean --layers?"),
        ("--layer 3", "unknown option --layer; did you mean --layers?"),
        ("--hlep", "unknown option --hlep; did you mean --help?"),
        ("--images 9", "unknown option --images; --help lists the options"),
        ("surplus", "unknown option surplus; --help lists the options"),
        ("--heads 3", "--heads: 3 does not divide --width 128"),
        ("--digest no/such/file", "--digest: no/such is not a writable directory"),
    ],
)
def test_a_bad_option_is_reported_in_one_line_with_code_2(
    argv: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        read_gpt(gpt_parser(), argv.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"trainer.gpt: error: {told}\n"


def test_explicit_options_override_the_tiny_preset_whatever_their_position() -> None:
    for argv in (["--tiny", "--width", "48"], ["--width", "48", "--tiny"]):
        options = read_gpt(gpt_parser(), argv)
        assert (options.width, options.layers) == (48, 2)
    assert read_vision(vision_parser(), ["--tiny"]).blocks == 1
    assert read_vision(vision_parser(), []).blocks == 3


@pytest.mark.parametrize("make", [gpt_parser, vision_parser])
def test_every_option_has_help(make: type, capsys: pytest.CaptureFixture[str]) -> None:
    parser = make()
    assert all(action.help for action in parser._actions)
    with pytest.raises(SystemExit) as caught:
        parser.read(["--help"])
    assert caught.value.code == 0
    assert "--val-every" in capsys.readouterr().out


def test_bf16_is_chosen_by_the_device_unless_set() -> None:
    given = [read_gpt(gpt_parser(), argv).bf16 for argv in ([], ["--bf16"], ["--no-bf16"])]
    assert given == [None, True, False]


def test_the_bounds_of_an_option_are_accepted_and_values_beyond_them_refused() -> None:
    assert whole(1)("1") == 1
    assert number(0.0, below=1.0)("0") == 0
    assert number(0.0, above=True)("1e-9") == 1e-9
    with pytest.raises(argparse.ArgumentTypeError):
        number(0.0, above=True)("0")
