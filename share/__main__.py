"""Shares a trained model.

push: uploads weights and a model card to the Hugging Face Hub. keep: writes the same files to weights/. page:
writes a web page that runs the model in the browser. open: opens such a page in the browser.

python -m share push RUN OWNER/NAME [--dry-run FOLDER] [--private] [--license ID]
python -m share keep RUN NAME [--data-path PATH] [--count N]
python -m share page checkpoint=PATH output=FOLDER [key=value ...]
python -m share open FOLDER
"""

import runtime.environment  # noqa: F401

import sys
from pathlib import Path

from config.compose import compose_config
from config.programs import PageConfig
from distributed.errors import local_errors
from runtime.command_line import OneLineParser
from share import browser, keep, push


def main() -> None:
    action, *arguments = sys.argv[1:] or [""]
    with local_errors():
        if action == "push":
            push.main(arguments)
        elif action == "keep":
            keep.main(arguments)
        elif action == "page":
            config = compose_config(PageConfig, arguments)
            if config is not None:
                browser.write_page(config)
        elif action == "open":
            parser = OneLineParser("share open", description="Opens a page in the browser, until Ctrl-C.")
            parser.add_argument("folder", type=Path, help="folder of the page")
            browser.open_page(parser.parse_args(arguments).folder)
        elif action in ("-h", "--help"):
            print(__doc__.strip())
        else:
            raise ValueError(
                f"unknown action: {action!r}. Choose push, keep, page or open, and add --help for options."
            )


if __name__ == "__main__":
    main()
