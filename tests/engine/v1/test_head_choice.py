# SPDX-License-Identifier: Apache-2.0
"""Which draft head is taken, on times as an H200 and as other GPUs would give them."""

from types import SimpleNamespace

import pytest

from vllm_dflash.engine.head_choice import HeadTimes, choose_head, expected_loss, gain, head_share

# A head of 152 thousand rows at hidden size 4096: 16 bit, fp8, fp8 with 33 thousand rows; 16 and 1024 sample rows.
H200 = [HeadTimes(16, 320, 170, 50), HeadTimes(1024, 1900, 1000, 230)]


@pytest.mark.parametrize(
    ("times", "share", "loss", "chosen"),
    [
        (H200, 0.07, 0.005, "small"),  # 6 % of a step for half a percent of acceptance
        (H200, 0.07, 0.06, "every"),  # a bad list
        (H200, 0.07, None, "every"),  # a list that nothing is known about
        ([HeadTimes(16, 320, 170), HeadTimes(1024, 1900, 1000)], 0.07, 0.005, "every"),  # no list
        (H200, 0.01, 0.005, "every"),  # a 70B target: the head hardly counts
        (H200, 0.25, 0.06, "small"),  # a 1B target: it counts much
        ([HeadTimes(16, 320, 318, 300), HeadTimes(1024, 1900, 1890, 1800)], 0.07, 0.0, "full"),  # no fp8 products here
        ([HeadTimes(16, 320, 318, 60), HeadTimes(1024, 1900, 1890, 400)], 0.07, 0.0, "small"),  # and rows that count
    ],
)
def test_the_head_with_the_most_tokens_per_second(times, share, loss, chosen):
    """Breaks if time is weighed without acceptance, acceptance without time, or noise decides."""
    assert choose_head(times, share, loss) == chosen


def test_gain_is_tokens_per_second_over_those_of_the_full_head():
    """A step of 1000 us, 200 of them the head: one that takes 50 us and costs a tenth of the tokens."""
    assert gain(0.25, 0.2, 0.1) == pytest.approx(0.9 / 0.85)


def test_the_expected_loss_grows_with_what_is_missing_and_with_the_width():
    """Breaks if full coverage costs anything, or a wide block, which a missing token cuts more from, does not lose more."""
    assert expected_loss(1.0, 7) == 0
    assert 0 < expected_loss(0.99, 7) < expected_loss(0.95, 7) < expected_loss(0.95, 15) < 1
    assert expected_loss(0.95, 7, guests=True) < 0.5 * expected_loss(0.95, 7)


def test_the_share_of_the_head_is_that_of_its_weights():
    """An 8B shape: 0.62e9 of some 9e9 weights; breaks if the head of a rank is compared with the layers of all."""

    def sizes(layers):
        return SimpleNamespace(get_hidden_size=lambda: 4096, get_total_num_hidden_layers=lambda: layers)

    config = SimpleNamespace(model_config=sizes(36), speculative_config=SimpleNamespace(draft_model_config=sizes(5)))
    assert head_share(config, 151_936) == pytest.approx(0.065, abs=0.005)
