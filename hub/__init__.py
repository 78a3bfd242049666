"""Files of the Hugging Face Hub, by their hf:// addresses."""
