"""Which of several processes of one command this is, by what the launchers of torch, Lightning and SLURM tell it."""

import os


def is_first_process() -> bool:
    """Whether this is the only process of a command, or the first of all nodes."""
    # A local rank, or none, counts on its own node only.
    for names in (("RANK",), ("LOCAL_RANK", "NODE_RANK"), ("SLURM_PROCID",), ("NODE_RANK",)):
        if names[0] in os.environ:
            return all(int(os.environ.get(name, 0)) == 0 for name in names)
    return True
