# SPDX-License-Identifier: Apache-2.0
"""Options of the plugin: what is refused, in which words, and what they make of a draft's reach."""

import dataclasses
from types import SimpleNamespace

import pytest
from draft_configs import zlab
from hypothesis import given
from hypothesis import strategies as st

from vllm_dflash.checkpoint import parse_draft_config
from vllm_dflash.context_limits import frees_memory, longest_context, rotary_rows, trained_length, windowed
from vllm_dflash.options import SECTION, OptionsError, PluginOptions, read_options

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}


class TestReading:
    """From vLLM's additional_config to options."""

    REFUSED = (
        ({"draft_window": 0}, "draft_window: found 0; expected tokens, or null, at least 1"),
        ({"draft_window": True}, "draft_window: found True"),
        ({"draft_window": 10.5}, "draft_window: found 10.5"),
        ({"draft_max_context": "8k"}, "draft_max_context: found '8k'"),
        ({"draft_window_frees_memory": 1}, "draft_window_frees_memory: found 1; expected true, false, null"),
        ({"watchdog": "off"}, "watchdog: found 'off'; expected true, false"),
        ({"draft_wndow": 4}, "unknown option 'draft_wndow'; known are .*Did you mean 'draft_window'"),
        ({"zzz": 4}, "unknown option 'zzz'; known are .*Remove it"),
        ([("draft_window", 4)], "found list; expected an object"),
        (None, "found NoneType; expected an object"),
    )

    @pytest.mark.parametrize(("section", "message"), REFUSED)
    def test_what_is_wrong_is_named(self, section, message):
        """Breaks when a mistyped option or value is taken silently: the output would be right all the same."""
        with pytest.raises(OptionsError, match=message):
            read_options({SECTION: section})

    @pytest.mark.parametrize("config", [{}, {"other": {"draft_window": -1}}, SimpleNamespace(vllm_dflash=1), None])
    def test_what_is_not_ours_is_left_alone(self, config):
        """Breaks when another plugin's configuration stops the engine."""
        assert read_options(config) == PluginOptions()
        assert read_options(config).given() == {}

    @given(st.dictionaries(st.sampled_from([field.name for field in dataclasses.fields(PluginOptions)]), st.none() | st.integers()
                           | st.text() | st.floats() | st.booleans() | st.lists(st.integers())))  # fmt: skip
    def test_any_value_is_read_or_refused(self, section):
        """Breaks when a value ends in a TypeError instead of a sentence."""
        try:
            given = read_options({SECTION: section}).given()
        except OptionsError:
            return
        assert given.items() <= section.items()


class TestReach:
    """How far a draft looks back, and up to which context it drafts."""

    @pytest.mark.parametrize(
        ("changes", "target", "asked", "limit"),
        [
            ({}, 40960, None, None),  # as long as the target: no limit
            ({}, 32768, None, None),
            ({}, 65536, None, 40960 - 16),  # the block of 16 lies inside the trained length
            ({}, 65536, 60000, 60000),  # a default rotary table grows
            ({}, 65536, 100, 100),
            ({"rope_parameters": YARN}, 131072, None, None),
            ({"rope_parameters": YARN}, 262144, None, 131072 - 16),
            ({"rope_parameters": YARN}, 262144, 200000, 131072 - 16),  # a scaled one does not
            ({"rope_parameters": YARN}, 131072, 1000, 1000),
            ({"sample_from_anchor": True}, 65536, None, 40960 - 15),
            ({"max_position_embeddings": 8}, 65536, None, 0),
        ],
    )
    def test_longest_context(self, changes, target, asked, limit):
        """Breaks when a draft is asked beyond its rotary table, or stopped before its end."""
        assert longest_context(parse_draft_config(zlab(**changes)), 15, target, asked) == limit

    @pytest.mark.parametrize(("kind", "length"), [("linear", 81920), ("dynamic", 81920), ("default", 40960)])
    def test_trained_length(self, kind, length):
        """Breaks when a stretched rotary embedding is taken for a short one."""
        rope = {"rope_type": kind, "rope_theta": 1e6, **({} if kind == "default" else {"factor": 2.0})}
        assert trained_length(parse_draft_config(zlab(rope_parameters=rope))) == length

    @pytest.mark.parametrize(("rope", "rows"), [({}, 65536), ({"rope_parameters": YARN}, 40960)])
    def test_rows_of_the_rotary_table(self, rope, rows):
        """Breaks when a length that vLLM has raised reaches a rotary embedding whose frequencies follow from it."""
        assert rotary_rows(parse_draft_config(zlab(**rope)), 65536) == rows

    def test_the_window_narrows_full_layers_only(self):
        """Breaks when a window that the checkpoint was trained with is overruled, or causality changes with it."""
        types = ["full_attention", "sliding_attention"] * 2 + ["full_attention"]
        draft = parse_draft_config(zlab(layer_types=types, sliding_window=2048))
        layers = windowed(draft, PluginOptions(draft_window=4096), 36).layers
        assert [layer.window for layer in layers] == [4096, 2048, 4096, 2048, 4096]
        assert [layer.causal for layer in layers] == [layer.causal for layer in draft.layers]
        assert [layer.frees for layer in layers] == [False, True, False, True, False]
        assert windowed(draft, PluginOptions(), 36) is draft

    @pytest.mark.parametrize(
        ("target", "draft", "frees"),
        [(36, 5, False), (8, 5, True), (6, 5, True), (5, 5, True), (10, 5, True), (11, 5, False), (3, 0, False)],
    )
    def test_memory_is_freed_where_it_costs_few_groups(self, target, draft, frees):
        """Breaks when an 8B target's cache is cut into eight groups for a draft of five layers."""
        assert frees_memory(target, draft) is frees
