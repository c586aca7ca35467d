"""Where the ``hal`` script begins: an interrupt while the libraries load ends like one later on, with a line and code 130."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    try:
        from hal_core.cli.main import app_main
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
    app_main()
