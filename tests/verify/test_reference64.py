"""The float64 reference: each equation against values worked out by hand, and the whole against Hugging Face."""

from __future__ import annotations

import ast
import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

from gemma4_flex.geometry import ModelGeometry, RopeGeometry
from gemma4_flex.verify import reference64
from gemma4_flex.verify.reference64 import (
    Weights,
    attend,
    gelu_tanh,
    kv_owners,
    per_layer_inputs,
    reference_forward,
    rms_norm,
    rotary_table,
    rotate,
    scaled_lookup,
    visible,
)
from tests.tiny import FULL, SLIDING, VOCAB, tiny_config, tiny_model

FULL_ROPE = RopeGeometry(theta=1e6, head_dim=16, rotated_fraction=0.25)


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random_ids(n: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(model, ids: list[int], **kwargs) -> reference64.ReferenceTrace:
    return reference_forward(model.state_dict(), ModelGeometry.from_config(model.config), ids, **kwargs)


@torch.no_grad()
def hf_forward(model, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden [L, T, H] of all levels but the last (which Hugging Face hands out normed), and logits [T, V]."""
    output = model(torch.tensor([ids]), use_cache=True, output_hidden_states=True)
    return torch.stack(output.hidden_states[:-1])[:, 0].double(), output.logits[0].double()


# --- the whole model ----------------------------------------------------------------------------------------------

SHAPES = {
    "six layers, two shared": {},
    "two kv heads": {"num_key_value_heads": 2},
    "nothing shared": {"num_kv_shared_layers": 0, "use_double_wide_mlp": False},
    "four sliding and a full one, twice, tail shared": {
        "num_hidden_layers": 10, "layer_types": ([SLIDING] * 4 + [FULL]) * 2, "num_kv_shared_layers": 4},
    "untied head": {"tie_word_embeddings": False},
    "no softcap": {"final_logit_softcapping": None},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("seed", [0, 1])
def test_agrees_with_hugging_face_fp32_on_every_level(shape, seed):
    model = tiny_model(seed, **shape)
    ids = random_ids(17, seed)
    reference = run(model, ids)
    hidden, logits = hf_forward(model, ids)
    assert reference.hidden.shape == (len(model.model.layers) + 1, 17, 48) and reference.logits.shape == (17, VOCAB)
    assert reference.hidden.dtype == reference.logits.dtype == torch.float64
    assert (reference.hidden[:-1] - hidden).abs().max() < 1e-4
    assert (reference.logits - logits).abs().max() < 1e-4


def test_bf16_weights_are_taken_as_they_are_and_their_embedding_scale_is_the_rounded_one():
    model = tiny_model(dtype=torch.bfloat16)
    ids = random_ids(9)
    reference = run(model, ids)
    hidden, logits = hf_forward(tiny_model(dtype=torch.bfloat16).float(), ids)  # keeps the scale that bf16 rounded
    assert (reference.hidden[:-1] - hidden).abs().max() < 1e-4
    assert (reference.logits - logits).abs().max() < 1e-4


def test_rows_are_those_of_the_whole_trace():
    model, ids = tiny_model(), random_ids(12)
    whole, some = run(model, ids), run(model, ids, rows=[3, 11])
    assert torch.equal(some.hidden, whole.hidden[:, [3, 11]])
    torch.testing.assert_close(some.logits, whole.logits[[3, 11]], rtol=0, atol=1e-12)


def test_the_key_prefix_does_not_matter():
    model, ids = tiny_model(), random_ids(5)
    geometry = ModelGeometry.from_config(model.config)
    bare = {key.removeprefix("model."): value for key, value in model.state_dict().items() if key != "lm_head.weight"}
    multimodal = {"model.language_model." + key: value for key, value in bare.items()}
    expected = run(model, ids).logits
    for state_dict in (bare, multimodal):
        assert torch.equal(reference_forward(state_dict, geometry, ids).logits, expected)


def test_k_and_v_weights_of_shared_layers_are_dead():
    model, ids = tiny_model(), random_ids(9)
    state_dict = dict(model.state_dict())
    for name, rows in (("k_proj", 16), ("v_proj", 16)):
        state_dict[f"model.layers.4.self_attn.{name}.weight"] = torch.full((rows, 48), 1e3)
    geometry = ModelGeometry.from_config(model.config)
    assert torch.equal(reference_forward(state_dict, geometry, ids).logits, run(model, ids).logits)


def test_a_missing_weight_is_named():
    model = tiny_model()
    state_dict = {key: value for key, value in model.state_dict().items() if "layers.3.mlp.up_proj" not in key}
    with pytest.raises(ValueError, match=r"layers\.3\.mlp\.up_proj\.weight"):
        reference_forward(state_dict, ModelGeometry.from_config(model.config), [1, 2])


def test_owners_come_from_the_rule_and_not_from_the_geometry():
    model, ids = tiny_model(), random_ids(9)
    geometry = ModelGeometry.from_config(model.config)
    layers = list(geometry.layers)
    layers[4] = dataclasses.replace(layers[4], kv_owner=0)
    wrong = dataclasses.replace(geometry, layers=tuple(layers))
    assert torch.equal(reference_forward(model.state_dict(), wrong, ids).logits, run(model, ids).logits)


def test_imports_nothing_of_the_engine_but_geometry():
    tree = ast.parse(Path(reference64.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"__future__", "math", "collections.abc", "dataclasses", "torch", "gemma4_flex.geometry"}


# --- its pieces ---------------------------------------------------------------------------------------------------


def test_norm_multiplies_by_the_weight_itself():
    x = torch.randn(5, 24, dtype=torch.float64)
    rms = rms_norm(x, torch.ones(24, dtype=torch.float64), 1e-6).square().mean(-1).sqrt()
    torch.testing.assert_close(rms, torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-5)
    assert rms_norm(x, torch.zeros(24, dtype=torch.float64), 1e-6).abs().max() == 0
    assert torch.equal(rms_norm(x, None, 1e-6), rms_norm(x, torch.ones(24, dtype=torch.float64), 1e-6))
    assert rms_norm(double(3, 4), double(2, 1), 0.0).tolist() == pytest.approx([6 / math.sqrt(12.5), 4 / math.sqrt(12.5)])


def test_per_layer_inputs_of_one_token_by_hand():
    """Hidden 4, two layers of PLE 2; embedding row (.5, 0, -.5, 1) times sqrt 4 is (1, 0, -1, 2)."""
    geometry = SimpleNamespace(num_layers=2, ple_width=2, hidden_size=4, norm_eps=0.0)
    weights = Weights({
        "embed_tokens.weight": torch.tensor([[9.0, 9, 9, 9], [0.5, 0, -0.5, 1]]),
        "embed_tokens_per_layer.weight": torch.tensor([[9.0, 9, 9, 9], [1, 2, 3, 4]]),
        "per_layer_model_projection.weight": torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0], [1, 0, 1, 1]]),
        "per_layer_projection_norm.weight": torch.tensor([2.0, 3.0]),
    })
    ids = torch.tensor([1])
    e = scaled_lookup(weights.stored("embed_tokens.weight"), ids, 4)
    assert e.tolist() == [[1, 0, -1, 2]]
    # projected: (1, 2 | -1, 2) / sqrt 4 = (.5, 1 | -.5, 1), each of mean square .625, normed by weights (2, 3)
    rms, lookup_scale = math.sqrt(0.625), float(torch.tensor(math.sqrt(2), dtype=torch.float32))
    expected = [
        [(0.5 * 2 / rms + lookup_scale * 1) / math.sqrt(2), (1 * 3 / rms + lookup_scale * 2) / math.sqrt(2)],
        [(-0.5 * 2 / rms + lookup_scale * 3) / math.sqrt(2), (1 * 3 / rms + lookup_scale * 4) / math.sqrt(2)],
    ]
    torch.testing.assert_close(per_layer_inputs(weights, geometry, ids, e), torch.tensor([expected]).double(),
                               rtol=0, atol=1e-6)


def test_each_layer_reads_its_own_slice_of_the_packed_row():
    model, ids = tiny_model(), random_ids(5)
    before = run(model, ids).logits
    table = model.model.embed_tokens_per_layer.weight.data
    table[:, :16] = table[:, :16].roll(8, dims=1)  # layers 0 and 1 change places
    assert (run(model, ids).logits - before).abs().max() > 1e-2


def test_embedding_scale_is_rounded_to_the_weights_dtype():
    for width, scale in ((1536, 39.25), (2560, 50.5)):
        row = scaled_lookup(torch.ones(1, width, dtype=torch.bfloat16), torch.tensor([0]), width)
        assert row.unique().tolist() == [scale]
    fp32 = scaled_lookup(torch.ones(1, 1536), torch.tensor([0]), 1536)[0, 0].item()
    assert fp32 == float(torch.tensor(math.sqrt(1536), dtype=torch.float32))


def test_partial_rotary_turns_the_first_pairs_of_the_whole_head():
    x = torch.randn(8, 1, 16, dtype=torch.float64)
    turned = rotate(x, rotary_table(8, FULL_ROPE))
    assert torch.equal(turned[0], x[0])
    changed = (turned[7, 0] != x[7, 0]).nonzero().flatten().tolist()
    assert changed == [0, 1, 8, 9]
    angle = 7 * 1e6 ** (-2 / 16)  # of pair (1, 9): the exponent divides by the whole head_dim
    first, second = x[7, 0, 1].item(), x[7, 0, 9].item()
    assert turned[7, 0, 1].item() == pytest.approx(first * math.cos(angle) - second * math.sin(angle), abs=1e-12)
    assert turned[7, 0, 9].item() == pytest.approx(second * math.cos(angle) + first * math.sin(angle), abs=1e-12)


@pytest.mark.parametrize("attention_type", [SLIDING, FULL])
def test_rotary_tables_equal_hugging_faces(attention_type):
    config = tiny_config(global_head_dim=16)
    rope = ModelGeometry.from_config(config).rope[attention_type]
    cos, sin = rotary_table(40, rope)
    hf_cos, hf_sin = Gemma4TextRotaryEmbedding(config)(torch.zeros(1), torch.arange(40)[None], attention_type)
    torch.testing.assert_close(torch.cat([cos, cos], -1).float(), hf_cos[0], rtol=0, atol=5e-6)
    torch.testing.assert_close(torch.cat([sin, sin], -1).float(), hf_sin[0], rtol=0, atol=5e-6)


def test_a_window_counts_the_query_itself():
    assert visible(6, 4).sum(-1).tolist() == [1, 2, 3, 4, 4, 4]
    assert visible(6, None).sum(-1).tolist() == [1, 2, 3, 4, 5, 6]
    assert visible(21, 8)[20].nonzero().flatten().tolist() == list(range(13, 21))


def test_attention_scores_are_not_scaled():
    """Two tokens, one head of 4 dims: the second query scores 2 and 1, so its output lies at 1 / (1 + e) from key 0's."""
    q = double(2, 0, 0, 0, 1, 1, 1, 1).reshape(2, 1, 4)
    k = double(1, 1, 0, 0, 0, 0, 0, 1).reshape(2, 1, 4)
    v = double(1, 0, 0, 0, 0, 1, 0, 0).reshape(2, 1, 4)
    out = attend(q, k, v, None)
    assert out[0, 0].tolist() == [1, 0, 0, 0]
    assert out[1, 0].tolist() == pytest.approx([math.e / (1 + math.e), 1 / (1 + math.e), 0, 0])


def test_query_heads_share_kv_heads_in_runs():
    v = torch.arange(2.0, dtype=torch.float64).reshape(1, 2, 1)
    assert attend(torch.zeros(1, 6, 1, dtype=torch.float64), v, v, None).flatten().tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(("pattern", "repeats", "first_shared", "sliding_owner", "full_owner"), [
    ([SLIDING] * 4 + [FULL], 7, 15, 13, 14),  # E2B
    ([SLIDING] * 5 + [FULL], 7, 24, 22, 23),  # E4B
])
def test_shared_layers_read_the_last_owner_of_their_type(pattern, repeats, first_shared, sliding_owner, full_owner):
    types = pattern * repeats
    owners = kv_owners(types, first_shared)
    assert owners[:first_shared] == list(range(first_shared))
    assert {(kind, owner) for kind, owner in zip(types[first_shared:], owners[first_shared:])} == {
        (SLIDING, sliding_owner), (FULL, full_owner)}


def test_gelu_is_the_tanh_one():
    x = torch.linspace(-4, 4, 33, dtype=torch.float64)
    torch.testing.assert_close(gelu_tanh(x), torch.nn.functional.gelu(x, approximate="tanh"), rtol=0, atol=1e-14)


def test_the_softcap_bounds_logits():
    model = tiny_model()
    model.model.embed_tokens.weight.data *= 50
    logits = run(model, random_ids(5)).logits
    assert 29 < logits.abs().max() <= 30
