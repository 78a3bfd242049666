"""Configs of all programs: YAML files, composed by Hydra, and the schemas that check them."""
