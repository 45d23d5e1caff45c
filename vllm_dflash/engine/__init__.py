# SPDX-License-Identifier: Apache-2.0
"""What runs inside vLLM: the speculator (Model Runner V2), the proposer (V1 runner), the draft network and its attention."""
