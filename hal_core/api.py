"""The functions of ``hal_core``: the pure ones of the other modules, applied to this process's backends, machine and policy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hal_core.errors import ContractError, NoKernelError, PolicyError, SettingError, ShapeError, UnfitWeightsError, ValueDecodeError
from hal_core.explain import Explanation, explain_from
from hal_core.machine import Machine
from hal_core.memo import SelectionMemo
from hal_core.notes import tell
from hal_core.policy import Policy, current_policy, use_policy
from hal_core.probe import Probe, probe_from
from hal_core.registry import BackendRow, default_registry
from hal_core.select import candidates_from, select_from
from hal_core.spec import EmbeddingSpec, KVCacheSpec, LinearSpec, MoESpec
from hal_core.stored import with_software

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch

    from hal_core.formats.base import Checkpoint
    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.kv.op import KVParams
    from hal_core.ops import Op
    from hal_core.selection import Candidate, Selection
    from hal_core.spec import Spec

__all__ = ["backends", "candidates", "explain", "load", "open_checkpoint", "policy", "prepare", "probe", "refresh", "select"]

_SPECS = (LinearSpec, MoESpec, EmbeddingSpec, KVCacheSpec)
_memo = SelectionMemo()


def probe(*, isolated: bool = False) -> Probe:
    """This machine and every installed backend with its verdict; creates no device context.

    Args:
        isolated: import and try each backend in a process of its own instead of importing it here, so that one that
            crashes or hangs is a row; results are remembered for the same wheel and drivers.
    """
    if isolated:
        from hal_core.isolated import isolated_probe

        return isolated_probe()
    return probe_from(Machine.detect(), default_registry().rows(), default_registry().kernels())


def backends() -> tuple[BackendRow, ...]:
    """Every installed backend, healthy or not, with the reasons of those that are not."""
    return default_registry().rows()


def refresh() -> None:
    """Look for backends again, e.g. after a wheel was installed in this process's environment."""
    default_registry().refresh()


def candidates(spec: Spec, machine: Machine | None = None, policy: Policy | str | None = None) -> tuple[Candidate, ...]:
    """Every kernel that is registered for the spec's kind of op, with its verdict; the chosen ones first.

    Raises:
        PolicyError: the policy does not parse, or requires what is not there.
    """
    registry = default_registry()
    return candidates_from(_spec(spec), _machine(machine), current_policy(policy), registry.kernels(), registry.rows())


def select(spec: Spec, machine: Machine | None = None, policy: Policy | str | None = None, *, layer: str | None = None) -> Selection:
    """The kernels that serve ``spec``; warns once where a preference was not met or only the reference could serve.

    Equal questions are answered from memory. A distinct note is told once and counted after that (``hal_core.notes``).

    Args:
        spec: the problem, with shapes after sharding.
        machine: the machine to decide for; None for this one.
        policy: overrides the ``with hal.policy(..)`` block and ``HAL_POLICY``.
        layer: name of the layer that asks, for messages.

    Raises:
        NoKernelError: nothing may serve it; the message gives every candidate's reasons.
        PolicyError: the policy does not parse, or requires what is not there.
    """
    registry = default_registry()
    selection = _memo.select(_spec(spec), _machine(machine), current_policy(policy), registry.kernels(), registry.rows())
    if selection.notes:
        tell(selection, layer)
    return selection


def explain(spec: Spec, machine: Machine | None = None, policy: Policy | str | None = None) -> Explanation:
    """What would serve ``spec``, and why each other candidate would not; a lack of kernels is part of the answer."""
    registry = default_registry()
    return explain_from(_spec(spec), _machine(machine), current_policy(policy), registry.kernels(), registry.rows())


def _spec(spec: Spec) -> Spec:
    if not isinstance(spec, _SPECS):
        raise ValueDecodeError(
            f"spec of type {type(spec).__name__}", "not a spec", "give a LinearSpec, MoESpec, EmbeddingSpec or KVCacheSpec"
        )
    return spec


