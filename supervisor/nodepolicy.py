"""What the operator asks for about nodes, with why each default is what it is. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from supervisor.nodes import ACTIONS


@dataclass(frozen=True, slots=True)
class NodePolicy:
    """What the operator asked for. Raises ValueError that names every mistake."""

    max_share: float = 0.1  # of the nodes may be out at once; EKS auto repair stops at 0.2
    min_out: int = 1  # so many may be out even where the share gives none
    min_serving: int = 1  # nodes known to be well that must be left
    stale_s: float = 120.0  # four reports
    confirm_s: float = 60.0  # how long two witnesses must have said it: time for a storm to show itself
    confirm_alone_s: float = 300.0  # how long one must have; medik8s: 300 s
    storm_nodes: int = 5  # so many troubled within `storm_window_s`, and this share of all: a storm
    storm_share: float = 0.01
    storm_window_s: float = 600.0
    rack_nodes: int = 3  # the same for one rack
    cooldown_s: float = 1800.0  # without a new one, and a storm is over
    cohort_share: float = 0.25  # of the agents of one version may say "unhealthy" and be believed
    cohort_s: float = 86400.0  # so long does a node that is out count in its cohort
    clean_s: float = 3600.0  # of health after which a node comes back, the first time
    max_clean_s: float = 7 * 86400.0  # and at the most
    unremedied: float = 4.0  # times that, when what was to be done has not been seen to be done
    half_life_s: float = 14 * 86400.0  # of an incident in the lemon score
    relapse_s: float = 86400.0  # after a release, an incident is a relapse
    prefer_away: bool = False  # keep new work off degraded nodes where there is a choice
    drain_for: frozenset[str] = frozenset({"reset_gpu", "reboot_node", "replace"})  # need an empty node

    @property
    def memory_s(self) -> float:
        """For so long may a node that has calmed down still tell of a storm."""
        return self.storm_window_s + self.cooldown_s

    def __post_init__(self) -> None:
        wrong = [said for holds, said in self._relations() if not holds]
        if wrong:
            raise ValueError("; ".join(wrong))

    def _relations(self) -> tuple[tuple[bool, str], ...]:
        return (
            (0 <= self.max_share <= 1, "max_share: expected 0 to 1"),
            (self.min_out >= 0 and self.min_serving >= 0, "min_out, min_serving: expected 0 or more"),
            (0 < self.confirm_s <= self.confirm_alone_s, "confirm_s: more than 0, at most confirm_alone_s"),
            (self.storm_nodes >= 2 and self.rack_nodes >= 2, "storm_nodes, rack_nodes: two or more"),
            (0 <= self.storm_share <= 1 and 0 <= self.cohort_share <= 1, "shares: expected 0 to 1"),
            (self.storm_window_s >= self.confirm_s, "storm_window_s: not less than confirm_s"),
            (self.stale_s > 0 and self.cooldown_s > 0, "stale_s, cooldown_s: more than 0"),
            (self.memory_s <= self.clean_s, "clean_s: not less than storm_window_s and cooldown_s together"),
            (self.clean_s <= self.max_clean_s, "max_clean_s: not less than clean_s"),
            (self.unremedied >= 1, "unremedied: 1 or more"),
            (self.half_life_s > 0 and self.relapse_s >= 0, "half_life_s: more than 0; relapse_s: 0 or more"),
            (self.drain_for <= frozenset(ACTIONS), f"drain_for: expected some of {', '.join(ACTIONS)}"),
        )
