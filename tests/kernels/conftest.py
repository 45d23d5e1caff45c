# SPDX-License-Identifier: Apache-2.0
"""Kernel tests run compiled on a CUDA device and through Triton's interpreter everywhere else: same tests, same inputs."""

import os
import sys
from pathlib import Path

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Triton decides at import whether its functions compile, so this must come before anything imports it.
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError(
            "triton was imported without TRITON_INTERPRET=1 before tests/kernels: run them in a process of their own "
            "(python -m pytest tests/kernels) or set TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"

# A bare checkout (a GPU machine without an install) finds the package too.
sys.path.insert(0, str(Path(__file__).parents[2] / "kernels"))


def round_to_nearest():
    """Have Triton's interpreter narrow floats as compiled code does: to nearest, and to the largest finite fp8 number.

    Its own casts truncate to bf16, which doubles the error of a store, and lose the carry to fp8 (1.96 becomes 1.0).
    """
    import triton.language as tl
    from triton.runtime import interpreter

    types = {
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
    convert = interpreter._convert_float

    def convert_float(data, source, target, rounding_mode):
        if {source, target} - types.keys() or source.primitive_bitwidth <= target.primitive_bitwidth:
            return convert(data, source, target, rounding_mode)
        values = torch.frombuffer(bytearray(data.tobytes()), dtype=types[source]).float()
        if target.primitive_bitwidth == 8:
            largest = torch.finfo(types[target]).max
            values = values.clamp(-largest, largest)
        bits = values.to(types[target]).view(torch.uint8).numpy()
        return bits.view(f"uint{target.primitive_bitwidth}").reshape(data.shape)

    interpreter._convert_float = convert_float


if not HAS_CUDA:
    round_to_nearest()


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")  # for runs without the project's configuration


def pytest_collection_modifyitems(items):
    """Compiled, these are GPU tests: `-m gpu` selects them on a machine with a device."""
    if HAS_CUDA:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker("gpu")


@pytest.fixture(scope="session")
def device():
    """The device that the kernels run on."""
    return torch.device("cuda" if HAS_CUDA else "cpu")


@pytest.fixture
def assert_accurate():
    """Checks a kernel's error against fp64 to be at most twice that of plain torch in the same dtype."""

    def check(kernel_out, torch_out, truth):
        truth = truth.double()
        kernel_error = (kernel_out.double() - truth).norm().item()
        torch_error = (torch_out.double() - truth).norm().item()
        # Where plain torch happens to be exact, a few fp32 roundings of the whole tensor are still allowed.
        allowed = 2 * torch_error + 4 * torch.finfo(torch.float32).eps * truth.norm().item()
        assert kernel_error <= allowed, f"error {kernel_error:.3e}, allowed {allowed:.3e} (plain torch {torch_error:.3e})"

    return check


@pytest.fixture
def compile_counter():
    """Returns a function giving the number of kernels that Triton compiled since the test began."""
    import triton

    compiled = []
    runtime = triton.knobs.runtime
    previous = runtime.jit_post_compile_hook
    # The hook is called for each compilation or load from the disk cache: both stall a step.
    runtime.jit_post_compile_hook = lambda *args, **kwargs: compiled.append(kwargs.get("repr") or args)
    yield lambda: len(compiled)
    runtime.jit_post_compile_hook = previous
