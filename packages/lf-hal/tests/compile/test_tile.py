"""Products cut to fit an on-chip memory: pieces fit, cover and change no bit. Padding likewise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from op_maker import Maker

import lf_hal
from lf_hal.lir import Graph, parse, to_text, verify
from lf_hal.passes import PassOptions, TileError, optimize, store_weights, tile_products
from lf_hal.passes.tile import weight_bytes

SRAM = 9000


def graph() -> Graph:
    m = Maker()
    x, image = m.x(3, 5, 130), m.x(2, 9, 8, 7)
    wide = m("linear_act", x, m.w(300, 130), m.w(300), act="silu")
    small = m("linear", wide, m.w(7, 300))
    conv = m("conv2d", image, m.w(70, 9, 3, 3), m.w(70), padding=(1, 1))
    scaled = m("conv_affine_act", image, m.w(70, 9, 3, 3), m.w(70), m.w(70), padding=(1, 1), act="relu")
    added = m("conv_add_act", scaled, m.w(70, 70, 1, 1), conv, m.w(70), act="relu")
    grouped = m("conv2d", added, m.w(70, 7, 7, 7), padding=(3, 3), groups=10)
    return m.graph((wide, small, added, grouped))


def given(values: Any, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {v.name: rng.standard_normal(v.type.shape).astype(np.float32) for v in values}


def test_pieces_fit_cover_every_output_once_and_print() -> None:
    whole, tiled = graph(), tile_products(graph(), SRAM)
    verify(tiled)
    assert parse(to_text(tiled)) == tiled
    types, made = tiled.types(), tiled.producers()
    products = [op for op in tiled.ops if op.kind in {o.kind for o in whole.ops}]
    ungrouped = [op for op in products if not op.has("groups") or op.get_int("groups") == 1]
    assert len(ungrouped) > 20
    assert all(weight_bytes(op, types) <= SRAM for op in ungrouped)
    assert all(types[op.output.name] == whole.types()[op.output.name] for op in whole.ops)
    for op in whole.ops[:1] + whole.ops[2:5]:
        joined = made[op.output.name]
        assert joined.kind == "concat"
        cuts = [made[made[part].inputs[1]] for part in joined.inputs]
        spans = [(c.get_int("start"), c.get_int("end")) for c in cuts]
        assert [a for a, _ in spans] == [0, *(b for _, b in spans[:-1])]
        assert spans[-1][1] == types[op.inputs[1]].shape[0]
    assert tile_products(graph(), 1 << 30) == graph()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i8"])
def test_cut_whole_and_padded_have_the_same_bits(dtype: str) -> None:
    case = graph()
    weights, inputs = given(case.weights, 1), given(case.inputs, 2)
    found = []
    for sram, padding in ((None, True), (SRAM, True), (None, False)):
        options = PassOptions(cache_line_padding=padding)
        with lf_hal.compile(
            case, weights, passes=options, weights_dtype=dtype, sram_bytes=sram, threads=2
        ) as made:
            assert made.manifest["passes"]["sram_bytes"] == sram
            assert made.manifest["passes"]["cache_line_padding"] == padding
            found.append([y.tobytes() for y in made.run(inputs).values()])
    assert found[0] == found[1] == found[2]


def test_narrow_weights_are_cut_later() -> None:
    def pieces(dtype: str) -> int:
        tiled = tile_products(store_weights(optimize(graph()), dtype), SRAM)
        return sum(op.kind.startswith(("linear", "conv")) for op in tiled.ops)

    assert pieces("f32") > pieces("bf16") > pieces("i8")


def test_what_cannot_be_cut_is_an_error_with_its_sizes() -> None:
    with pytest.raises(TileError, match="one output are 524 bytes, and 500 are there") as caught:
        tile_products(graph(), 500)
    assert (caught.value.needed, caught.value.sram_bytes) == (524, 500)
    with pytest.raises(ValueError, match="sram_bytes=0"):
        tile_products(graph(), 0)
