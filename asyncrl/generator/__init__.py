"""The generator: samples rollouts while its weights change underneath."""
