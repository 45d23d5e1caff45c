# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-dflash`. Only typer and rich are imported at module level, so that `--help` is instant.

=================  =======================================================================
`app`              the commands, put together
`demo`             three arms and the reference side by side on the demo pair
`generate`         stream an answer, accepted drafts marked
`doctor`           what works here and what does not (`probes`: facts, `pair_probes`: models)
`serve`            an OpenAI server for CPUs, where `vllm serve` does not start
`engine_run`       one engine in a process of its own, driven by JSON lines (`engine_child`: its other end)
`engine_measure`   what a benchmark asks of that engine (`engine_meter`: draft steps, `engine_answers`: requests)
`models`           names and folders -> checked pair; `machine`: CPU or not; `failure`: one sentence, exit code 1
=================  =======================================================================
"""
