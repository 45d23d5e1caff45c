# SPDX-License-Identifier: Apache-2.0
"""Test-only Triton backend named "cpu", which vLLM's CPU build looks for before it turns Triton on.

With TRITON_INTERPRET=1 nothing is ever compiled, so the backend can be empty. Put `tests/shim` on PYTHONPATH for that one
process; never install it: without the interpreter vLLM would drop its C++ kernels and find no active driver.
"""
