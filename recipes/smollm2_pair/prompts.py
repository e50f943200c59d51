"""Seeded instruction prompts: tasks × topics. The held-out prompts are about topics no training prompt names."""

from __future__ import annotations

import random
from collections.abc import Iterator

TOPICS = (
    "rainbows", "volcanoes", "the water cycle", "photosynthesis", "the solar system", "gravity", "electricity", "magnets",
    "the human heart", "vaccines", "sleep", "healthy breakfasts", "bread baking", "coffee", "gardening in spring", "bees",
    "elephants", "whales", "birds of prey", "house cats", "the French Revolution", "ancient Egypt", "the Roman Empire", "castles",
    "the printing press", "the steam engine", "railways", "bicycles", "sailing ships", "aeroplanes", "bridges", "skyscrapers",
    "public libraries", "teaching children to read", "learning a language", "job interviews", "saving money", "inflation",
    "small businesses", "online shopping", "software testing", "sorting algorithms", "databases", "computer networks",
    "Python lists", "web browsers", "robots", "solar panels", "wind power", "recycling", "rainforests", "deserts", "coral reefs",
    "rivers", "earthquakes", "the weather", "chess", "football", "running a marathon", "yoga", "jazz", "the piano",
    "oil painting", "photography", "poetry", "detective stories", "fairy tales", "the theatre", "travelling by train", "camping",
    "city parks", "family holidays", "moving house", "friendship", "honesty", "time management", "fractions", "probability",
    "triangles", "prime numbers",
)  # fmt: skip
HELD_OUT_TOPICS = (
    "glaciers", "the human eye", "dolphins", "the Silk Road", "lighthouses", "tea", "writing a letter", "version control",
    "electric cars", "forests in autumn", "tennis", "the violin", "museums", "learning to cook", "patience", "percentages",
)  # fmt: skip
TASKS = (
    "Explain {} to a child.",
    "Write a short paragraph about {}.",
    "Write a short story about {}.",
    "Write a poem about {}.",
    "Give me five facts about {}.",
    "List three advantages and three disadvantages of {}.",
    "What is the most surprising thing about {}?",
    "What are common mistakes people make about {}?",
    "Write a dialogue between a teacher and a student about {}.",
    "Write an email to a friend about {}.",
    "Plan a one-hour lesson about {}.",
    "Think step by step: why does {} matter in everyday life?",
    "Compare {} today with a hundred years ago.",
    "Write a quiz with four questions and answers about {}.",
    "How would you describe {} to someone who has never heard of it?",
    "Give step-by-step advice for a beginner interested in {}.",
    "Write a news report about {}.",
    "Describe how a scientist would study {}.",
    "Write the introduction of an essay on {}.",
    "Write a small Python program that has to do with {}, and explain it.",
)


def prompts(seed: int, *, held_out: bool = False) -> Iterator[str]:
    """Every pair of task and topic once, in an order drawn from ``seed``."""
    pairs = [(task, topic) for task in TASKS for topic in (HELD_OUT_TOPICS if held_out else TOPICS)]
    random.Random(seed).shuffle(pairs)
    for task, topic in pairs:
        yield task.format(topic)
