"""Shares trained models: on the Hugging Face Hub, in weights/, as ONNX, and as a web page."""
