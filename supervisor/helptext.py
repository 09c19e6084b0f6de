"""The help of the command line, made from the table of options. Pure."""

from __future__ import annotations

from supervisor.optiontable import COMMANDS, NEIGHBOURS, Entry, Option

_INTRO = """\
Holdfast keeps a distributed PyTorch job training through faults.

  holdfast run --nproc-per-node 2 -- python train.py ARGS

Commands
"""
_OUTRO = """
`holdfast COMMAND --help` says more. The commands that look at a run take the newest one
here; another is named with --run-dir DIR.
"""


def overview() -> str:
    width = max(map(len, summaries()))
    lines = (f"  {name:{width}}  {summary}\n" for name, summary in summaries().items())
    return _INTRO + "".join(lines) + _OUTRO


def summaries() -> dict[str, str]:
    """Return every command's one line, the node agent's among them."""
    return {**{name: entry.summary for name, entry in COMMANDS.items()}, **NEIGHBOURS}


def of(name: str) -> str:
    """Return the help of the command `name`."""
    entry = COMMANDS[name]
    parts = [f"{_usage(name, entry)}\n\n{_sentence(entry.summary)}\n"]
    if entry.about:
        parts.append(f"{entry.about}\n")
    for group in dict.fromkeys(option.group for option in entry.options):
        chosen = [option for option in entry.options if option.group == group]
        parts.append(f"{group}\n{''.join(map(_line, chosen))}")
    parts.append("Examples\n" + _examples(entry))
    return "\n".join(parts)


def _usage(name: str, entry: Entry) -> str:
    if name == "run":
        return "holdfast run [OPTIONS] [--] COMMAND..."
    words = [f"[{_spelled(option)}]" for option in entry.options]
    return " ".join(["holdfast", name, *(argument[0] for argument in entry.arguments), *words])


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _spelled(option: Option) -> str:
    return f"{option.names[0]} {option.metavar}".rstrip()


def _line(option: Option) -> str:
    also = "".join(f", {name}" for name in option.names[1:])
    return f"  {_spelled(option) + also:27}  {option.help}\n"


def _examples(entry: Entry) -> str:
    width = max(len(line) for line, _ in entry.examples)
    if width > 60:
        return "".join(f"  {line}\n      {what}\n" for line, what in entry.examples)
    return "".join(f"  {line:{width}}   {what}\n" for line, what in entry.examples)
