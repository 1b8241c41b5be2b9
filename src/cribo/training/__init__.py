"""What every training under Lightning needs: checkpoints, signals, locks, and processes that agree."""
