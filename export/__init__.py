"""A trained model outside of Python: ONNX, and a page that runs it in a browser."""
