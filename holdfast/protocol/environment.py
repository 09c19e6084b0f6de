"""Define the environment variables that processes use to configure the processes that they start.

These are the `HOLDFAST_*` variables, and torchrun's variables for a rank. Each `HOLDFAST_*` variable is
defined here, and all other code uses the constant for its name.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.protocol.launcher_messages import Launch, RankStart

RUN_ID = "holdfast"  # the same for all runs, because ranks find each other by address and port


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable. With `for_users`, scripts may read it or users set it, and the user guide lists it."""

    name: str
    set_by: str
    read_by: str
    meaning: str
    for_users: bool = False


VARIABLES: dict[str, Variable] = {}
"""All `HOLDFAST_*` variables, by name, in the order of their definition."""


def _variable(name: str, *, set_by: str, read_by: str, meaning: str, for_users: bool = False) -> str:
    assert name not in VARIABLES, name
    VARIABLES[name] = Variable(name, set_by, read_by, meaning, for_users)
    return name


# For the user and the user's script.

GENERATION = _variable(
    "HOLDFAST_GENERATION",
    set_by="the launcher and `holdfast.join`, for a rank and all processes that it starts",
    read_by="scripts; the launcher, to find processes that earlier generations left running",
    meaning="the generation of the rank, from 1",
    for_users=True,
)
BELOW = _variable(
    "HOLDFAST_BELOW",
    set_by="the launcher, for a rank and all processes that it starts",
    read_by="`holdfast.join`, in a process that is not a rank",
    meaning="a file that exists once `join` has refused a process below the rank",
    for_users=True,
)
PY_SPY = _variable(
    "HOLDFAST_PY_SPY",
    set_by="the user; otherwise `holdfast run`, which chooses the py-spy next to its interpreter",
    read_by="the launcher, before it reads the stacks of a rank",
    meaning="the path of py-spy; if it is not set, the launcher searches the PATH",
    for_users=True,
)
BIND = _variable(
    "HOLDFAST_BIND",
    set_by="the user, or the system that starts launchers on several machines",
    read_by="the launcher",
    meaning="the address where the launcher reserves a port for rank 0's rendezvous; 127.0.0.1 by default",
    for_users=True,
)

# For every part of a member.

MEMBER = _variable(
    "HOLDFAST_MEMBER",
    set_by="the backend",
    read_by="the sidecar; the launcher, as the default of --name",
    meaning="the name of the member",
)
NPROC = _variable(
    "HOLDFAST_NPROC",
    set_by="the backend for the sidecar; the launcher for a rank without a warm process",
    read_by="the sidecar; the launcher, as the default of --nproc; `holdfast.join`",
    meaning="the number of ranks on the member",
)
DIRECTORY = _variable(
    "HOLDFAST_DIRECTORY",
    set_by="the backend for the sidecar; the launcher for a rank without a warm process",
    read_by="the sidecar; the launcher, as the default of --directory; `holdfast.join`",
    meaning="the member's folder in the memory volume, see `holdfast.snapshot.member_directory`",
)
PARENT = _variable(
    "HOLDFAST_PARENT",
    set_by="`holdfast run`",
    read_by="the sidecar and the supervisor of a local run",
    meaning="the pid of `holdfast run`; these processes end after it has ended",
)

# For the sidecar.

