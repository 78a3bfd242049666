"""Configs of all programs: YAML files, which Hydra composes, and the schemas that check them."""
