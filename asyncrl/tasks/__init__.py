"""Verifiable tasks and the pool of processes that scores completions."""
