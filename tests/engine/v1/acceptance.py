# SPDX-License-Identifier: Apache-2.0
"""The one assertion about acceptance: clean engines pass it, and faulty ones must not."""


def assert_acceptance(engine, prompts, max_tokens, *, least, answers=None):
    """Greedy answers to ``prompts``; an AssertionError if the acceptance length is below ``least``.

    ``answers`` that are known must be given again, whatever the acceptance: another answer raises a ValueError.
    """
    found, grown = engine.counted(lambda: engine.generate(prompts, max_tokens))
    if answers is not None and found != answers:
        raise ValueError("speculation changed the output")
    length = 1 + grown["num_accepted_tokens"] / grown["num_drafts"]
    assert length >= least, f"acceptance length {length:.3f}, expected at least {least}"
    return found