def _machine(machine: Machine | None) -> Machine:
    if machine is not None and not isinstance(machine, Machine):
        raise ValueDecodeError(f"machine of type {type(machine).__name__}", "not a Machine", "use Machine.from_json, or None for this one")
    local = Machine.detect()
    return local if machine is None or machine is local else with_software(machine, local)


def prepare(
    spec: Spec, weights: LinearWeights | MoEWeights | KVParams, policy: Policy | str | None = None, *, layer: str | None = None
) -> Op:
    """Select a kernel on this machine, pack the canonical weights for it, and return the op, which carries its selection.

    Raises:
        NoKernelError, PolicyError: as :func:`select`. ShapeError: the weights do not fit the spec.
    """
    if isinstance(spec, KVCacheSpec):
        _check_scales(spec, weights)
    selection = select(spec, policy=policy, layer=layer)
    try:
        op: Any = default_registry().kernel(selection.kernel).prepare(spec, weights)
    except UnfitWeightsError as error:
        selection, op = _without(selection, error, spec, weights, current_policy(policy), layer)
    op.selection = selection
    if len(selection.kernels) > 1 and not op.serves_intervals:
        fix = "an op that shares its layout between kernels must switch by M and say serves_intervals = True"
        raise ContractError(f"op of {selection.kernel}", f"selected together with {', '.join(selection.kernels)}, but runs one kernel", fix)
    return op  # type: ignore[no-any-return]


def _check_scales(spec: KVCacheSpec, params: object) -> None:
    from hal_core.kv.op import KVParams
    from hal_core.kv.scales import check_given_scales

    if not isinstance(params, KVParams):
        raise ShapeError("what a KV cache is prepared from", type(params).__name__, "give KVParams")
    check_given_scales(spec, params)


def _without(
    refused: Selection,
    error: UnfitWeightsError,
    spec: Spec,
    weights: LinearWeights | MoEWeights | KVParams,
    chosen: Policy,
    layer: str | None,
) -> tuple[Selection, Any]:
    """Values of the weights, which no spec tells, do not suit the chosen layout: the next one serves, unless the policy forbids it."""
    registry = default_registry()
    others = tuple(k for k in registry.kernels() if k.kernel.layout != refused.layout or k.backend != refused.backend)
    try:
        selection = select_from(spec, Machine.detect(), chosen, others, registry.rows())
    except (NoKernelError, PolicyError):
        raise error from None
    note = f"{spec}: {refused.kernel} cannot hold these weights ({error}), so {selection.kernel} serves them"
    selection = replace(selection, notes=(note,))
    tell(selection, layer)
    return selection, registry.kernel(selection.kernel).prepare(spec, weights)


def policy(text: Policy | str) -> AbstractContextManager[Policy]:
    """``with hal.policy("require:cpu"):`` selections inside follow it, per thread and per task."""
    return use_policy(text)


def load(
    path: str | Path | Checkpoint,
    *,
    policy: Policy | str | None = None,
    numerics: str = "checkpoint",
    dtype: torch.dtype | str | None = None,
    recast: Mapping[str, str] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Any:
    """A ``transformers`` model of a quantized checkpoint (path, hub id or opened); see :func:`hal_core.integrations.transformers.load`."""
    from hal_core.hub import resolve_checkpoint
    from hal_core.integrations.transformers import load as load_model

    if progress is not None and not callable(progress):
        raise SettingError(f"progress of type {type(progress).__name__}", "cannot be called", "give a function of (done, total, name)")
    if not hasattr(path, "entries"):
        path = resolve_checkpoint(path)
    return load_model(path, policy=policy, numerics=numerics, dtype=dtype, recast=recast, progress=progress)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """An opened checkpoint (folder, single file or hub id): names and schemes now, tensors on demand."""
    from hal_core.formats import open_checkpoint as open_format
    from hal_core.hub import resolve_checkpoint

    return open_format(resolve_checkpoint(path))
