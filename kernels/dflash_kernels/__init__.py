# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of a DFlash draft step; needs torch and triton only, nothing of vLLM.

| op (module of the same name) | what it does in one launch, or a few |
| --- | --- |
| `query_block` | every integer of a draft step: ids, positions, slots, lengths, sampling positions, for all draft KV groups |
| `context_kv` | context K and V of all draft layers: norm, RoPE, scales, paged store |
| `query_kv` | query rows of one draft layer: norm and RoPE of Q and K, paged store of K and V |
| `draft_budget` | the most likely drafts of a batch, as many as are to be verified, and the batch's layout then |
| `page_list` | pages of all requests in one list, for FlashInfer inside a CUDA graph |
| `block_attention` | attention of the query rows over the paged cache |
| `draft_head` | greedy draft tokens from the LM head; up to 64 rows without logits in memory |
| `draft_head_fp8` | the same from a private copy of some of its rows in fp8, mapped back to target ids |
| `fp8_linear` | product of up to 64 rows with fp8 weights, read once, scales and rounding of activations inside |

`reference` has a torch oracle of each, with the same signature.
"""
