"""Published figures from large training runs, and assumptions where nothing is published. Pure.

Each default of `holdfast plan` is computed from one of these figures, or is marked as an assumption.
"""

from __future__ import annotations

DAY_S = 86_400.0
GPUS_PER_NODE = 8

# "The Llama 3 Herd of Models", arXiv 2407.21783, section 3.3.4 and table 5: 419 unexpected interruptions in
# 54 days on 16,384 GPUs. bench/quarantine/fault_mixes.csv has the table. 69 of them leave the node in
# service: software bugs, dependencies, silent data corruption and timeouts of NCCL's watchdog.
LLAMA_3_GPUS = 16_384
LLAMA_3_DAYS = 54
LLAMA_3_INTERRUPTIONS = 419
LLAMA_3_NODE_LOSSES = 350
# The same paper, section 3.3.4: significant manual intervention was required three times.
LLAMA_3_INTERVENTIONS = 3
# The same paper, section 3.3.1: at most 4 GB of state for each GPU, and 2 TB/s of sustained throughput.
LLAMA_3_STATE_PER_GPU = 4e9
LLAMA_3_BANDWIDTH_PER_GPU = 2e12 / LLAMA_3_GPUS

MTBF_S = round(LLAMA_3_DAYS * LLAMA_3_GPUS / GPUS_PER_NODE / LLAMA_3_INTERRUPTIONS) * DAY_S  # of one node
NODE_LOSS = round(LLAMA_3_NODE_LOSSES / LLAMA_3_INTERRUPTIONS, 2)
OUTAGE_S = LLAMA_3_DAYS / LLAMA_3_INTERVENTIONS * DAY_S
STATE_PER_GPU = LLAMA_3_STATE_PER_GPU
BANDWIDTH_PER_GPU = LLAMA_3_BANDWIDTH_PER_GPU

# Holdfast is built for these limits: 7 s from a node's power loss to the first new step, and one lost step.
DETECTION_S = 5.0
RECOVERY_S = 2.0

# These are assumptions, because we know of no published figures. Alibaba's C4 (arXiv 2406.04594) reports only
# that finding a faulty node takes hours to days.
REPAIR_S = 2 * DAY_S
STEP_S = 6.0
CHECKPOINT_SLOWDOWN = 0.1  # the share of the training speed that is lost while a checkpoint is written
