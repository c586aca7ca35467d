"""Helpers lie beside the tests; by folder they would be ``cuda.*``, which NVIDIA's Python bindings claim."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
