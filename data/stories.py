"""Stories: an endless supply of plain English whose every choice, and so whose entropy, is known.

A story says who has what among sentences that do not matter, then asks about some of the people:

    A bell rang. Will has a grey kite. Ben has a brown sled. What does Will have? A grey kite.

Only a model that ties each thing to its owner and looks it up can answer: the paper's multi-needle
retrieval in plain words. Every choice is uniform and can be read off the text again, so that -log p
of a story is the sum of log(number of options), and no model can have a lower loss in the long run.
Standard library only; `random.Random(seed).random()` is the one sequence that Python promises to keep.
"""

import math
import random
from dataclasses import dataclass

NAMES = (
    "Ann Ben Cleo Dan Eva Finn Gus Hana Ivo Joy Kai Lea Max Nora Otto Pia Quin Rosa Sam Tess Uma Vera Will Yara".split()
)
COLOURS = "red blue green black white brown pink grey".split()
THINGS = "kite drum boat lamp book ring coin doll fork sled vase hat".split()
SCENES = """The wind was cold.|It was late.|A bell rang.|Rain fell on the roof.
The road was long.|A dog barked.|Snow lay deep.|The door was open.""".replace("\n", "|").split("|")
FACT, SAW, QUESTION = "{} has a {} {}.", "{} saw a {} {}.", "What does {} have? A {} {}."

FACT_PATTERN = r"(\w+) has a (\w+ \w+)\."
QUESTION_PATTERN = r"What does (\w+) have\? A (\w+ \w+)\."
ANSWER = r"\? A ([^.]*)\."  # group 1 is what an answer is scored on
ALPHABET = "\n" + "".join([*NAMES, *COLOURS, *THINGS, *SCENES, FACT, SAW, QUESTION]).replace("{}", "")


@dataclass(frozen=True)
class Difficulty:
    """What a story holds. All counts are exact, not averages."""

    people: int = 2  # each with a thing of their own
    scenes: int = 1  # sentences about nothing
    sightings: int = 0  # sentences in which somebody saw a thing, which the questions are not about
    questions: int = 2  # each about another person
    train_stories: int = 40000
    val_stories: int = 1000

    def check(self):
        """Raises ValueError with one sentence: the field, its value, the nearest legal value."""
        most = min(len(NAMES), len(THINGS))
        for name, low, high in (
            ("people", 1, most),
            ("scenes", 0, 99),
            ("sightings", 0, 99),
            ("questions", 1, self.people),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name}={value} must be from {low} to {high}: use {min(max(value, low), high)}")


class Teller:
    """Draws the choices of one story and adds up their -log p."""

    def __init__(self, random):
        self.random, self.nats = random, 0.0

    def choose(self, options):
        self.nats += math.log(len(options))
        return options[int(self.random() * len(options))]

    def take(self, options):
        """Chooses, and leaves the choice out from now on."""
        options.remove(chosen := self.choose(options))
        return chosen


def generate(difficulty, seed, count):
    """Yields (story, nats): the text, ending in a newline, and its -log p. The same on every Python."""
    d, uniform = difficulty, random.Random(seed).random
    for _ in range(count):
        t = Teller(uniform)
        names, colours, things = list(NAMES), list(COLOURS), list(THINGS)
        facts = [(t.take(names), t.choose(colours), t.take(things)) for _ in range(d.people)]
        told = iter(facts)
        sentences = []
        kinds = ["fact"] * d.people + ["scene"] * d.scenes + ["sighting"] * d.sightings
        while kinds:
            kind = kinds.pop(int(uniform() * len(kinds)))
            # p is the share of this kind among what is left, over which of its like it was
            t.nats += math.log((len(kinds) + 1) / (kinds.count(kind) + 1))
            if kind == "fact":
                sentences.append(FACT.format(*next(told)))
            elif kind == "scene":
                sentences.append(t.choose(SCENES))
            else:
                sentences.append(SAW.format(t.choose(NAMES), t.choose(COLOURS), t.choose(THINGS)))
        left = list(facts)
        sentences += [QUESTION.format(*t.take(left)) for _ in range(d.questions)]
        yield " ".join(sentences) + "\n", t.nats


def expected(difficulty):
    """(nats, characters) of a story on average, exactly: each choice is uniform over its list, taken from it or not."""
    d = difficulty
    take = lambda n, k: sum(math.log(n - i) for i in range(k))  # noqa: E731
    mean = lambda words: sum(map(len, words)) / len(words)  # noqa: E731
    name, colour, thing = mean(NAMES), mean(COLOURS), mean(THINGS)
    blank = lambda template: len(template) - 2 * template.count("{}")  # noqa: E731
    sentences = d.people + d.scenes + d.sightings
    nats = take(len(NAMES), d.people) + d.people * math.log(len(COLOURS)) + take(len(THINGS), d.people)
    nats += math.log(math.factorial(sentences) / math.prod(map(math.factorial, (d.people, d.scenes, d.sightings))))
    nats += d.scenes * math.log(len(SCENES))
    nats += d.sightings * (math.log(len(NAMES)) + math.log(len(COLOURS)) + math.log(len(THINGS)))
    nats += take(d.people, d.questions)
    fact = name + colour + thing
    length = d.people * (fact + blank(FACT)) + d.sightings * (fact + blank(SAW)) + d.scenes * mean(SCENES)
    length += d.questions * (fact + blank(QUESTION)) + sentences + d.questions  # spaces, and the newline
    return nats, length
