"""Several processes as one run: who is who, how they agree, and what they exchange."""
