"""A run folder for people: one HTML page, a live view, a W&B workspace. Never reaches torch."""
