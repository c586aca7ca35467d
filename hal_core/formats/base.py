"""An opened checkpoint: names and schemes first, tensors on demand, one module at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from hal_core.canonical import QuantizedTensor
    from hal_core.kv.op import KVParams
    from hal_core.schemes import ActivationScheme, WeightScheme
    from hal_core.selection import Transform

__all__ = ["Checkpoint", "Entry"]


@dataclass(frozen=True)
class Entry:
    """One parameter under its name in the published unquantized checkpoint, e.g. ``model.layers.0.mlp.up_proj.weight``.

    shape: logical shape (``[N, K]`` for a linear). nbytes: bytes it takes in the file, scales and zeros included.
    fused: experts published as one parameter ``[E, K, N]``, of which ``read`` gives the canonical ``[E, N, K]``; where N holds gate
    and up, even rows are gate and odd rows are up. transforms: what ``read`` does to the stored weight that loses information.
    """

    name: str
    shape: tuple[int, ...]
    scheme: WeightScheme
    nbytes: int
    activations: ActivationScheme | None = None
    fused: bool = False
    transforms: tuple[Transform, ...] = ()

    @property
    def quantized(self) -> bool:
        return self.scheme.quantized


class Checkpoint(ABC):
    """A checkpoint of one format. Opening reads headers only; every size is checked before anything is allocated."""

    #: Short name of the format, e.g. ``"gguf"`` or ``"auto-round:auto_gptq"``.
    format: str
    #: The folder, or the single file.
    path: Path
    #: The model's configuration in the form of a Hugging Face config.json.
    config: Mapping[str, Any]
    #: Every parameter, by published name, in file order.
    entries: Mapping[str, Entry]
    #: The files that hold the tensors.
    files: tuple[Path, ...]
    #: What is in the checkpoint and not used, one sentence each.
    notes: tuple[str, ...] = ()

    @abstractmethod
    def read(self, name: str) -> QuantizedTensor:
        """The canonical tensor of a quantized parameter, freshly allocated (no file mapping is kept).

        Raises:
            FormatError: the tensor's bytes are not what the header and config say; names the tensor.
        """

    @abstractmethod
    def load(self, name: str) -> Tensor:
        """An unquantized parameter in the file's dtype, freshly allocated."""

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Names of the file's tensors that make up a parameter."""
        return (name,)

    def kv_params(self) -> dict[int, KVParams]:
        """Calibrated scales of an fp8 key/value cache by layer, for checkpoints that carry them.

        Raises:
            FormatError: scales that are incomplete, of a wrong shape or no positive numbers.
        """
        return {}
