"""Tensor names of GGUF files and of Hugging Face's text model."""

from __future__ import annotations

import gguf
import pytest

from gemma4_flex.checkpoints.gguf_names import ROPE_FREQS, gguf_name, hf_name
from gemma4_flex.checkpoints.skeleton import weights_of
from tests.tiny import tiny_model


def test_every_tensor_of_a_model_has_a_name_that_leads_back():
    names = {*weights_of(tiny_model()), "lm_head.weight"}
    assert [name for name in names if hf_name(gguf_name(name) or "") != name] == []


def test_names_are_the_gguf_packages_own():
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, 6)
    for name in weights_of(tiny_model()):
        base = name.removesuffix(".weight")
        assert gguf_name(name) == known.get_name(base) + ".weight", name


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.v_norm.weight", "model.layers.01.mlp.up_proj.weight",
                                  "model.layers.0.layer_scalar.weight", "model.layers.0.mlp.up_proj", "model.layers.0.x.weight",
                                  "model.vision_tower.norm.weight", "", ".weight"])
def test_a_tensor_that_no_text_model_has_has_no_gguf_name(name):
    assert gguf_name(name) is None


@pytest.mark.parametrize("name", [ROPE_FREQS, "blk.0.ffn_gate_inp.weight", "blk.00.attn_q.weight", "blk.0.attn_q.bias",
                                  "blk.0.attn_q", "token_embd", "blk.0.token_embd.weight", "attn_q.weight", "", ".weight"])
def test_a_tensor_that_belongs_to_no_text_model_has_no_hugging_face_name(name):
    assert hf_name(name) is None
