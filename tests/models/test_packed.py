"""A model with packed weights computes what Hugging Face computes on the same values unpacked, in every way a step can run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gemma4_flex import backends as backends_module
from gemma4_flex.compiled import CompilePlan
from gemma4_flex.engine import FlexEngine
from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.models.matmul import linear
from gemma4_flex.models.packed_modules import PackedLinear, describe_packed
from gemma4_flex.models.projections import gated, lay_side_by_side, project, projection
from gemma4_flex.packed import PackedWeight
from tests.engines import hf_generate, hf_logits, make_engine, some_prompts, tokens_of
from tests.packings import Bytes, packed_twins
from tests.tiny import FULL, SLIDING, tiny_model

LAYERS = {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2}      # one of each kind
PROMPTS = some_prompts(9, 3, 17)
FORCED = some_prompts(10, seed=5)[0]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def twins():
    packed, dense = packed_twins(tiny_model(1, **LAYERS))
    lay_side_by_side(packed.model)
    return packed, dense


def check_against_hf(engine: FlexEngine, dense) -> None:
    logits = engine.trace(PROMPTS[0], FORCED).logits
    assert (logits - hf_logits(dense, PROMPTS[0] + FORCED)[len(PROMPTS[0]) - 1:]).abs().max() < 1e-4
    assert tokens_of(engine, PROMPTS, 12) == [hf_generate(dense, p, 12) for p in PROMPTS]


def test_hugging_faces_own_forward_on_packed_modules_gives_the_dense_models_bits(twins):
    packed, dense = twins
    assert torch.equal(hf_logits(packed, PROMPTS[2]), hf_logits(dense, PROMPTS[2]))
    assert hf_generate(packed, PROMPTS[1], 8) == hf_generate(dense, PROMPTS[1], 8)


@pytest.mark.parametrize("how", [{}, {"capture_cudagraph": True}, {"shared_kv": "sidecar"}])
def test_uncompiled_steps_over_packed_weights_are_hugging_faces(twins, how):
    check_against_hf(make_engine(twins[0], **how), twins[1])


def test_compiled_and_captured_steps_over_packed_weights_and_a_table_in_host_memory_are_hugging_faces(twins):
    packed, dense = twins
    engine = make_engine(packed, compile=True, capture_cudagraph=True, max_batch_size=2, max_seq_length=64, n_pages=33, ple="host")
    check_against_hf(engine, dense)
    assert engine.stats.steps_eager == 0


def test_a_gpus_layer_by_layer_regions_take_packed_weights(twins, monkeypatch):
    packed, dense = twins
    monkeypatch.setitem(backends_module.PLANS, "cpu", CompilePlan("layer", symbolic=False))
    engine = make_engine(packed, compile=True, max_batch_size=1, max_seq_length=64, page_size=64, n_pages=3, max_prefill_tokens=32)
    assert tokens_of(engine, PROMPTS[:1], 6) == [hf_generate(dense, PROMPTS[0], 6)]


def test_a_packed_head_beside_dense_layers_and_a_dense_head_beside_packed_layers():
    for wanted in (lambda path: path == "model.embed_tokens", lambda path: path.endswith("down_proj")):
        packed, dense = packed_twins(tiny_model(2, **LAYERS), wanted)
        check_against_hf(make_engine(packed), dense)


def test_a_lookup_unpacks_no_rows_but_those_it_wants():
    seen: list[int] = []

    class Watched(Bytes):
        def unpack(self, parts: tuple[Tensor, ...]) -> Tensor:
            seen.append(parts[0].shape[0])
            return super().unpack(parts)
    matrix = torch.randn(500, 16)
    packing = Watched(16)
    weight = PackedWeight(packing.pack(matrix), packing, torch.float32)
    ids = torch.tensor([3, 499, 3])
    assert torch.equal(weight.rows(ids), Bytes(16).unpack(weight.parts)[ids])
    assert seen == [3]


def test_gate_and_up_of_one_packing_are_one_matmul_and_of_two_packings_are_two(twins):
    layer = twins[0].model.layers[0]
    assert isinstance(projection(layer.mlp.gate_proj, layer.mlp.up_proj), PackedWeight)
    x = torch.randn(3, 48)
    other = PackedLinear(layer.mlp.up_proj.packed._replace(packing=Bytes(48, name="another")))
    for form in ("library", "sum", "native"):
        rows = x[:1] if form == "sum" else x
        one = gated(rows, projection(layer.mlp.gate_proj, layer.mlp.up_proj), form, torch.relu)
        two = gated(rows, projection(layer.mlp.gate_proj, other), form, torch.relu)
        wanted = torch.relu(layer.mlp.gate_proj(rows)) * layer.mlp.up_proj(rows)
        torch.testing.assert_close(one, wanted)
        torch.testing.assert_close(two, wanted)
    assert len(projection(layer.mlp.gate_proj, other)) == 2
    torch.testing.assert_close(project(x, projection(layer.mlp.gate_proj, other)),
                               torch.cat([layer.mlp.gate_proj(x), layer.mlp.up_proj(x)], -1))


def test_bf16_rounds_an_unpacked_weight_once():
    matrix = torch.randn(5, 16)
    packing = Bytes(16)
    weight = PackedWeight(packing.pack(matrix), packing, torch.bfloat16)
    x = torch.randn(2, 16).bfloat16()
    assert torch.equal(linear(x, weight, "library"), torch.nn.functional.linear(x, packing.unpack(weight.parts).bfloat16()))


def test_a_packed_weight_written_in_place_is_seen_by_the_next_replay_and_a_rebound_one_is_an_error():
    packed, dense = packed_twins(tiny_model(3, **LAYERS))
    engine = make_engine(packed, capture_cudagraph=True)
    before = tokens_of(engine, PROMPTS, 8)
    down = packed.model.layers[1].mlp.down_proj
    with engine.update_weights():
        down.packed_1.mul_(-3)
    dense.model.layers[1].mlp.down_proj.weight.mul_(-3)
    assert tokens_of(engine, PROMPTS, 8) == [hf_generate(dense, p, 8) for p in PROMPTS] != before
    down.packed_1 = down.packed_1.clone()
    with pytest.raises(RuntimeError, match=r"down_proj\.packed_1"):
        tokens_of(engine, PROMPTS, 1)


def test_what_is_packed_is_described_with_its_bytes_and_a_steps(twins):
    geometry = ModelGeometry.from_config(twins[0].config)
    found = describe_packed(twins[0], geometry)
    sizes = {p: m.weight.numel() for p, m in twins[1].named_modules() if hasattr(m, "weight") and m.weight.ndim == 2}
    count = sum(size for path, size in sizes.items() if path != "lm_head")
    assert found["packings"] == {"bytes": {"matrices": 4 * 7 + 2 * 2 + 3, "bytes": count + count // 8 * 4}}
    read = sum(size for path, size in sizes.items() if "embed" not in path)       # the tied head, and none of the tables
    others = geometry.step_weight_bytes(4) - 4 * read
    assert 0 < others < 4 * read and found["step_weight_bytes"] == others + read + read // 8 * 4
    assert describe_packed(twins[1], geometry) is None
