"""What the kernels declare of their layout; here, so that listing kernels loads no native code."""

__all__ = ["LAYOUT", "TILE"]

LAYOUT = "cpu.tile16"
#: Outputs of one tile.
TILE = 16
