"""What a run is asked to do: YAML composed by Hydra, checked by the typed schema."""
