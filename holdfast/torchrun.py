"""Torchrun's environment variables, which scripts and libraries read."""

from __future__ import annotations

from holdfast.launcher_messages import Launch, RankStart


def rank_environment(launch: Launch, rank: RankStart) -> dict[str, str]:
    """Return torchrun's variables for one rank."""
    return {
        "RANK": str(rank.rank),
        "LOCAL_RANK": str(rank.local_rank),
        "GROUP_RANK": str(rank.rank // launch.nproc),
        "ROLE_RANK": str(rank.rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_WORLD_SIZE": str(launch.nproc),
        "GROUP_WORLD_SIZE": str(launch.world_size // launch.nproc),
        "ROLE_WORLD_SIZE": str(launch.world_size),
        "MASTER_ADDR": launch.master_addr,
        "MASTER_PORT": str(launch.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(launch.generation - 1),
        "HOLDFAST_GENERATION": str(launch.generation),
    }
