"""Which integers the products of processors without VNNI take, and how many numbers of rows a layer keeps.

The engine computes with them in test_vllm_*.py.
"""

import os
import subprocess
import sys

import pytest
import torch

from models.engines.vllm.patches import linear_kernels


def test_weights_that_this_processor_would_saturate_are_refused() -> None:
    linear_kernels.require_unsaturated(torch.tensor([[63, -63]], dtype=torch.int8))
    with pytest.raises(ValueError, match=r"weights go up to 128, .* beyond 63; .*weight_bits = 7"):
        linear_kernels.require_unsaturated(torch.tensor([[63, -128]], dtype=torch.int8))


# Prints a line of oneDNN's own for each product that is prepared, and one between two rounds of 100 numbers of rows.
ROUNDS = """
import torch
import vllm._C
from vllm import _custom_ops as ops
from models.engines.vllm.patches import linear_kernels
linear_kernels.install()
layer = ops.create_onednn_mm(torch.randn(64, 64).t(), 32)  # as many as vLLM asks for
for _ in range(2):
    print("a round begins", flush=True)
    for num in range(1, 101):
        ops.onednn_mm(layer, torch.randn(num, 64), None)
"""


@pytest.mark.engine
def test_a_layer_keeps_what_it_prepared_for_each_number_of_rows() -> None:
    environment = {**os.environ, "ONEDNN_VERBOSE": "profile_create"}
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    _, first, second = (part.count(",create:") for part in done.stdout.split("a round begins"))
    assert first >= 100
    assert second == 0
