# SPDX-License-Identifier: Apache-2.0
"""The compiler half: compiles for no target."""

from triton.backends.compiler import BaseBackend


class InterpreterBackend(BaseBackend):
    """Refuses every target; interpreted kernels never ask."""

    @staticmethod
    def supports_target(target):  # noqa: ARG004  # the name is part of the interface
        return False


InterpreterBackend.__abstractmethods__ = frozenset()
