"""Why a candidate cannot serve: a stable code, what was asked, what was found, what would fix it."""

from __future__ import annotations

from dataclasses import dataclass

from hal_core.errors import ContractError

__all__ = ["CODES", "Refusal"]

#: Every refusal code with the sentence that documents it. Codes are stable: tools may match on them.
CODES: dict[str, str] = {
    "backend.import": "The backend's plugin raised while it was imported.",
    "backend.manifest": "The wheel carries no readable hal_backend.json, so it is not imported.",
    "backend.contract": "The wheel was built for another version of the backend contract.",
    "backend.torch": "The installed torch is outside the range that the wheel supports.",
    "backend.platform": "The wheel was built for another operating system or processor family.",
    "backend.isa": "The processor (or the operating system, or a setting) lacks an instruction set that all of the wheel needs.",
    "backend.arch": "The machine's devices are of an architecture that the wheel was not built for.",
    "backend.crash": "Tried in a process of its own, the backend crashed, hung or exited.",
    "backend.smoke": "Tried in a process of its own, a kernel failed or gave numbers unlike the reference's.",
    "backend.invalid": "The plugin registered something that is not a valid backend or kernel.",
    "backend.device": "The backend found no device of its own on this machine.",
    "backend.package": "The kernel calls a library that is not installed, or not in a version that it was made for.",
    "device.missing": "The machine has no device of a kind that the kernel runs on.",
    "device.isa": "The processor (or the operating system, or a setting) does not allow an instruction set the kernel uses.",
    "device.arch": "No device of this machine has an architecture that the kernel was built for.",
    "scheme.dtype": "The kernel has no code for this weight element type.",
    "scheme.granularity": "The kernel has no code for scales of this granularity.",
    "scheme.group": "The kernel cannot serve this group size.",
    "scheme.zero": "The kernel has no code for this kind of zero point.",
    "scheme.act_order": "The kernel cannot follow an activation order (g_idx).",
    "numerics.activations": "The kernel quantizes activations in a way that the request does not tolerate, or cannot as it asks.",
    "numerics.weights": "The kernel changes the stored weights in a way that the request does not tolerate.",
    "numerics.operand": "The kernel rounds an unquantized operand more coarsely than the request tolerates.",
    "numerics.accumulation": "The kernel accumulates in a narrower type than the request asks for.",
    "numerics.deterministic": "The request asks for run-to-run equal results, which the kernel does not promise.",
    "numerics.batch_invariant": "The request asks for results that do not depend on the batch, which the kernel does not promise.",
    "dtype.activation": "The kernel does not take activations of this dtype.",
    "dtype.output": "The kernel does not write outputs of this dtype.",
    "epilogue.bias": "The kernel cannot add a bias.",
    "epilogue.lora": "The kernel cannot add a LoRA delta.",
    "epilogue.activation": "The kernel does not compute this activation function.",
    "epilogue.alpha": "The kernel cannot use an activation alpha.",
    "epilogue.limit": "The kernel cannot clamp with an activation limit.",
    "epilogue.gated": "The kernel serves only the other of gated and ungated experts.",
    "epilogue.expert_map": "The kernel cannot translate global expert ids through a map.",
    "epilogue.expert_parallel": "The kernel cannot hold fewer local experts than there are global ones.",
    "epilogue.router_weight_on_input": "The kernel cannot apply the router weight to its input.",
    "epilogue.routed_scaling": "The kernel cannot scale the routed sum.",
    "epilogue.shared_experts": "The kernel does not compute shared experts.",
    "epilogue.tied_head": "The kernel cannot serve the output head from the embedding's weights.",
    "epilogue.mixed_schemes": "The kernel needs one scheme for gate, up and down, or fuses those that differ.",
    "epilogue.gqa": "The kernel cannot share a key/value head between query heads.",
    "epilogue.value_dim": "The kernel cannot hold values of another size than keys.",
    "epilogue.window": "The kernel cannot attend within a sliding window.",
    "epilogue.sink_tokens": "The kernel cannot keep leading tokens visible beside a sliding window.",
    "epilogue.sinks": "The kernel cannot add a learned logit per head to the softmax denominator.",
    "epilogue.soft_cap": "The kernel cannot soft-cap attention logits.",
    "kv.scheme": "The kernel cannot store keys or values in this way.",
    "kv.mixed": "The kernel stores keys and values in one way only.",
    "kv.head_dim": "The kernel cannot serve vectors of this size.",
    "kv.scales": "The cache's static scales come from nowhere, and the policy requires what it names to be right.",
    "routing.form": "The kernel does not take routing in this form, and no adapter converts it.",
    "shape.multiple": "A dimension is not a multiple of what the kernel needs.",
    "shape.range": "A dimension is outside the range that the kernel serves.",
    "shape.shard": "A dimension cannot be cut into that many shards.",
    "shape.rows": "The kernel serves only some batch sizes, and no kernel that shares its layout serves the rest.",
    "op.unsupported": "The backend has no kernel for this kind of op.",
    "policy.excluded": "The policy names other kernels.",
    "policy.unnamed": "The kernel runs on a device for tests here: it serves only a policy that names it.",
}


@dataclass(frozen=True)
class Refusal:
    """One reason. ``code`` is a key of :data:`CODES`."""

    code: str
    asked: str
    found: str
    fix: str

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ContractError(f"refusal code {self.code!r}", "not a documented code", "use a key of hal_core.refusal.CODES")

    def __str__(self) -> str:
        return f"[{self.code}] asked {self.asked}, found {self.found}; {self.fix}"
