"""Every finding of the node agent has a runbook section, in the words that the agent prints."""

from __future__ import annotations

import re
from pathlib import Path

from nodeagent.model import Level, word
from nodeagent.policy.kernel_lines import KERNEL
from nodeagent.policy.loading import shipped
from nodeagent.policy.rules import Rule, RuleKind
from tests.unit.nodeagent.cli.test_explanations import explain

POLICY = shipped()
BOOK = (Path(__file__).parents[2] / "docs" / "runbooks" / "node.md").read_text()
PARTS = ("**See**", "**Likely**", "**Do**", "**Healthy when**", "**Ends**")
_CODES = re.compile(r"^- `(\w+) -> (\w+)`[^:]*: ([\d, to\n]+)$", re.MULTILINE)


def sections() -> dict[str, str]:
    """Return the text of each section by its heading."""
    found = re.findall(r"^### (.+)\n\n((?:(?!^##).*\n)+)", BOOK, re.MULTILINE)
    return dict(found)


SECTIONS = sections()


def flat(text: str) -> str:
    return " ".join(text.split())


def can_be_bad(rule: Rule) -> bool:
    if rule.meaning is not None:
        return rule.meaning.level is not Level.HEALTHY
    return bool(rule.degraded or rule.unhealthy) or any(
        s.level is not Level.HEALTHY for s in rule.states.values()
    )


BAD = sorted(name for name, rule in POLICY.rules.items() if can_be_bad(rule))


def section_of(name: str) -> str:
    found = [flat(f"{heading} {body}") for heading, body in SECTIONS.items() if f"`{name}`" in heading]
    assert len(found) == 1, f"{name} needs one section in docs/runbooks/node.md with `{name}` in its heading"
    return found[0]


def test_every_check_and_kernel_line_that_can_be_bad_has_a_section_with_its_words_and_what_ends_it() -> None:
    for name in BAD:
        text, rule = section_of(name), POLICY.rules[name]
        words = rule.meaning.name if rule.meaning is not None else rule.what
        assert words in text, f"{name}: the section does not contain the printed words: {words}"
        bad = [state.word for state in rule.states.values() if state.level is not Level.HEALTHY]
        for each in bad:
            assert each in text, f"{name}: its state {each} is not in the section"
        subject = ("kernel", name.removeprefix(KERNEL)) if name.startswith(KERNEL) else ("check", name)
        ends = re.search(r"^  ends +(.+)$", explain(POLICY, *subject), re.MULTILINE)
        assert ends is not None, name
        assert ends[1] in text, f"{name}: the section does not say what ends it: {ends[1]}"


def test_headings_name_only_existing_checks() -> None:
    named = {name for heading in SECTIONS for name in re.findall(r"`(\w+)`", heading)}
    assert named == set(BAD)


def test_every_section_has_all_its_parts_in_order() -> None:
    for heading, body in SECTIONS.items():
        at = [flat(body).find(part) for part in PARTS]
        assert -1 not in at, f"{heading}: {PARTS[at.index(-1)]} is missing"
        assert at == sorted(at), heading


def test_every_xid_is_in_one_section_with_the_level_and_action_of_the_table() -> None:
    seen: list[int] = []
    for level, action, listed in _CODES.findall(BOOK):
        for code in codes(listed):
            meaning = POLICY.xids[code]
            assert (word(meaning.level), word(meaning.action)) == (level, action), f"Xid {code}"
            seen.append(code)
    assert sorted(seen) == sorted(POLICY.xids), "each Xid must appear exactly once"


def codes(listed: str) -> list[int]:
    spans = [[int(end) for end in each.split(" to ")] for each in flat(listed).split(", ")]
    return [code for span in spans for code in range(span[0], span[-1] + 1)]


def test_the_section_of_an_xid_says_what_ends_it() -> None:
    for heading, body in SECTIONS.items():
        for _, _, listed in _CODES.findall(body):
            for code in codes(listed):
                ends = re.search(r"^  ends +(.+)$", explain(POLICY, "xid", str(code)), re.MULTILINE)
                assert ends is not None
                assert ends[1] in flat(body), f"{heading}: Xid {code} ends with {ends[1]}"


def test_sections_on_events_say_when_an_operator_may_clear_them() -> None:
    for heading, body in SECTIONS.items():
        named = re.findall(r"`(\w+)`", heading)
        events = [each for each in named if POLICY.rules[each].kind is RuleKind.EVENT]
        assert ("**Clear**" in body) == bool(events or not named), heading
