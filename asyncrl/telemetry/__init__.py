"""Metrics, sinks and traces. Never reaches torch; never blocks training."""
