# SPDX-License-Identifier: Apache-2.0
"""The driver half: active exactly when the interpreter is on."""

import os

from triton.backends.driver import DriverBase


class InterpreterDriver(DriverBase):
    """Answers what Triton and vLLM ask of an active driver without a device."""

    def __init__(self):
        super().__init__()

    @staticmethod
    def is_active():
        return os.environ.get("TRITON_INTERPRET") == "1"

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_benchmarker(self):
        from triton.testing import do_bench

        return do_bench


InterpreterDriver.__abstractmethods__ = frozenset()
