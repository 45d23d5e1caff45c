# SPDX-License-Identifier: Apache-2.0
"""Prompts that are given as embeddings have no token ids; vLLM's V1 proposers look one up all the same."""

from collections.abc import Mapping
from typing import Any

NO_ID = 0
"""Stands in for an unknown id: any id of the vocabulary will do, as no row that drafts reads it."""


class EmbeddedPrompts:
    """Mixin before ``SpecDecodeBaseProposer``: its ``prepare_next_token_ids_padded`` no longer ends the engine for them."""

    def prepare_next_token_ids_padded(
        self, sampled_token_ids: Any, requests: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """As in the base class. The id that it looks up is used by requests in mid-prefill only, and these draft nothing."""
        base: Any = super()
        return base.prepare_next_token_ids_padded(sampled_token_ids, _KnownIds(requests), *args, **kwargs)


class _KnownIds:
    """The runner's requests by name, with an id for every position."""

    def __init__(self, requests: Mapping[str, Any]) -> None:
        self._requests = requests

    def __getitem__(self, name: str) -> Any:
        request = self._requests[name]
        return request if request.prompt_token_ids is not None else _Embedded(request)


class _Embedded:
    def __init__(self, request: Any) -> None:
        self._request = request

    def get_token_id(self, index: int) -> int:
        """The id at ``index`` where there is one: behind the prompt."""
        known: int = self._request.get_token_id(index) if index >= self._request.num_prompt_tokens else NO_ID
        return known
