"""Weights stored as elements of their own type, one a byte or two: int8, fp8, mxfp8, mxfp4, nvfp4, with scales beside them.

The names of the tensors say what they mean, whatever the tool: ``weight`` or ``weight_packed`` (4 bits, low nibble first),
``weight_scale`` or ``weight_scale_inv`` (both multiply), ``weight_global_scale`` (divides) or ``weight_scale_2`` (multiplies),
``weight_zero_point``; of the inputs ``input_scale`` or ``activation_scale``, ``input_zero_point``, ``input_global_scale`` (divides).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from hal_core.canonical import QuantizedTensor
from hal_core.codes import E8M0_NAN, count_fp8_nans
from hal_core.errors import FormatError
from hal_core.formats.packing import Packing, Plan, check_scales, expect, expect_part
from hal_core.schemes import DTYPES, GranularityKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from hal_core.formats.packing import Rule
    from hal_core.formats.safetensors_file import TensorInfo
    from hal_core.schemes import ActivationScheme, WeightScheme

__all__ = ["ElementPacking"]

_VALUES, _SCALES = ("weight_packed", "weight"), ("weight_scale", "weight_scale_inv")
#: Whether the stored number divides.
_GLOBALS = {"weight_global_scale": True, "weight_scale_2": False}
_INPUTS = {"input_scale": False, "activation_scale": False, "input_global_scale": True}
_DAMAGED = "the checkpoint is damaged: fetch or make it again"
_FLOATS, _E8M0 = ("F16", "BF16", "F32"), ("U8", "F8_E8M0")
#: Container dtypes of values and of scales by element type.
_STORED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "int8": (("I8",), _FLOATS),
    "fp8_e4m3": (("F8_E4M3",), (*_FLOATS, *_E8M0)),
    "fp8_e5m2": (("F8_E5M2",), (*_FLOATS, *_E8M0)),
    "mxfp8": (("F8_E4M3",), _E8M0),
    "mxfp4": (("U8",), _E8M0),
    "nvfp4": (("U8",), ("F8_E4M3",)),
}


@dataclass(frozen=True)
class ElementPacking(Packing):
    """The tensors above, for one tool: ``suffixes`` are the names that it writes."""

    name: str
    suffixes: tuple[str, ...]

    def plan(self, module: str, parts: Mapping[str, TensorInfo], rule: Rule) -> Plan:
        values = expect_part(module, parts, self._suffix(module, parts, _VALUES))
        scales = expect_part(module, parts, self._suffix(module, parts, _SCALES))
        if len(values.shape) != 2 or not all(values.shape):
            raise FormatError(
                f"tensor {values.name}", f"shape {list(values.shape)} is not a matrix", "file and config do not belong together"
            )
        element = rule.element or "int8"
        n, k = values.shape[0], values.shape[1] * (2 if DTYPES[element] == 4 else 1)
        if rule.by_shape:
            rule = replace(rule, by_shape=False, per_tensor=scales.shape in ((), (1,), (1, 1)) and n > 1, group=-1)
        scheme = rule.scheme(k)
        why = f"{scheme}, K={k}, N={n}"
        stored, scale_dtypes = _STORED[element]
        expect(values, stored, values.shape, why)
        forms = _forms(scheme, n, k)
        expect(scales, scale_dtypes, scales.shape if scales.shape in forms else forms[0], why)
        self._plan_zeros(module, parts, rule, forms, why)
        self._plan_scalars(module, parts, rule)
        return Plan(module, rule, parts, (n, k), scheme)

    def _suffix(self, module: str, parts: Mapping[str, TensorInfo], among: tuple[str, ...]) -> str:
        """The one of these names that is there; the one the tool writes when none is."""
        own = [suffix for suffix in among if suffix in self.suffixes]
        found = [suffix for suffix in own if suffix in parts]
        if len(found) > 1:
            raise FormatError(f"module {module}", f"holds both {' and '.join(found)}", "a module has one or the other")
        return (found or own)[0]

    def _plan_zeros(self, module: str, parts: Mapping[str, TensorInfo], rule: Rule, forms: list[tuple[int, ...]], why: str) -> None:
        if rule.symmetric is not False:
            if "weight_zero_point" in parts:
                raise FormatError(f"tensor {module}.weight_zero_point", "stored although the config says symmetric", "correct the config")
            return
        zeros = expect_part(module, parts, "weight_zero_point")
        expect(zeros, "I8", zeros.shape if zeros.shape in forms else forms[0], why)

    def _plan_scalars(self, module: str, parts: Mapping[str, TensorInfo], rule: Rule) -> None:
        """Numbers that a module has one of: there exactly where the scheme has a meaning for them."""
        self._plan_one(module, parts, tuple(_GLOBALS), needed=rule.element == "nvfp4", allowed=rule.element == "nvfp4", why=rule.element)
        acts, why = rule.activations, _spoken(rule.activations)
        static = acts is not None and not acts.dynamic
        self._plan_one(module, parts, tuple(_INPUTS), static, static or (acts is not None and acts.dtype == "nvfp4"), why)
        shifted = acts is not None and static and not acts.symmetric
        self._plan_one(module, parts, ("input_zero_point",), shifted, shifted, why, ("I8",))

    def _plan_one(
        self, module: str, parts: Mapping[str, TensorInfo], names: tuple[str, ...], needed: bool, allowed: bool, why: str,
        dtypes: tuple[str, ...] = _FLOATS,
    ) -> None:  # fmt: skip
        found = self._suffix(module, parts, names) if any(name in parts for name in names) else ""
        if not found:
            if needed:
                expect_part(module, parts, next(name for name in (*names, names[0]) if name in (*self.suffixes, names[0])))
            return
        if not allowed:
            raise FormatError(f"tensor {module}.{found}", f"stored although the config says {why or 'nothing of it'}", "correct the config")
        info = parts[found]
        expect(info, dtypes, info.shape if info.shape in ((), (1,), (1, 1)) else (1,), "one number for the module")

    def unpack(self, tensors: Mapping[str, Tensor], plan: Plan) -> QuantizedTensor:
        module, (n, k), scheme = plan.module, plan.shape, plan.scheme
        values_name = next(name for name in _VALUES if name in tensors)
        scales_name = next(name for name in _SCALES if name in tensors)
        values, scales = tensors[values_name], tensors[scales_name]
        _check_values(values, f"{module}.{values_name}")
        scales = scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales
        _check_stored_scales(scales, f"{module}.{scales_name}")
        zeros = tensors.get("weight_zero_point")
        if zeros is not None:  # signed codes and zero points move up together, so that their difference stays
            values, zeros = _shifted(values), _shifted(zeros).reshape(_grid(scheme, n, k))
        input_zero = tensors.get("input_zero_point")
        return QuantizedTensor(
            scheme, plan.shape, values, scales.reshape(_grid(scheme, n, k)), zeros=zeros,
            global_scale=_scalar(tensors, _GLOBALS, module), input_scale=_scalar(tensors, _INPUTS, module),
            input_zero=None if input_zero is None else input_zero.reshape(()),
        )  # fmt: skip

    def pack(self, weight: QuantizedTensor, rule: Rule) -> dict[str, Tensor]:
        assert weight.scales is not None  # every scheme here has scales
        values, zeros = weight.values, weight.zeros
        names = {name for name in self.suffixes if name != "input_zero_point"}
        # a tool that has both names packs elements of 4 bits only
        value_name = next(name for name in (_VALUES if weight.scheme.bits == 4 else _VALUES[::-1]) if name in names)
        tensors = {value_name: values.clone() if zeros is None else _unshifted(values)}
        scales = weight.scales.clone()
        kind = weight.scheme.granularity.kind
        # blocks are stored under the second name where a tool has both
        order = _SCALES[::-1] if kind is GranularityKind.BLOCK else _SCALES
        scale_name = next(name for name in order if name in names)
        tensors[scale_name] = scales.reshape(1) if kind is GranularityKind.TENSOR else scales
        if zeros is not None:
            tensors["weight_zero_point"] = _unshifted(zeros)
        for known, number in ((_GLOBALS, weight.global_scale), (_INPUTS, weight.input_scale)):
            if number is not None:
                # a float64 number came from a stored divisor, whose reciprocal gives it back exactly
                own = sorted((name for name in known if name in names), key=lambda name: known[name] != (number.dtype == torch.float64))
                tensors[own[0]] = (number.double().reciprocal().float() if known[own[0]] else number.clone()).reshape(1)
        return tensors if weight.input_zero is None else {**tensors, "input_zero_point": weight.input_zero.reshape(1)}


def _spoken(acts: ActivationScheme | None) -> str:
    return "activations are not quantized" if acts is None else f"activations are {acts}"


def _grid(scheme: WeightScheme, n: int, k: int) -> tuple[int, int]:
    g = scheme.granularity
    if g.group is not None:
        return n, -(-k // g.group)
    if g.block is not None:
        return -(-n // g.block[0]), -(-k // g.block[1])
    return (n, 1) if g.kind is GranularityKind.CHANNEL else (1, 1)


def _forms(scheme: WeightScheme, n: int, k: int) -> list[tuple[int, ...]]:
    """Shapes in which tools store one scale grid, the usual one first."""
    rows, columns = _grid(scheme, n, k)
    kind = scheme.granularity.kind
    if kind is GranularityKind.TENSOR:
        return [(1,), (), (1, 1)]
    if kind is GranularityKind.CHANNEL:
        return [(n, 1), (n,)] + [()] * (n == 1)
    return [(rows, columns)] + [(rows, 1, columns, 1)] * (kind is GranularityKind.BLOCK)


def _check_values(values: Tensor, name: str) -> None:
    if values.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return
    bad = count_fp8_nans(values)
    if bad:
        raise FormatError(
            f"tensor {name}", f"{bad} of {values.numel()} values are NaN", "the checkpoint is damaged: fetch or make it again"
        )


def _check_stored_scales(scales: Tensor, name: str) -> None:
    if scales.dtype == torch.uint8:
        bad = int(torch.count_nonzero(scales == E8M0_NAN))
    elif scales.dtype == torch.float8_e4m3fn:
        bad = count_fp8_nans(scales)
    else:
        check_scales(scales, name)
        return
    if bad:
        raise FormatError(
            f"tensor {name}", f"{bad} of {scales.numel()} scales are NaN", "the checkpoint is damaged: fetch or make it again"
        )


def _shifted(codes: Tensor) -> Tensor:
    return (codes.view(torch.uint8) ^ 0x80).contiguous()


def _unshifted(codes: Tensor) -> Tensor:
    return (codes ^ 0x80).view(torch.int8)


def _scalar(tensors: Mapping[str, Tensor], known: Mapping[str, bool], module: str) -> Tensor | None:
    """One number of a module as a multiplier, ``[]``."""
    name = next((name for name in known if name in tensors), None)
    if name is None:
        return None
    number = tensors[name].reshape(())
    if not bool(torch.isfinite(number)) or float(number) <= 0:
        raise FormatError(f"tensor {module}.{name}", f"{float(number)} is not a positive number", "the checkpoint is damaged")
    # float64, so that scale times reciprocal rounds to just what scale divided by the stored number rounds to
    return number.double().reciprocal() if known[name] else number
