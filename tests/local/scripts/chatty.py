"""Print megabytes while it trains."""

from __future__ import annotations

from tiny import train

LINE = "x" * 99

train(100, before_commit=lambda step, rank: print("\n".join([f"{rank} {step} {LINE}"] * 300)))
