"""Set-up shared by all training under Lightning: trainer, checkpoints, signals, locks and progress."""
