"""Label Studio's ML backend: predictions for its tasks, and a memory that grows with its annotations."""
