"""Helpers lie beside the tests; see the folder above for why."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
