"""Torchrun's environment variables, which scripts and libraries read."""

from __future__ import annotations

from holdfast.protocol.launcher_messages import Launch, RankStart

RUN_ID = "holdfast"  # a group finds its members by address and port: nobody looks it up


def rank_environment(launch: Launch, rank: RankStart) -> dict[str, str]:
    """Return torchrun's variables for one rank.

    `TORCHELASTIC_RUN_ID` is how libraries tell that a launcher started the ranks: Lightning takes the size of
    the world from its script without it, and waits for ranks that nobody starts. The store of a group is rank
    0's own: for an agent's, which an outer torchrun may have left in the environment, it would wait for ever.
    """
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
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": RUN_ID,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_RESTART_COUNT": str(launch.generation - 1),
        "HOLDFAST_GENERATION": str(launch.generation),
    }
