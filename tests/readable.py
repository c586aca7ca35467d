"""Tiny checkpoints that read text: goldens and a GGUF file with a tokenizer whose 256 tokens are the bytes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from golden import goldens


def byte_tokens() -> list[str]:
    """The 256 bytes in the alphabet of byte-level tokenizers: printable ones stand for themselves, others move above 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]


def add_tokenizer(folder: Path) -> Path:
    """Write tokenizer files beside a checkpoint."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(byte_tokens())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": byte_tokens()[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


def golden(name: str, target: Path) -> Path:
    """A copy of a golden checkpoint with a tokenizer."""
    return add_tokenizer(goldens.copy(name, target))


def gguf(path: Path, kind: str = "Q4_1") -> Path:
    """A small llama in one GGUF file, tokenizer included."""
    import gguf_files

    def tokenizer(writer) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        # the writer cannot store an empty list of merges
        writer.add_token_list([*byte_tokens(), "ab"])
        writer.add_token_merges(["a b"])
        writer.add_token_types([1] * 257)

    shapes = gguf_files.tensor_shapes("llama") | {"token_embd.weight": (257, gguf_files.HIDDEN)}
    tensors = {name: (np.ones_like(value) if value.ndim == 1 else value * 0.1) for name, value in gguf_files.values(shapes).items()}
    return gguf_files.write(path, "llama", kind, tensors, extra=tokenizer)
