# SPDX-License-Identifier: Apache-2.0
"""A small target and a trained DFlash draft that fit on a laptop: what `vllm-dflash demo` and the tests run on.

Module       what it is
-----------  -------------------------------------------------------------------
`prepare`    `prepare()`: download, convert, unpack; returns the two folders
`gguf`       GGUF reader and conversion to a Hugging Face folder
`tokenizer`  the target's tokenizer, rebuilt from GGUF metadata
`compact`    int8 packing of the draft; `draft/` holds the packed draft
`prompts`    short prompts to try it with
"""
