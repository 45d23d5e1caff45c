# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash bench`: engines side by side, taking turns, so that a machine that drifts drifts for all of them.

arms.py what is compared · prompts.py, vllm_sets.py what they answer · loads.py how many, how long · rounds.py the turns ·
figures.py, ties.py what follows from them · study.py one list of loads, from warm-up to table · command.py all of it
"""
