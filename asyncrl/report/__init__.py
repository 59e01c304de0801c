"""One HTML page about one run: what it learned, where the time went, and every rollout."""
