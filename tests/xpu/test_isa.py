"""Our kernels in instructions of GPUs that are not here: dpas in the inner loop, registers that suffice, kernels that do not vanish.

The lane layout of the dpas engine is that of the emulation, which runs; whether a GPU's agrees is for a GPU to say.
"""

from __future__ import annotations

import functools

import isa
import pytest

pytestmark = pytest.mark.usefixtures("sycl_device")
#: Headers with products, and the operands of dpas in them.
HEADERS = {
    "grouped_int8.hpp": ("d", "b", "b"),
    "grouped_int4.hpp": ("f", "bf", "bf"),
    "narrow_floats.hpp": ("f", "bf", "bf"),
}
#: Accesses of spilled registers in the loop over K, by kernel and device: none, unless stated.
SPILLS: dict[tuple[str, str], int] = {}
#: All on one device, and one on the other, which differs in the lanes of a sub-group.
CASES = [*((header, "pvc") for header in HEADERS), ("grouped_int8.hpp", "dg2-g10")]


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    @functools.cache
    def made(header: str, engine: str, lanes: int) -> tuple[bytes, ...]:
        return isa.spirv(header, engine, lanes, tmp_path_factory.mktemp("image"))

    return made


@pytest.mark.parametrize(("header", "device"), CASES)
def test_products_are_dpas_in_the_inner_loop(header, device, image, tmp_path):
    isa.offline_compiler()
    found = isa.instructions(image(header, "dpas", isa.DEVICES[device]), device, tmp_path)
    wanted = isa.kernels_in(header)
    assert wanted
    assert wanted == {name: len(kernel.products) for name, kernel in found.items()}
    assert {product for kernel in found.values() for product in kernel.products} == {("8x8", *HEADERS[header])}
    spilled = {name: kernel.spills for name, kernel in found.items()}
    assert spilled == {name: SPILLS.get((name, device), 0) for name in found}


@pytest.mark.parametrize("header", HEADERS)
def test_joint_matrix_images_multiply_cooperatively(header, image):
    found = isa.cooperative_products(image(header, "joint_matrix", 16))
    wanted = isa.kernels_in(header)
    assert wanted.keys() <= found.keys()
    assert all(found[name] > 0 for name in wanted), found


def test_a_kernel_without_products_counts_none(image):
    """The count is of instructions, and not of the header's includes."""
    found = isa.cooperative_products(image("rows.hpp", "joint_matrix", 16))
    assert found.keys() >= isa.kernels_in("rows.hpp").keys()
    assert not any(found.values())


def test_what_the_reader_takes_for_a_loop():
    text = """
_0_1:
        mov (16|M0) r1 r2
_0_2:
        dpas.8x8 (16|M0)         r44:d         r44:d             r4:b              r40.0:b          {Atomic}
(W)     load.ugm.d32x32t.a32 (1|M0)  r1:2  ss[a0.2][r126:1] // fill from FP[0*64] of ?; $1093
(W&f3.0) jmpi                                _0_2
        dpas.8x4 (16|M0)         r44:f         r44:f             r4:bf             r40.0:bf
(W)     store.ugm // spill to FP[0*32]
(W&f3.0) jmpi                                _0_1
        dpas.8x2 (16|M0)         r44:f         r44:f             r4:hf             r40.0:hf
"""
    found = isa._read(text.splitlines())
    assert found.products == (("8x8", "d", "b", "b"), ("8x4", "f", "bf", "bf"))
    assert found.spills == 2
