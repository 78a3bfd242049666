"""Shares a trained model: weights and a model card, on the Hugging Face Hub (push) or in weights/ (keep), or
a web page that runs the model in the browser (page).

python -m share push RUN OWNER/NAME [--dry-run FOLDER] [--private] [--license ID]
python -m share keep RUN NAME [--data-path PATH] [--count N]
python -m share page checkpoint=PATH output=FOLDER [key=value ...]
"""

import runtime.environment  # noqa: F401

import sys

from config.compose import compose_config
from config.programs import PageConfig
from distributed.errors import local_errors
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
        elif action in ("-h", "--help"):
            print(__doc__.strip())
        else:
            raise ValueError(f"share has the actions push, keep and page, not {action!r}; each has --help")


if __name__ == "__main__":
    main()
