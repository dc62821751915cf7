"""Synthetic models have the published geometry, seeded weights, and hide nothing."""

from __future__ import annotations

import json

import pytest
import torch

from gemma4_flex.checkpoints import CheckpointError, load_text_model
from gemma4_flex.checkpoints.published import ASSETS, published_geometry
from gemma4_flex.checkpoints.skeleton import meta_text_model, weights_of
from gemma4_flex.geometry import FULL, SLIDING, ModelGeometry, UnsupportedModelError

SMALL = {size: ASSETS / "configs" / f"{size}-small.json" for size in ("e2b", "e4b")}


def load(which, dtype=torch.float32, seed=0):
    return load_text_model(f"synthetic:{which}", dtype=dtype, device="cpu", seed=seed)


@pytest.mark.parametrize("size", ["e2b", "e4b"])
def test_the_scaled_down_configs_keep_what_is_odd_about_the_published_ones(size):
    small = ModelGeometry.from_config(json.loads(SMALL[size].read_text()))
    large = published_geometry(size.upper())
    period = [la.attention_type for la in large.layers[:6 if size == "e4b" else 5]]
    assert [la.attention_type for la in small.layers] == period * (small.num_layers // len(period))
    assert {la.num_kv_heads for la in small.layers} == {la.num_kv_heads for la in large.layers}
    for geometry in (small, large):
        widened = {la.mlp_width // geometry.layers[0].mlp_width for la in geometry.layers if not la.owns_kv}
        assert widened == ({2} if size == "e2b" else {1})
        assert len(geometry.owners(FULL)) >= 2      # a wrong owner must be possible to show
        assert geometry.rope[FULL].head_dim == 2 * geometry.rope[SLIDING].head_dim


@pytest.mark.parametrize("which", ["E2B", "E4B", "Bolt"])
def test_a_published_geometry_is_built_without_storage_and_matches_its_modules(which):
    geometry = published_geometry(which)
    model = meta_text_model(json.loads((ASSETS / "configs" / f"{'e2b' if which == 'E2B' else 'e4b'}.json").read_text()),
                            dtype=torch.bfloat16)
    assert all(p.is_meta for p in model.parameters())
    geometry.assert_matches(model.model)
    assert sum(p.numel() for p in model.parameters()) == geometry.parameter_count()["total"]
    assert geometry.parameter_count()["total"] == pytest.approx(4.629e9 if which == "E2B" else 7.463e9, rel=2e-4)


@pytest.mark.parametrize("size", ["e2b", "e4b"])
def test_a_synthetic_model_computes_finite_logits_that_the_softcap_bends(size):
    loaded = load(SMALL[size])
    ids = torch.randint(3, loaded.geometry.vocab_size, (2, 80), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = loaded.model.model(ids).last_hidden_state
        capped, raw = loaded.model(ids).logits, loaded.model.lm_head(hidden)
    assert capped.isfinite().all()
    assert 1.5 < capped.std() < 6
    assert (raw - capped).abs().max() > 0.1
    assert capped.argmax(-1).unique().numel() > 40      # not one answer to everything
    assert all(0.7 < layer.layer_scalar.item() < 0.995 for layer in loaded.model.model.layers)


def test_every_earlier_token_of_the_window_moves_the_logits():
    loaded = load(SMALL["e2b"])
    ids = torch.randint(3, loaded.geometry.vocab_size, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        base = loaded.model(ids).logits[0, -1]
        for position in (0, 7, 18):
            changed = ids.clone()
            changed[0, position] = 5
            assert (loaded.model(changed).logits[0, -1] - base).abs().max() > 1e-3


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    first, again, other = (weights_of(load(SMALL["e2b"], seed=seed).model) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_bf16_weights_are_the_fp32_ones_rounded_and_rotary_tables_stay_fp32():
    exact, rounded = load(SMALL["e4b"]).model, load(SMALL["e4b"], torch.bfloat16).model
    theirs = weights_of(rounded)
    for name, weight in weights_of(exact).items():
        assert theirs[name].dtype == torch.bfloat16
        torch.testing.assert_close(theirs[name], weight.bfloat16(), rtol=0, atol=0)
    tables = dict(rounded.model.rotary_emb.named_buffers())
    for name, table in exact.model.rotary_emb.named_buffers():
        torch.testing.assert_close(tables[name], table, rtol=0, atol=0)


def test_the_head_is_tied_and_nothing_is_left_on_the_meta_device():
    model = load(SMALL["e2b"]).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(t.is_meta or t.isnan().any() for t in (*model.parameters(), *model.buffers()))
    assert not model.training and not any(p.requires_grad for p in model.parameters())


def test_the_source_says_that_the_weights_are_random_and_a_tokenizer_fits_or_is_absent():
    loaded = load(SMALL["e2b"], seed=5)
    assert "random weights, seed 5" in loaded.source
    assert loaded.tokenizer is None or len(loaded.tokenizer) <= loaded.geometry.vocab_size
    assert 1 in loaded.stop_ids


def test_an_unknown_size_and_a_config_of_another_architecture_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"synthetic:E9B is none of E2B, E4B, Bolt, .* and no config\.json"):
        load("E9B")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}))
    with pytest.raises(UnsupportedModelError, match="MistralForCausalLM"):
        load(tmp_path / "config.json")
