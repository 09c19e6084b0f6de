"""Loads the policy: the tables in this folder, validated as a whole, and an operator's overrides."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from nodeagent.policy import checks, kernel_lines, overriding, tables, validation
from nodeagent.policy.rules import HealthPolicy, Rule
from nodeagent.policy.validation import BadPolicy, Mistakes

FACTS_OF = "2026.11"  # when the facts in the tables were collected
MAX_BYTES = 1 << 20  # the size limit of an operator's file
FOLDER = Path(__file__).parent
FILES = (
    "checks.toml", kernel_lines.FILE,
    "nvlink4_bits.csv", "nvlink5.csv", "sxid.csv", "xid.csv", "xid154.csv", "xid_models.csv",
)  # fmt: skip


def load(overrides: str | None = None, file: str = "policy.toml") -> HealthPolicy:
    """Return the policy, overridden by an operator's TOML text if there is one.

    Args:
        overrides: Tables `[checks.NAME]`, `[xid.N]`, `[sxid.N]`, `[kernel.NAME]`; omitted keys are kept.
        file: The name used for the text in messages.

    Raises:
        BadPolicy: the text has mistakes; the exception lists all of them, one line each.
    """
    policy = shipped()
    if overrides is None:
        return policy
    try:
        return overriding.overridden(policy, overrides, file)
    except BadPolicy:
        raise
    except Exception as error:  # a whole fleet may mount the same file, so no content may stop the agents
        why = f"{type(error).__name__}: {error}"[: validation.MAX_TEXT]
        raise BadPolicy([f"{file}: cannot be understood: {' '.join(why.split())}"]) from error


def read_overrides(path: Path) -> str:
    """Return the text of an operator's file. Raises BadPolicy if it cannot be read."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise BadPolicy([f"--policy {path}: more than {MAX_BYTES} bytes"])
        return raw.decode()
    except OSError as error:
        raise BadPolicy([f"--policy {path}: {error.strerror}, expected a TOML file"]) from None
    except UnicodeDecodeError:
        raise BadPolicy([f"--policy {path}: not UTF-8, expected a TOML file"]) from None


@cache
def shipped() -> HealthPolicy:
    """Return the shipped policy. Raises BadPolicy, OSError if the package is broken."""
    texts = {name: (FOLDER / name).read_text(encoding="utf-8") for name in FILES}
    xids = tables.read_xids(texts["xid.csv"])
    sxids = tables.read_sxids(texts["sxid.csv"])
    patterns, nvlink5_words = tables.read_nvlink5(texts["nvlink5.csv"])
    verdicts = tables.read_verdicts(texts["xid154.csv"])
    lines = kernel_lines.line_rules(kernel_lines.load_lines(texts[kernel_lines.FILE]))
    return HealthPolicy(
        rules={**sampled(texts["checks.toml"]), **lines},
        xids=xids.meanings,
        sxids=sxids.meanings,
        unknown_sxid=sxids.unknown,
        unknown_xid=xids.unknown,
        version=f"{FACTS_OF}.{_digest(texts)}",
        nvlink4_bits=tables.read_nvlink4(texts["nvlink4_bits.csv"]),
        nvlink5_rows=patterns,
        words={**verdicts, **nvlink5_words, **sxids.words},
        classes=xids.classes,
        models=tables.read_models(texts["xid_models.csv"], xids.meanings),
        notes={f"xid.{code}": note for code, note in xids.notes.items()},
    )


def sampled(text: str) -> dict[str, Rule]:
    """Return the rules of `checks.toml`. Raises BadPolicy."""
    mistakes = Mistakes("checks.toml")
    rules = {name: checks.read(mistakes, name, raw) for name, raw in validation.load_toml(text).items()}
    mistakes.end()
    return {name: rule for name, rule in rules.items() if rule is not None}


def _digest(texts: dict[str, str]) -> str:
    whole = hashlib.sha256()
    for name in sorted(texts):
        whole.update(f"{name}\0{texts[name]}\0".encode())
    return whole.hexdigest()[:8]
