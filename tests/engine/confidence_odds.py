# SPDX-License-Identifier: Apache-2.0
"""Odds against the winners of whole logits, as the fused head delivers them."""

import torch


def odds_of(logits, temperatures):
    from dflash_kernels import reference
    from dflash_kernels.draft_head import Temperatures

    eye = torch.eye(logits.shape[1])
    return reference.draft_head(logits, eye, temperatures=Temperatures(*temperatures)).against
