"""Both rotary regimes are Hugging Face's, bit for bit."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding, apply_rotary_pos_emb

from gemma4_flex.geometry import ModelGeometry, RopeGeometry
from gemma4_flex.rotary import cos_sin, inverse_frequencies, rotate
from tests.tiny import FULL, SLIDING, tiny_config

POSITIONS = torch.tensor([0, 1, 7, 511, 4096, 100_000])
SHIPPED = {"head_dim": 256, "global_head_dim": 512}


def rope_of(kind: str, **overrides) -> RopeGeometry:
    return ModelGeometry.from_config(tiny_config(**overrides)).rope[kind]


@pytest.mark.parametrize("sizes", [{}, SHIPPED], ids=["tiny", "shipped"])
@pytest.mark.parametrize("kind", [SLIDING, FULL])
def test_frequencies_are_hugging_faces(kind, sizes):
    theirs = getattr(Gemma4TextRotaryEmbedding(tiny_config(**sizes)), f"{kind}_inv_freq")
    assert torch.equal(inverse_frequencies(rope_of(kind, **sizes), "cpu"), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [SLIDING, FULL])
def test_tables_and_turned_heads_are_hugging_faces_far_from_the_start(kind, dtype):
    rope = rope_of(kind, **SHIPPED)
    x = torch.randn(len(POSITIONS), 2, rope.head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    cos, sin = cos_sin(POSITIONS, inverse_frequencies(rope, "cpu"), dtype)
    their_cos, their_sin = Gemma4TextRotaryEmbedding(tiny_config(**SHIPPED))(x, POSITIONS[None], kind)
    assert cos.dtype == dtype
    assert torch.equal(cos, their_cos[0])
    assert torch.equal(sin, their_sin[0])
    assert torch.equal(rotate(x, cos, sin), apply_rotary_pos_emb(x[None], their_cos, their_sin, unsqueeze_dim=2)[0])


def test_a_quarter_of_sixteen_dims_turns_dims_0_1_8_and_9():
    x = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(0))
    rope = RopeGeometry(theta=1e6, head_dim=16, rotated_fraction=0.25)
    turned = rotate(x, *cos_sin(torch.tensor([7]), inverse_frequencies(rope, "cpu"), torch.float32))
    assert (turned != x).flatten().nonzero().flatten().tolist() == [0, 1, 8, 9]


def test_exponents_divide_by_the_whole_head_whatever_fraction_turns():
    frequencies = inverse_frequencies(RopeGeometry(theta=1e6, head_dim=512, rotated_fraction=0.25), "cpu")
    assert frequencies.count_nonzero() == 64
    assert frequencies[1].item() == pytest.approx(1e6 ** (-2 / 512), rel=1e-6)


def test_angles_stay_fp32_for_a_bf16_model():
    """Positions rounded to bf16 first would put 4097 on 4096."""
    frequencies = inverse_frequencies(rope_of(SLIDING), "cpu")
    tables = [cos_sin(torch.tensor([p]), frequencies, torch.bfloat16)[0] for p in (4096, 4097)]
    assert not torch.equal(*tables)
