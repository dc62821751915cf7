from __future__ import annotations

import pytest

from gemma4_flex.bench import roofline
from tests.bench.stub import AsyncDevice, geometry


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
