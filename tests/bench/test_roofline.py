from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gemma4_flex.bench import roofline
from gemma4_flex.geometry import ModelGeometry
from tests.bench.stub import AsyncDevice, geometry
from tests.tiny import tiny_model


def floor(lengths, steps, bytes_per_s=1e9):
    return roofline.decode_floor(geometry(), lengths, steps=steps, bytes_per_element=4, bytes_per_s=bytes_per_s)


def test_the_floor_is_the_bytes_each_step_reads_over_the_bandwidth():
    shape, lengths = geometry(), [(10, 4), (3, 6)]
    # step by step: the first token comes from the prefill, each later one from a step that sees all tokens before it
    kv = sum(shape.kv_cache_bytes(prompt + j, 4) for prompt, output in lengths for j in range(1, output))
    found = floor(lengths, steps=5)
    assert found.kv_bytes == kv
    assert found.seconds == (5 * shape.step_weight_bytes(4) + kv) / 1e9
    assert found.ms_per_step == pytest.approx(1e3 * found.seconds / 5)


def test_weight_bytes_that_are_told_stand_in_for_the_formula():
    found = roofline.decode_floor(geometry(), [(10, 4)], steps=3, bytes_per_element=2, bytes_per_s=1e9, weight_bytes=777)
    assert found.weight_bytes == 777 and found.seconds == (3 * 777 + found.kv_bytes) / 1e9
    assert found.kv_bytes == floor([(10, 4)], steps=3).kv_bytes / 2      # keys and values keep their own width


def test_sliding_layers_are_in_view_up_to_their_window_only():
    shape = geometry()
    per_token = shape.kv_bytes_per_token(4)
    near, far = floor([(100, 2)], 1), floor([(101, 2)], 1)
    assert far.kv_bytes - near.kv_bytes == per_token["full_attention"]
    assert near.kv_bytes == 4 * per_token["sliding_attention"] + 101 * per_token["full_attention"]


def test_a_request_of_one_token_adds_nothing_to_the_floor():
    assert floor([(7, 1), (9, 0)], steps=0).kv_bytes == 0
    assert floor([(7, 1)], steps=0).ms_per_step is None


def test_the_fraction_is_of_the_floor_and_there_is_none_without_a_decode():
    found = floor([(10, 4)], steps=3)
    assert found.fraction(2 * found.seconds) == pytest.approx(0.5)
    assert found.fraction(0.0) is None


# ---- arithmetic


def rotary_flops(counted: dict) -> int:
    """Hugging Face makes the rotary angles by a matmul, which is no part of the model."""
    return sum(sum(ops.values()) for name, ops in counted.items() if name.endswith("rotary_emb"))


def test_a_prompt_of_one_token_takes_what_torch_counts_in_hugging_faces_forward():
    model = tiny_model(attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.tensor([[5]]))
    told = counter.get_total_flops() - rotary_flops(counter.get_flop_counts())
    assert roofline.prefill_flops(ModelGeometry.from_config(model.config), [1]) == told


def attention_flops(shape, layer, tokens: int) -> int:
    """Of one query that has `tokens` before it, itself included: a head's score and its sum, a key each."""
    return layer.num_heads * 2 * (2 * layer.head_dim) * min(tokens, layer.window or tokens)


def test_prefill_walks_owner_layers_for_every_token_and_the_rest_for_the_last_one_of_each_prompt():
    shape = geometry()
    one = roofline.prefill_flops(shape, [1])
    linear = one - sum(attention_flops(shape, layer, 1) for layer in shape.layers)
    weights = {}      # a layer's linears are what it adds to the model, twice over
    for layer in shape.layers:
        q, kv = layer.num_heads * layer.head_dim, 2 * layer.num_kv_heads * layer.head_dim * layer.owns_kv
        weights[layer.index] = shape.hidden_size * (2 * q + kv + 3 * layer.mlp_width + 3 * shape.ple_width)
    assert linear == 2 * (sum(weights.values()) + shape.vocab_size * shape.hidden_size)
    for tokens in (2, 4, 5, 40):      # the window is 4
        owners = [layer for layer in shape.layers if layer.owns_kv]
        expected = linear + 2 * (tokens - 1) * sum(weights[layer.index] for layer in owners)
        expected += sum(attention_flops(shape, layer, seen) for layer in owners for seen in range(1, tokens + 1))
        expected += sum(attention_flops(shape, layer, tokens) for layer in shape.layers if not layer.owns_kv)
        assert roofline.prefill_flops(shape, [tokens]) == expected
    assert roofline.prefill_flops(shape, [3, 1, 9]) == sum(roofline.prefill_flops(shape, [n]) for n in (3, 1, 9))


