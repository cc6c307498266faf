"""Runs the command line as `python -m aiter_prep`."""

import sys

from aiter_prep.cli import main

if __name__ == "__main__":
    sys.exit(main())
