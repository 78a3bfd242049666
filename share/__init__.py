"""Shows a model to the world: a card and files on the Hugging Face Hub, ONNX, and a page for a browser."""
