from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import BadInput
from nodeagent.cli import options


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["chek"], "node: unknown command 'chek': did you mean 'check'?"),
        (["top"], "node: unknown command 'top'; commands are check, watch, serve, history"),
        (["check", "--jsn"], "node check: unknown option '--jsn': did you mean '--json'?"),
        (["check", "--format", "x"], "node check: unknown option '--format': did you mean '--json'?"),
        (["serve", "--port", "80"], "node serve: unknown option '--port': did you mean '--listen'?"),
        (["check", "--port", "80"], "node check: unknown option '--port'; options are --for, "),
        (["clear", "gpu/0", "--reason", "x"], "node clear: unknown option '--reason': did you mean '--why'?"),
        (["check", "gpu"], "node check: unexpected argument 'gpu': did you mean '--gpus'?"),
        (["watch", "--period", "0"], "node watch: unknown option '--period'; options are --"),
        (
            ["explain", "xyd", "79"],
            "node explain: invalid value 'xyd' for SUBJECT: did you mean 'xid'? expected xid, sxid",
        ),
        (["explain", "xid"], "node explain: missing CODE: expected a number such as 79, or the name of"),
        (["explain"], "node explain: missing SUBJECT: expected xid, sxid, check or kernel"),
        (["explain", "79"], "node explain: missing SUBJECT: did you mean `holdfast node explain xid 79`?"),
        (["forget"], "node forget: missing BASELINE: expected "),
        (
            ["inject", "xyd", "79"],
            "node inject: invalid value 'xyd' for KIND: did you mean 'xid'? expected xid, ",
        ),
        (["inject", "sample"], "node inject: missing VALUE: expected the code, the line, or CHECK=VALUE"),
        (
            ["inject", "sample", "heat=1"],
            "node inject: missing --entity for sample 'heat=1': expected the en",
        ),
        (["check", "--gpus"], "node check: missing value for --gpus: expected number of GPUs"),
        (
            ["serve", "--listen", "9465"],
            "node serve: invalid value '9465' for --listen: expected an IP address and a port: 127.0.0.1:",
        ),
        (["serve", "--listen", "localhost:²"], "expected an IP address and a port"),
        (["serve", "--listen", "127.0.0.1:99999"], "expected an IP address and a port"),
        (["check", "--for", "0"], "expected 0.1 to 3600 seconds"),
        (["check", "--for", "soon"], "invalid value 'soon' for --for: expected 0.1 to 3600 seconds"),
        (["check", "--ib-gbps", "fast"], "invalid value 'fast' for --ib-gbps: expected 1 to 10000 Gb/s"),
        (["history", "--limit", "-3"], "expected 1 to 100000 in whole numbers"),
        (["check", "--gpus", "1.5"], "expected 1 to 100000 in whole numbers"),
    ],
)
def test_a_mistake_is_one_line_with_the_accepted_values(words: list[str], told: str) -> None:
    with pytest.raises(BadInput) as caught:
        options.parse(words)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_an_injected_sample_needs_an_entity() -> None:
    assert options.parse(["inject", "xid", "79"]).entity == "gpu/0000:00:00.0"
    assert options.parse(["inject", "sample", "heat=1", "--entity", "node"]).entity == "node"


@pytest.mark.parametrize("words", [[], ["--help"], ["serve", "--help"]])
def test_help_names_the_command_and_exits_with_0(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        options.parse(words)
    assert caught.value.code == 0
    assert "holdfast node" in capsys.readouterr().out


def test_the_server_listens_on_loopback_by_default() -> None:
    assert options.split(options.parse(["serve"]).listen) == ("127.0.0.1", options.PORT)
    assert options.split(options.parse(["serve", "--listen", "[::1]:80"]).listen) == ("::1", 80)


def test_without_root_the_state_is_in_the_users_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert options.parse(["check"]).state_dir == tmp_path / "holdfast/node"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert options.parse(["check"]).state_dir == options.ROOT_STATE
