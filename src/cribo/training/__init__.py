"""Parts shared by all training with Lightning: trainer, checkpoints, signals, locks and progress."""
