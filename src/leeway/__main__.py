"""Run the `leeway` command as `python -m leeway`."""

import sys

from leeway.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
