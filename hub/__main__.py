"""Shares a trained model: python -m hub push RUN OWNER/NAME (hub/push.py)."""

from hub.push import main

if __name__ == "__main__":
    main()