def test_a_decode_step_takes_every_layer_and_sees_what_is_in_view():
    shape = geometry()
    linear = roofline.prefill_flops(shape, [1]) - sum(attention_flops(shape, layer, 1) for layer in shape.layers)
    expected = sum(linear + sum(attention_flops(shape, layer, 3 + j) for layer in shape.layers) for j in range(1, 6))
    assert roofline.decode_flops(shape, [(3, 6), (50, 1), (9, 0)]) == expected
    assert floor([(3, 6)], steps=5).flops == expected


def test_prefills_floor_is_memory_for_a_few_tokens_and_arithmetic_for_many():
    shape = geometry()
    rates = {"bytes_per_element": 4, "bytes_per_s": 1e9, "flop_per_s": 1e10}
    few, many = roofline.prefill_floor(shape, [2], **rates), roofline.prefill_floor(shape, [2] * 100, **rates)
    assert few.bound == "memory" and few.seconds == (shape.step_weight_bytes(4) + shape.kv_cache_bytes(2, 4)) / 1e9
    assert many.bound == "arithmetic" and many.seconds == roofline.prefill_flops(shape, [2] * 100) / 1e10
    twice = roofline.prefill_floor(shape, [2], passes=2, **rates)
    assert twice.memory_s - few.memory_s == pytest.approx(shape.step_weight_bytes(4) / 1e9)


def test_a_floor_without_a_matmul_rate_is_memorys():
    assert floor([(10, 4)], steps=3).arithmetic_s == 0 and floor([(10, 4)], steps=3).bound == "memory"


# ---- rates


def test_bandwidth_counts_bytes_read_and_written_and_takes_the_best_pass():
    class Uneven(AsyncDevice):
        passes = iter([9.0, 4.0, 2.0, 8.0])      # a wait that ends a pass takes the next of these seconds
        def synchronize(self):
            if self.pending:
                self.now += next(self.passes)
            self.pending = not self.pending

    device = Uneven()
    device.pending = False
    found = roofline.copy_bandwidth(
        "cpu", buffer_bytes=1 << 20, repeats=4, synchronize=device.synchronize, clock=device.clock)
    assert found.bytes_per_s == 2 * (1 << 20) / 2.0


def test_the_bandwidth_of_this_machine_is_between_a_disks_and_a_fairy_tales():
    assert 1e8 < roofline.copy_bandwidth("cpu", buffer_bytes=16 << 20, repeats=3).bytes_per_s < 1e13


def test_a_matmul_counts_two_operations_a_product_and_takes_the_best_pass_of_the_best_size(monkeypatch):
    class Uneven(AsyncDevice):
        passes, pending = iter([9.0, 4.0, 8.0, 3.0, 2.0, 7.0]), False      # three of each size
        def synchronize(self):
            if self.pending:
                self.now += next(self.passes)
            self.pending = not self.pending

    device, seen = Uneven(), []
    real = torch.nn.functional.linear
    monkeypatch.setattr(roofline.F, "linear", lambda x, w: (seen.append((x.dtype, tuple(x.shape), tuple(w.shape))), real(x, w))[1])
    found = roofline.matmul_rate("cpu", "bfloat16", sizes=(16, 8), repeats=3, synchronize=device.synchronize, clock=device.clock)
    assert found.flop_per_s == max(2 * 16 ** 3 / 4.0, 2 * 8 ** 3 / 2.0) and found.dtype == "bfloat16"
    assert set(seen) == {(torch.bfloat16, (n, n), (n, n)) for n in (16, 8)}


def test_the_matmul_rate_of_this_machine_is_between_a_pocket_calculators_and_a_fairy_tales():
    assert 1e8 < roofline.matmul_rate("cpu", "float32", sizes=(256,), repeats=3).flop_per_s < 1e15
