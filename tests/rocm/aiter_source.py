"""AITER's published source, read and never imported: importing it builds native code for a GPU."""

from __future__ import annotations

from published import Published

RELEASE = "0.1.7.post2.dev18"
_SOURCE = Published("aiter", f"amd_aiter-{RELEASE}-*.whl", f"amd-aiter {RELEASE} is not in build/aiter: `make test-rocm` downloads it")

wheel, text, function, signature, executed = _SOURCE.wheel, _SOURCE.text, _SOURCE.function, _SOURCE.signature, _SOURCE.executed
