"""Writes a trained model as ONNX, and a page that runs it in a browser.

python -m export checkpoint=PATH output=FOLDER [key=value ...]
"""

from config.compose import compose_config
from config.schema import ExportConfig
from parallel.errors import local_errors

with local_errors():
    config = compose_config(ExportConfig)
    if config is not None:
        from export.page import export  # --help and mistakes on the command line answer without torch

        export(config)
