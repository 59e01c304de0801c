"""The learner: batches, loss, optimizer, checkpoints."""