NODE = _variable(
    "HOLDFAST_NODE", set_by="the backend", read_by="the sidecar", meaning="the name of the member's node"
)
CHECKPOINTS = _variable(
    "HOLDFAST_CHECKPOINTS",
    set_by="the backend",
    read_by="the sidecar",
    meaning="the folder of the run's checkpoints, on storage",
)
SUPERVISOR = _variable(
    "HOLDFAST_SUPERVISOR", set_by="the backend", read_by="the sidecar", meaning="the URL of the supervisor"
)
TOKEN_FILE = _variable(
    "HOLDFAST_TOKEN_FILE",
    set_by="the backend",
    read_by="the sidecar",
    meaning="the file with the token of the run",
)
ADDRESS = _variable(
    "HOLDFAST_ADDRESS",
    set_by="the injector of pods",
    read_by="the sidecar",
    meaning="the address of the pod, where other members reach the sidecar; 127.0.0.1 by default",
)
CA = _variable(
    "HOLDFAST_CA",
    set_by="the injector of pods",
    read_by="the sidecar",
    meaning="the certificates (PEM) that prove the identity of an https supervisor",
)
STORAGE = _variable(
    "HOLDFAST_STORAGE",
    set_by="the injector of pods",
    read_by="the sidecar",
    meaning="'reported': the sidecar reports the checkpoints on storage, which the supervisor cannot read",
)
OBJECTS = _variable(
    "HOLDFAST_OBJECTS",
    set_by="the injector of pods",
    read_by="the sidecar",
    meaning="the URL of the checkpoints in object storage; the checkpoint folder then holds only copies",
)
OBJECTS_CA = _variable(
    "HOLDFAST_OBJECTS_CA",
    set_by="the user, in the Secret of the checkpoints",
    read_by="the sidecar",
    meaning="the CA certificates (PEM) for object storage whose certificate was signed by a private CA",
)
HANG_FACTOR = _variable(
    "HOLDFAST_HANG_FACTOR",
    set_by="the backend, from --hang-factor",
    read_by="the sidecar",
    meaning="a step is late if it takes longer than this multiple of its usual duration",
)
HANG_FLOOR_S = _variable(
    "HOLDFAST_HANG_FLOOR_S",
    set_by="the backend, from --hang-floor",
    read_by="the sidecar",
    meaning="a step is late only if it takes longer than this, in seconds",
)
FIRST_STEP_S = _variable(
    "HOLDFAST_FIRST_STEP_S",
    set_by="the backend, from --first-step-timeout",
    read_by="the sidecar; in a pod also the launcher",
    meaning="the time limit, in seconds, for a rank's first step, and for a pod's sidecar to connect",
)
PAUSE_S = _variable(
    "HOLDFAST_PAUSE_S",
    set_by="the backend, from --pause-timeout",
    read_by="the sidecar",
    meaning="the time limit, in seconds, for a pause that the script declares",
)

LEAVE_S = _variable(
    "HOLDFAST_LEAVE_S",
    set_by="the injector of pods",
    read_by="the launcher",
    meaning="how many seconds after SIGTERM the ranks keep training, unless the supervisor ends them earlier",
)

# For the supervisor of a local run.

KEEPER_FD = _variable(
    "HOLDFAST_KEEPER_FD",
    set_by="`holdfast run`",
    read_by="the supervisor",
    meaning="the descriptor of its socket to `holdfast run`",
)
API_FD = _variable(
    "HOLDFAST_API_FD",
    set_by="`holdfast run`",
    read_by="the supervisor",
    meaning="the descriptor of the API's listening socket",
)

# For the supervisor of a cluster.

RACK_LABELS = _variable(
    "HOLDFAST_RACK_LABELS",
    set_by="the operator",
    read_by="the supervisor",
    meaning="the node labels that name a node's rack, separated by commas, the most precise one first",
)

# For the launcher and the processes that it starts.

LOGS = _variable(
    "HOLDFAST_LOGS",
    set_by="the program that starts `holdfast launch` without --logs",
    read_by="the launcher",
    meaning="the folder of the ranks' logs",
)
DEVICES = _variable(
    "HOLDFAST_DEVICES",
    set_by="`holdfast run`, on a machine with GPUs",
    read_by="the launcher, to assign a share to each rank; `holdfast.join`",
    meaning="all GPUs for the ranks, in the notation of CUDA_VISIBLE_DEVICES",
)
WARM = _variable(
    "HOLDFAST_WARM",
    set_by="the launcher; `holdfast run`, for the fork server of its members",
    read_by="a zygote, a warm process, the members' fork server",
    meaning="its imports and its other settings, as JSON (`holdfast.worker.zygote.zygote_spec`)",
)
SOURCES = _variable(
    "HOLDFAST_SOURCES",
    set_by="the launcher",
    read_by="a rank without a warm process whose script has changed since the run began",
    meaning="the descriptor of the source files that the run has saved",
)
START = _variable(
    "HOLDFAST_START",
    set_by="the launcher, for a rank without a warm process",
    read_by="`holdfast.join`, which removes it",
    meaning="the order to start the rank, as JSON (`WorkerOrder`)",
)
CONTROL = _variable(
    "HOLDFAST_CONTROL",
    set_by="the launcher, for a rank without a warm process",
    read_by="`holdfast.join`",
    meaning="the descriptor of the rank's channel to the launcher",
)


def rank_environment(launch: Launch, rank: RankStart) -> dict[str, str]:
    """Return torchrun's variables for one rank.

    Libraries check `TORCHELASTIC_RUN_ID` to find out whether a launcher started the ranks. Without this
    variable, Lightning takes the world size from its script and waits for ranks that no process starts.
    `TORCHELASTIC_USE_AGENT_STORE` is set because rank 0 creates the group's store itself. If an outer
    torchrun has left the variables of its agent's store in the environment, the group would otherwise wait
    forever for that store.
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
        GENERATION: str(launch.generation),
    }
