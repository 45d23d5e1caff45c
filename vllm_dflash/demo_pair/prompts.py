# SPDX-License-Identifier: Apache-2.0
"""Short prompts of mixed kinds, written for this package, for demos and quick checks (not a benchmark).

Acceptance differs by kind: text that the prompt already holds (copy, translation, code with a pattern) is guessed well, free
prose badly. A demo should show both.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """One user turn and the kind of text that it asks for: chat, code, maths, list or copy."""

    kind: str
    text: str


PROMPTS = tuple(
    DemoPrompt(kind, text)
    for kind, texts in (
        (
            "chat",
            (
                "Why does bread smell so good while it bakes?",
                "My neighbour plays the drums at night. How do I bring it up politely?",
                "Explain what a tide is to a child who has never seen the sea.",
                "What should I look at first when I buy a used bicycle?",
                "Write two sentences that could open a story about a lighthouse.",
                "Is it better to learn an instrument alone or with a teacher?",
            ),
        ),
        (
            "code",
            (
                "Write a Python function that counts the vowels in a string.",
                "Write a Python class Stack with push, pop and is_empty.",
                "Show me a loop in Python that prints the numbers 1 to 20 and marks multiples of three.",
                "Write a SQL query for the five customers who ordered most often.",
                "Turn this into a list comprehension: squares = []; for n in range(10): squares.append(n * n)",
                "Write a shell command that finds all text files larger than one megabyte.",
            ),
        ),
        (
            "maths",
            (
                "A train covers 180 km in 2 hours and 15 minutes. What is its average speed?",
                "I have 3 boxes with 14 pencils each and give away 9 pencils. How many are left?",
                "What is 17 percent of 250? Show each step.",
                "The sides of a rectangle are 7 cm and 12 cm. Compute its area and its perimeter.",
                "Write out the multiplication table of 7, from 7 x 1 to 7 x 10.",
            ),
        ),
        (
            "list",
            (
                "List the months of the year with the number of days in each.",
                "Give me ten names for a grey cat, one per line.",
                "List the planets of the solar system, starting at the sun.",
                "What are five things to pack for a day in the mountains?",
                "Name eight European capitals together with their countries.",
            ),
        ),
        (
            "copy",
            (
                "Repeat this sentence three times: The quick river runs past the old stone mill.",
                "Translate to French: Good morning, where is the railway station?",
                "Correct the spelling and change nothing else: Teh wether was realy nice yesturday.",
                "Write this in capital letters: please close the door behind you",
                "Sort these words by the alphabet: pear, apple, cherry, banana, fig, date.",
                'Write this as JSON with the keys name, age and city: "Mara is 34 years old and lives in Lisbon."',
            ),
        ),
    )
    for text in texts
)
