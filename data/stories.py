"""Stories: an endless supply of plain English whose every choice, and so whose entropy, is known.

A story says who has what among sentences that do not matter, then asks about some of the people:

    Ann has a silver sled. The road was long. Hal has a tan kite. [...] Hal? A tan kite. Ann? A silver sled.

Only a model that ties each thing to its owner and looks it up can answer: the paper's multi-needle
retrieval in plain words. Every choice is uniform and can be read off the text again, so that -log p
of a story is the sum of log(number of options), and no model can have a lower loss in the long run.
Standard library only; `random.Random(seed).random()` is the one sequence that Python promises to keep.
"""

import math
import random
import re
from dataclasses import dataclass

# Within a list, no two words begin with the same letter: a model that spells knows the word by its first.
NAMES = "Ann Ben Cal Dan Eva Fay Gus Hal".split()
COLOURS = "red blue green white pink yellow silver tan".split()
THINGS = "kite drum boat lamp ring fork vase hat coin sled map jug".split()
SCENES = """The wind was cold.|It was late.|A bell rang.|Rain fell on the roof.
The road was long.|A dog barked.|Snow lay deep.|The door was open.""".replace("\n", "|").split("|")
FACT = "{} has a {} {}."
SIGHTING = "{} saw a {} {}."
QUESTION = "{}? A {} {}."

ANSWER = r"\? A ([^.]*)\."  # group 1 is what an answer is scored on
VALUE = re.compile(rf"\b({'|'.join(COLOURS)}) ({'|'.join(THINGS)})\b")
ALPHABET = "\n" + "".join([*NAMES, *COLOURS, *THINGS, *SCENES, FACT, SIGHTING, QUESTION]).replace("{}", "")


@dataclass(frozen=True)
class Difficulty:
    """What a story holds. All counts are exact, not averages."""

    people: int = 3  # each with a thing of their own
    distractors: int = 2  # sentences about nothing
    sightings: int = 0  # sentences in which somebody saw a thing, which is no answer
    restatements: int = 0  # facts said a second time, after all of them were said
    questions: int = 4  # each about one of the people, drawn anew
    train_stories: int = 60000
    val_stories: int = 1000

    def check(self):
        """Raises ValueError with one sentence: the field, its value, the nearest legal value."""
        highest = {"people": min(len(NAMES), len(THINGS))}
        for name in ("people", "distractors", "sightings", "restatements", "questions"):
            value, low, high = getattr(self, name), int(name in ("people", "questions")), highest.get(name, 99)
            if not low <= value <= high:
                raise ValueError(f"{name}={value} must be from {low} to {high}: use {min(max(value, low), high)}")


class Teller:
    """Draws the choices of one story and adds up their -log p."""

    def __init__(self, uniform):
        self.uniform, self.nats = uniform, 0.0

    def choose(self, options):
        self.nats += math.log(len(options))
        return options[int(self.uniform() * len(options))]

    def take(self, options):
        """Chooses, and leaves the choice out from now on."""
        options.remove(chosen := self.choose(options))
        return chosen


def generate(difficulty, seed, count):
    """Yields (story, nats): the text, ending in a newline, and its -log p. The same on every Python."""
    d, uniform = difficulty, random.Random(seed).random
    for _ in range(count):
        t = Teller(uniform)
        names, things = list(NAMES), list(THINGS)
        facts = [(t.take(names), t.choose(COLOURS), t.take(things)) for _ in range(d.people)]
        untold, sentences = iter(facts), []
        kinds = ["fact"] * d.people + ["distractor"] * d.distractors + ["sighting"] * d.sightings
        while kinds:
            kind = kinds[int(uniform() * len(kinds))]
            t.nats += math.log(len(kinds) / kinds.count(kind))  # not all of `choose`: which of its like is no choice
            kinds.remove(kind)
            if kind == "fact":
                sentences.append(FACT.format(*next(untold)))
            elif kind == "distractor":
                sentences.append(t.choose(SCENES))
            else:
                sentences.append(SIGHTING.format(t.choose(NAMES), t.choose(COLOURS), t.choose(THINGS)))
        sentences += [FACT.format(*t.choose(facts)) for _ in range(d.restatements)]
        sentences += [QUESTION.format(*t.choose(facts)) for _ in range(d.questions)]
        yield " ".join(sentences) + "\n", t.nats


def expected(difficulty):
    """(nats, characters) of a story on average, exactly."""
    d = difficulty
    kinds = (d.people, d.distractors, d.sightings)
    retold = d.restatements + d.questions
    nats = math.log(math.perm(len(NAMES), d.people) * math.perm(len(THINGS), d.people) * len(COLOURS) ** d.people)
    nats += math.log(math.factorial(sum(kinds)) / math.prod(map(math.factorial, kinds)))  # the order of the kinds
    nats += d.distractors * math.log(len(SCENES)) + retold * math.log(d.people)
    nats += d.sightings * math.log(len(NAMES) * len(COLOURS) * len(THINGS))

    # A word is uniform over its list however it was drawn, so lengths add up by their means.
    fact, sighting, question = (
        len(template.replace("{}", "")) + sum(sum(map(len, words)) / len(words) for words in (NAMES, COLOURS, THINGS))
        for template in (FACT, SIGHTING, QUESTION)
    )
    scene = sum(map(len, SCENES)) / len(SCENES)
    length = (
        (d.people + d.restatements) * fact + d.sightings * sighting + d.distractors * scene + d.questions * question
    )
    return nats, length + sum(kinds) + retold  # and after each sentence a space or the newline


def guesses(texts):
    """How often answers are right that look nothing up, over the questions of some stories: {guess: share}.

    "any": one of the things mentioned so far, at random. "last": the one mentioned last. "most frequent": the one
    mentioned most often, the latest of several. The text before a question includes the answers before it.
    """
    right, asked = dict.fromkeys(("any", "last", "most frequent"), 0.0), 0
    for text in texts:
        for answer in re.finditer(ANSWER, text):
            said = [" ".join(value) for value in VALUE.findall(text[: answer.start()])]
            asked += 1
            right["any"] += (answer[1] in said) / len(set(said))
            right["last"] += answer[1] == said[-1]
            right["most frequent"] += answer[1] == max(reversed(said), key=said.count)
    return {guess: n / max(1, asked) for guess, n in right.items()}
