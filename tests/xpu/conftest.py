"""Helpers lie beside the tests; the one that picks cases of the kit beside the CUDA backend's."""

import pathlib
import sys

_HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "cuda")]
