# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash bench`: engines side by side, taking turns, so that a machine that drifts drifts for all of them.

arms.py what is compared · prompts.py what they answer · rounds.py the turns · figures.py what follows from them
"""
