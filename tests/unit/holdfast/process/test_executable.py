"""A program that the kernel cannot start is named before the attempt, or after the kernel's refusal."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import BadInput
from holdfast.process import executable
from holdfast.worker import program

OTHERS = b"\x7fELF\x02\x01\x01" + b"\0" * 9 + b"\x02\x00\xf3\x00" + b"\0" * 44  # 64 bits, RISC-V


def put(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    path.chmod(0o755)
    return path


def said(path: Path, content: bytes, formats: Path = Path("/nowhere")) -> str:
    return executable.refusal("./job", put(path / "job", content), formats)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is an empty file"),
        (b"print('hi')\n", "is a text file without an interpreter in its first line"),
        ("grüße = 1\n".encode(), "is a text file without an interpreter in its first line"),
        (b"#!\n", "has no interpreter after the `#!`"),
        (b"#! /no/such/python -u\n", "names the interpreter '/no/such/python', which does not exist"),
        (b"#!/bin/sh\r\n", "'/bin/sh\\r', which does not exist; the line has a Windows line ending"),
        (b"#!/etc/passwd\n", "names the interpreter '/etc/passwd', which cannot be executed"),
        (b"#!/usr/bin\n", "names the interpreter '/usr/bin', which cannot be executed"),
        (
            b"#!/usr/bin/env no-such-program\n",
            "names the interpreter 'no-such-program', which is not on PATH",
        ),
    ],
)
def test_a_program_that_can_never_start_is_named_beforehand(content: bytes, why: str, tmp_path: Path) -> None:
    found = said(tmp_path, content)
    assert found.startswith("command './job' ")
    assert why in found
    assert "\n" not in found


@pytest.mark.parametrize(
    "content", [b"#!/bin/sh\n", b"#!/usr/bin/env -S sh -e\n", b"#!/usr/bin/env A=b sh\n", OTHERS, b"MZ\0\0"]
)
def test_a_program_that_may_start_is_not_judged(content: bytes, tmp_path: Path) -> None:
    assert said(tmp_path, content) == ""


def test_a_missing_interpreter_is_also_named(tmp_path: Path) -> None:
    inner = put(tmp_path / "inner", b"")
    found = said(tmp_path, b"#!%s\n" % os.fsencode(inner))
    assert f"names the interpreter {str(inner)!r}, which is an empty file" in found


def test_scripts_are_left_to_a_kernel_that_knows_more_formats(tmp_path: Path) -> None:
    formats = tmp_path / "formats"
    formats.mkdir()
    for name in ("status", "register"):
        (formats / name).touch()
    assert said(tmp_path, b"text\n", formats)
    (formats / "lua").touch()
    assert said(tmp_path, b"text\n", formats) == ""


def test_a_named_pipe_is_not_opened(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "is not a regular file" in executable.refusal("./pipe", pipe)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (OTHERS, "is not a program for this machine"),
        (b"text\n", "without an interpreter"),
        (b"#!/no/such\n", "does not exist"),
    ],
)
def test_the_kernels_refusal_is_explained(content: bytes, why: str, tmp_path: Path) -> None:
    path = put(tmp_path / "job", content)
    with pytest.raises(OSError, match="job") as refused:
        subprocess.run([path], check=False)
    assert executable.is_for_good(refused.value)
    assert why in executable.explained("./job", path, refused.value)


def test_a_program_without_its_loader_is_distinguished_from_a_missing_one(tmp_path: Path) -> None:
    gone = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "job")
    assert "No such file" in executable.explained("./job", tmp_path / "job", gone)
    path = put(tmp_path / "job", Path(sys.executable).resolve().read_bytes()[:4096])
    assert "loader (dynamic linker) is not on this machine" in executable.explained("./job", path, gone)


def test_lack_of_memory_for_a_process_is_not_a_refusal() -> None:
    assert not executable.is_for_good(OSError(errno.EAGAIN, "no more processes", "job"))
    assert not executable.is_for_good(OSError(errno.ENOENT, "of the fork, which has no file"))


def test_a_file_in_the_folder_is_distinguished_from_a_command(tmp_path: Path) -> None:
    put(tmp_path / "job", b"#!/bin/sh\n")
    wanted = r"'job' is not on PATH: to start the file in this directory, write `\./job`"
    with pytest.raises(BadInput, match=wanted):
        program.parse(["job"], tmp_path)
