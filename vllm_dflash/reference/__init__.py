# SPDX-License-Identifier: Apache-2.0
"""The whole algorithm in plain PyTorch and transformers: the truth that the engine is tested against.

Module       what it is
-----------  -------------------------------------------------------------------
`model`      the draft network and its context cache
`sampling`   acceptance rules and sampling filters
`decode`     the draft-verify-accept loop, plain decoding, teacher-forced blocks
"""
