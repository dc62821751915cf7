"""Every kind of Hugging Face checkpoint gives the same text model, and a broken one says what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma4Config, Gemma4ForCausalLM

from gemma4_flex.checkpoints import CheckpointError, hf, load_text_model
from gemma4_flex.geometry import ModelGeometry, UnsupportedModelError, text_fields
from tests.tiny import fake_tokenizer, tiny_config, tiny_model

IDS = torch.tensor([[2, 17, 40, 9, 33, 5, 60, 21, 8, 44, 13, 52]])
MULTIMODAL = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"],
              "image_token_id": 60, "audio_token_id": 61, "video_token_id": 62, "eos_token_id": [1, 7]}


def logits(model) -> torch.Tensor:
    model.config._attn_implementation = "eager"     # the same arithmetic for all, so that equal weights give equal bits
    with torch.no_grad():
        return model(IDS).logits


def tensors_of(model) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items() if k != "lm_head.weight"}


def dead_shared_kv(model) -> dict[str, torch.Tensor]:
    """The nine tensors an original checkpoint carries for the shared layers 4 and 5, full of NaN."""
    found = {}
    for layer, size in ((4, 16), (5, 32)):
        for name, shape in (("k_proj", (size, 48)), ("v_proj", (size, 48)), ("k_norm", (size,))):
            found[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.full(shape, float("nan"))
    return found


def write(path: Path, tensors: dict, config: dict | None = None, **changed) -> Path:
    """A checkpoint directory with these tensors; `changed` are config fields."""
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = config or text_fields(tiny_config()) | {"architectures": ["Gemma4ForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config | changed))
    return path


def multimodal(tensors: dict) -> dict:
    """The same tensors under the multimodal prefix, with towers of which nothing may be read."""
    moved = {"model.language_model." + k.removeprefix("model."): v for k, v in tensors.items()}
    towers = {f"model.{tower}.weight": torch.full((2, 2), float("nan"))
              for tower in ("vision_tower.encoder.x", "audio_tower.y", "embed_vision.z", "embed_audio.w")}
    return moved | towers


def multimodal_config() -> dict:
    return MULTIMODAL | {"text_config": text_fields(tiny_config()), "vision_config": {"unread": 1}}


def load(path, dtype=torch.float32):
    return load_text_model(str(path), dtype=dtype, device="cpu")


def is_complete(model) -> bool:
    return all(not t.is_meta and not t.isnan().any() for t in (*model.parameters(), *model.buffers()))


def test_a_text_only_checkpoint_gives_the_logits_of_the_model_it_was_saved_from(tmp_path):
    model = tiny_model()
    loaded = load(write(tmp_path, tensors_of(model)))
    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=0, atol=0)
    assert is_complete(loaded.model) and not loaded.model.training
    assert loaded.skipped == {}
    assert loaded.geometry == ModelGeometry.from_config(model.config)
    assert loaded.tokenizer is None


def test_what_transformers_itself_saves_is_loaded_alike(tmp_path):
    model = tiny_model(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    fake_tokenizer().save_pretrained(tmp_path)
    loaded = load(tmp_path, torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    torch.testing.assert_close(logits(loaded.model), logits(theirs), rtol=0, atol=0)
    assert loaded.tokenizer("hello").input_ids == fake_tokenizer()("hello").input_ids
    assert loaded.tokenizer.chat_template == fake_tokenizer().chat_template


@pytest.mark.parametrize("shared_kv", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_both_prefixes_with_and_without_shared_kv_give_the_same_model(tmp_path, shared_kv, wrapped):
    model = tiny_model()
    tensors = tensors_of(model) | (dead_shared_kv(model) if shared_kv else {})
    path = write(tmp_path, multimodal(tensors), multimodal_config()) if wrapped else write(tmp_path, tensors)
    loaded = load(path)
    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=0, atol=0)
    assert is_complete(loaded.model)
    assert loaded.skipped == ({"shared_kv": 6} if shared_kv else {}) | ({"towers": 4} if wrapped else {})
    assert isinstance(loaded.model, Gemma4ForCausalLM)
    assert loaded.geometry.placeholder_ids == ({60, 61, 62} if wrapped else frozenset())
    # an engine built from the model alone still knows which ids to refuse
    assert ModelGeometry.from_config(loaded.model.config) == loaded.geometry


def test_a_config_written_by_transformers_for_the_multimodal_class_is_read(tmp_path):
    model = tiny_model()
    config = json.loads(Gemma4Config(text_config=tiny_config().to_dict()).to_json_string())
    loaded = load(write(tmp_path, multimodal(tensors_of(model)), config, architectures=MULTIMODAL["architectures"]))
    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=0, atol=0)


def test_a_sharded_checkpoint_is_read_from_its_index(tmp_path):
    model = tiny_model()
    tensors = tensors_of(model)
    names = sorted(tensors)
    where = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    write(tmp_path, tensors)
    (tmp_path / "model.safetensors").unlink()
    for shard in set(where.values()):
        save_file({n: tensors[n] for n in names if where[n] == shard}, tmp_path / shard)
    (tmp_path / hf.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    torch.testing.assert_close(logits(load(tmp_path).model), logits(model), rtol=0, atol=0)

    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00002\.safetensors"):
        load(tmp_path)


def test_a_bf16_load_keeps_the_rotary_tables_in_fp32_and_right(tmp_path):
    model = tiny_model()
    loaded = load(write(tmp_path, tensors_of(model)), torch.bfloat16).model
    fresh = dict(tiny_model().model.rotary_emb.named_buffers())
    tables = dict(loaded.model.rotary_emb.named_buffers())
    assert tables.keys() == fresh.keys()
    for name, table in tables.items():
        assert table.dtype == torch.float32
        torch.testing.assert_close(table, fresh[name], rtol=0, atol=0)
    full = 1e6 ** (-2 * torch.arange(4, dtype=torch.float64) / 32)        # a quarter of 32 dims turns: 4 pairs of 16
    torch.testing.assert_close(tables["full_attention_inv_freq"][:4].double(), full, rtol=1e-6, atol=0)
    assert not tables["full_attention_inv_freq"][4:].any()
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert {layer.layer_scalar.dtype for layer in loaded.model.layers} == {torch.bfloat16}
    assert loaded.model.embed_tokens.embed_scale.item() == torch.tensor(48 ** 0.5).bfloat16().item()
    assert torch.get_default_dtype() == torch.float32


def test_a_bf16_checkpoint_in_fp32_has_the_unrounded_embedding_scale(tmp_path):
    loaded = load(write(tmp_path, tensors_of(tiny_model(dtype=torch.bfloat16)))).model
    assert loaded.model.embed_tokens.embed_scale.item() == pytest.approx(48 ** 0.5, rel=1e-7)
    assert {t.dtype for t in (*loaded.parameters(), *loaded.buffers())} == {torch.float32}


def test_layer_scalars_are_the_checkpoints(tmp_path):
    loaded = load(write(tmp_path, tensors_of(tiny_model()))).model
    torch.testing.assert_close(torch.cat([la.layer_scalar for la in loaded.model.layers]), torch.linspace(0.5, 1.3, 6))


def test_the_tied_head_is_one_tensor_and_a_copy_of_it_in_the_file_is_not_read(tmp_path):
    model = tiny_model()
    tensors = tensors_of(model)
    loaded = load(write(tmp_path, tensors | {"lm_head.weight": model.lm_head.weight.detach().clone()}))
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert loaded.skipped == {"tied_head": 1}
    with pytest.raises(CheckpointError, match="differs from the embedding"):
        load(write(tmp_path, tensors | {"lm_head.weight": model.lm_head.weight.detach() + 1}))


def test_an_untied_head_is_loaded_and_required(tmp_path):
    model = tiny_model(tie_word_embeddings=False)
    tensors = tensors_of(model)
    head = {"lm_head.weight": model.lm_head.weight.detach().clone()}
    loaded = load(write(tmp_path, tensors | head, tie_word_embeddings=False)).model
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0)
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        load(write(tmp_path, tensors, tie_word_embeddings=False))


@pytest.mark.parametrize("missing", [
    "model.layers.2.self_attn.k_proj.weight", "model.layers.3.self_attn.k_norm.weight", "model.layers.5.layer_scalar",
    "model.embed_tokens_per_layer.weight", "model.norm.weight", "model.layers.4.self_attn.q_proj.weight"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_missing_tensor_is_named_before_anything_is_allocated(tmp_path, monkeypatch, missing, wrapped):
    tensors = tensors_of(tiny_model())
    del tensors[missing]
    path = write(tmp_path, multimodal(tensors), multimodal_config()) if wrapped else write(tmp_path, tensors)
    monkeypatch.setattr(hf, "materialize", lambda *_: pytest.fail("allocated before the check"))
    with pytest.raises(CheckpointError, match=f"lacks {missing}"):
        load(path)


def test_surplus_and_doubled_text_tensors_are_named(tmp_path):
    tensors = tensors_of(tiny_model())
    with pytest.raises(CheckpointError, match=r"holds model\.layers\.2\.self_attn\.sinks"):
        load(write(tmp_path, tensors | {"model.layers.2.self_attn.sinks": torch.ones(4)}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.6\.self_attn\.k_proj\.weight"):
        load(write(tmp_path, tensors | {"model.layers.6.self_attn.k_proj.weight": torch.ones(4)}))
    with pytest.raises(CheckpointError, match=r"holds model\.norm\.weight"):
        load(write(tmp_path, tensors | {"model.language_model.norm.weight": torch.ones(48)}))


def test_a_wrong_shape_or_an_integer_tensor_is_named(tmp_path):
    tensors = tensors_of(tiny_model())
    name = "model.layers.4.mlp.gate_proj.weight"
    with pytest.raises(CheckpointError, match=rf"{name}.*\[32, 48\].*\[64, 48\]"):
        load(write(tmp_path, tensors | {name: torch.ones(32, 48)}))
    with pytest.raises(CheckpointError, match=f"{name}.*U8"):
        load(write(tmp_path, tensors | {name: torch.ones(64, 48, dtype=torch.uint8)}))


@pytest.mark.parametrize(("changed", "named"), [
    ({"enable_moe_block": True}, "enable_moe_block"), ({"use_bidirectional_attention": "all"}, "bidirectional"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"), ({"architectures": ["LlamaForCausalLM"]}, "Llama")])
def test_a_model_it_does_not_compute_is_refused_before_any_weight_is_read(tmp_path, changed, named):
    path = write(tmp_path, {"x": torch.ones(1)}, **changed)
    (path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=named):
        load(path)


def test_a_quantised_checkpoint_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"quantised.*quantization_config"):
        load(write(tmp_path, tensors_of(tiny_model()), quantization_config={"quant_method": "bitsandbytes"}))


def test_the_stop_set_is_the_union_of_config_generation_config_and_tokenizer(tmp_path):
    path = write(tmp_path, multimodal(tensors_of(tiny_model())), multimodal_config())
    assert load(path).stop_ids == {1, 7}
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 9], "top_k": 64, "do_sample": True}))
    tokenizer = fake_tokenizer()
    tokenizer.eos_token = "e"
    tokenizer.save_pretrained(path)
    loaded = load(path)
    assert loaded.stop_ids == {1, 7, 9, tokenizer.convert_tokens_to_ids("e")}
    assert set(loaded.model.generation_config.eos_token_id) == loaded.stop_ids
    assert loaded.model.generation_config.top_k == 64


def test_an_end_token_that_is_unknown_to_the_vocabulary_stops_nothing(tmp_path):
    tokenizer = fake_tokenizer()
    tokenizer.eos_token = "<unk>"
    path = write(tmp_path, tensors_of(tiny_model()))
    tokenizer.save_pretrained(path)
    assert load(path).stop_ids == {1}


def test_a_tokenizer_with_listed_extra_special_tokens_is_read(tmp_path):
    path = write(tmp_path, tensors_of(tiny_model()))
    fake_tokenizer().save_pretrained(path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"extra_special_tokens": ["e", "f"]}))
    assert {"e", "f"} <= set(load(path).tokenizer.all_special_tokens)


@pytest.mark.parametrize(("name", "said"), [
    ("tinny", "tiny, synthetic:E2B"), ("./nowhere", "no directory"), ("/no/such/place", "no directory"),
    ("", "no directory")])
def test_a_name_that_leads_nowhere_is_answered_with_the_names_that_work(name, said):
    with pytest.raises(CheckpointError, match=said):
        load(name)


def test_files_that_are_no_checkpoint_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        load(tmp_path)
    path = write(tmp_path, tensors_of(tiny_model()))
    with pytest.raises(CheckpointError, match="is a file"):
        load(path / "model.safetensors")
    (path / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load(path)
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load(path)
    (path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        load(path)


def test_a_hub_id_is_judged_by_its_config_before_its_weights_are_fetched(tmp_path, monkeypatch):
    path = write(tmp_path, tensors_of(tiny_model()))
    fetched = []

    def fake_download(name, *, allow_patterns):
        fetched.append((name, "config.json" in allow_patterns))
        return str(path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fake_download)
    loaded = load("someone/a-model")
    assert loaded.source == "someone/a-model" and len(fetched) == 2
    fetched.clear()
    with pytest.raises(UnsupportedModelError, match="published E2B geometry"):
        load("unsloth/gemma-4-E2B-it")
    assert fetched == [("unsloth/gemma-4-E2B-it", True)]


def test_a_hub_id_that_cannot_be_had_is_answered_with_the_names_that_work(monkeypatch):
    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(CheckpointError, match=r"could not be had from the hub.*tiny, synthetic:E2B"):
        load("unsloth/gemma-4-E2B-it")


@pytest.mark.parametrize("version", ["4.57.0", "5.5.1", "5.5.0.dev0"])
def test_too_old_a_transformers_is_one_line_that_says_what_to_install(monkeypatch, version):
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(CheckpointError, match=r"needs transformers 5\.5\.2.*pip install") as caught:
        load("tiny")
    assert version in str(caught.value) and "\n" not in str(caught.value)


def test_no_tensor_is_read_twice_and_towers_never(tmp_path, monkeypatch):
    read = []
    real_open = hf.open_tensors

    class Recorder:
        def __init__(self, path):
            self.inner = real_open(path)

        def __enter__(self):
            self.opened = self.inner.__enter__()
            return self

        def __exit__(self, *what):
            return self.inner.__exit__(*what)

        def __getattr__(self, name):
            return getattr(self.opened, name)

        def get_tensor(self, name):
            read.append(name)
            return self.opened.get_tensor(name)

    monkeypatch.setattr(hf, "open_tensors", Recorder)
    path = write(tmp_path, multimodal(tensors_of(tiny_model()) | dead_shared_kv(None)), multimodal_config())
    load(path)
    wanted = {n for n in load_file(path / "model.safetensors") if "language_model" in n}
    assert len(read) == len(set(read))
    assert set(read) == {n for n in wanted if not hf.SHARED_KV.match(n.replace("language_model.", ""))
                         or int(n.split(".")[3]) < 4}
