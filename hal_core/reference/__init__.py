"""The golden backend: every op in plain torch, float32, from canonical weights."""
