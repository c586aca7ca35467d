"""AITER's published source, read and never imported: importing it builds native code for a GPU."""

from __future__ import annotations

from published import Published

RELEASE = "0.1.7.post2.dev18"
_SOURCE = Published("aiter", f"amd_aiter-{RELEASE}-*.whl", f"amd-aiter {RELEASE} is not in build/aiter: `make test-rocm` downloads it")

wheel, text, function, signature, executed = _SOURCE.wheel, _SOURCE.text, _SOURCE.function, _SOURCE.signature, _SOURCE.executed

#: What stands in the lines that conditions cite.
CITED = {
    "aiter/ops/shuffle.py:17-18": r"assert x\.shape\[-2\] % BN == 0(.|\n)*assert x\.shape\[-1\] % BK == 0",
    "aiter/fused_moe.py:385-390": r"fc_scale_blkn=128(.|\n)*fc_scale_blkk=128",
    "aiter/fused_moe.py:459": r"Silu,\s+QuantType\.per_Token,.*dtypes\.i8,\s+dtypes\.i8,\s+True",
    "csrc/py_itfs_cu/asm_moe_2stage.cu:187": r"inter_dim % cfg\.tile_N == 0",
    "csrc/py_itfs_cu/asm_fmoe.cu:277": r"inter_dim % cfg\.subGU_n",
    "csrc/ck_gemm_moe_2stages_codegen/gemm_moe_ck2stages_common.py:183-186": r"(GEMM1\(\s*256,\s*\d+,\s*64,\s*128,(.|\n)*){4}",
    "csrc/ck_gemm_moe_2stages_codegen/gemm_moe_ck2stages_common.py:277-280": r"(GEMM2\(\s*256,\s*\d+,\s*128,\s*128,(.|\n)*){4}",
    "3rdparty/composable_kernel/include/ck_tile/ops/flatmm/kernel/moe_flatmm_kernel.hpp:155": r"alpha_ = 1\.702f, float limit_ = 7\.0f",
    "csrc/cpp_itfs/pa/pa.cuh:109": r"MAX_ELEMENTS_PER_QUERY = 16 / GQA_RATIO",
    "aiter/fused_moe.py:211-212": r"global_E = expert_mask\.numel\(\)",
    "aiter/fused_moe.py:219-221": r"q_dtype_w = w1\.dtype(.|\n)*fp4x2 if quant_type == QuantType\.per_1x32",
    "aiter/fused_moe.py:255-259": r"doweight_stage1 not support in fused_moe_1stage",
    "aiter/fused_moe.py:451-471": r"QuantType\.per_Token(.|\n)*QuantType\.per_1x128(.|\n)*gfx950",
    "aiter/fused_moe.py:655-673": r"activation == ActivationType\.Swiglu(.|\n)*bias1=bias1(.|\n)*bias2=bias2",
    "aiter/ops/gemm_op_a8w8.py:421-422": r"only support fp8 now(.|\n)*does not support bias now",
    "csrc/cpp_itfs/pa/pa_kernels.cuh:259": r"static_assert\(BLOCK_SIZE <= k_thread_per_block\)",
    "csrc/cpp_itfs/pa/pa_kernels.cuh:639": r"cvt_pk_fp8_f32",
}
#: Where AITER decides what a refusal of some code rests on, for those whose reason does not say it; "" for a kernel that was taken.
LINES = {
    "moe": {
        "": "aiter/fused_moe.py:219-221", "numerics.activations": "aiter/fused_moe.py:219-221",
        "scheme.dtype": "aiter/fused_moe.py:451-471", "scheme.granularity": "aiter/fused_moe.py:451-471",
        "epilogue.activation": "aiter/fused_moe.py:451-471", "epilogue.bias": "aiter/fused_moe.py:655-673",
        "epilogue.expert_map": "aiter/fused_moe.py:211-212", "epilogue.router_weight_on_input": "aiter/fused_moe.py:255-259",
    },
    "linear": {"epilogue.bias": "aiter/ops/gemm_op_a8w8.py:421-422", "scheme.dtype": "aiter/ops/gemm_op_a8w8.py:421-422"},
    "kv": {
        "": "csrc/cpp_itfs/pa/pa_kernels.cuh:259", "shape.range": "csrc/cpp_itfs/pa/pa_kernels.cuh:259",
        "kv.scheme": "csrc/cpp_itfs/pa/pa_kernels.cuh:639",
    },
}  # fmt: skip
