"""The program that runs PyTorch's tests tells what passes, what is refused and what is wrong, on a file of ours."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "fsdp2_of_torch.py"
FILE = """
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch.testing._internal.common_fsdp import FSDPTest, FSDPTestMultiThread


class TestOurs(FSDPTest):
    @property
    def world_size(self) -> int:
        return 2

    @skip_if_lt_x_gpu(2)
    def test_gathers(self):
        torch.manual_seed(0)
        model = nn.Linear(16, 16)
        reference = copy.deepcopy(model)
        fully_shard(model)
        x = torch.randn(4, 16)
        self.assertEqual(model(x), reference(x))

    def test_computes_in_16_bits(self):
        torch.manual_seed(0)
        model = nn.Linear(16, 16)
        reference = copy.deepcopy(model)
        computing = copy.deepcopy(reference).to(torch.bfloat16)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        x = torch.randn(4, 16, dtype=torch.bfloat16)
        for _ in range(2):
            self.assertEqual(model(x), computing(x))
            for param, values in zip(computing.parameters(), reference.parameters()):
                param.detach().copy_(values)

    def test_needs_a_card(self):
        torch.cuda.get_device_name()

    def test_reshards_to_fewer(self):
        model = nn.Linear(16, 16)
        fully_shard(model, reshard_after_forward=1)
        model(torch.randn(4, 16))

    def test_takes_plain_weights_alone(self):
        self.assertEqual(type(nn.Linear(4, 4).weight), nn.Parameter)


class TestOurThreads(FSDPTestMultiThread):
    @property
    def world_size(self) -> int:
        return 2

    def test_gathered_weights_are_whole(self):
        torch.manual_seed(0)
        model = nn.Linear(16, 16)
        for param in model.parameters():
            dist.broadcast(param, src=0)
        reference = copy.deepcopy(model)
        fully_shard(model)
        model.unshard()
        for one, other in zip(reference.parameters(), model.parameters()):
            self.assertEqual(one, other)
            self.assertEqual(other, one)
"""


@pytest.mark.skipif(find_spec("expecttest") is None, reason="needs expecttest: pip install expecttest")
def test_a_table_of_what_torch_tests(tmp_path: Path) -> None:
    (tmp_path / "ours.py").write_text(FILE)
    command = [
        sys.executable,
        str(PROGRAM),
        str(tmp_path / "ours.py"),
        "--modes",
        "fp8_block quantized,fp8_square4 cast",
        "--exact",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    rows = {
        line.split()[0].partition(".")[2]: line.split()[1:] for line in done.stdout.splitlines() if "  Test" in line
    }
    assert rows["test_gathers"] == ["pass", "pass", "pass"], done.stdout
    assert rows["test_computes_in_16_bits"] == ["pass", "pass", "pass"], done.stdout
    assert rows["test_gathered_weights_are_whole"] == ["pass", "pass", "pass"], done.stdout
    assert rows["test_needs_a_card"][0] == "fail"
    assert rows["test_takes_plain_weights_alone"] == ["pass", "fail", "fail"]
    assert rows["test_reshards_to_fewer"] == ["pass", "pass", "pass"]
    assert "Not run plain on CPUs: 1\n" in done.stdout
    assert "Wrong: 2\n" in done.stdout
    assert done.returncode == 1
