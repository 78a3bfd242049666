"""Sharing through the Hugging Face Hub: what hf:// addresses name, and `python -m hub push`."""
