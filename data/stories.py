"""Stories: an endless supply of plain English whose every choice, and so whose entropy, is known.

A story says who does what among sentences that do not matter, then asks about some of the people:

    Ann mends maps. The road was long. Hal paints kites. [...] And Hal? Hal paints kites. And Ann? Ann mends maps.

Only a model that ties each deed to its doer and looks it up can answer: the paper's multi-needle
retrieval in plain words. Every choice is uniform and can be read off the text again, so that -log p
of a story is the sum of log(number of options), and no model can have a lower loss in the long run.
Standard library only; `random.Random(seed).random()` is the one sequence that Python promises to keep.
"""

import math
import random
import re
from dataclasses import dataclass

NAMES = "Ann Ben Cal Dan Eva Fay Gus Hal Ida Jim Kit Lee".split()
VERBS = "buys carves draws finds hides keeps lends mends paints rents sells wants".split()
THINGS = "axes boats coins drums fans hats jugs kites lamps maps nets pens rings sleds toys vases".split()
SCENES = """The wind was cold.|It was late.|A bell rang.|Rain fell on the roof.
The road was long.|A dog barked.|Snow lay deep.|The door was open.""".replace("\n", "|").split("|")
FACT = "{0} {1} {2}."
DENIAL = "Nobody {0} {1}."
QUESTION = "And {0}? {0} {1} {2}."

ANSWER = r"\? \w+ ([^.]*)\."  # group 1 is what an answer is scored on
VALUE = re.compile(rf"\b({'|'.join(VERBS)}) ({'|'.join(THINGS)})\b")


def words(text):
    """Words and marks, each with the space before it; a new line. Each is a token of the stories' tokenizer."""
    return re.findall(r" ?\w+| ?[^\w\s]|\n", text)


SENTENCES = [*SCENES, *(re.sub(r" ?\{.\}", "", template) for template in (DENIAL, QUESTION)), *NAMES, *VERBS, *THINGS]
VOCABULARY = sorted({word for sentence in SENTENCES for space in ("", " ") for word in words(space + sentence)})


@dataclass(frozen=True)
class Difficulty:
    """What a story holds. But for the people, all counts are exact, not averages."""

    people: int = 12  # at most, each with something they do
    fewest: int = 2  # people; how many there are is drawn for each story
    distractors: int = 3  # sentences about nothing
    denials: int = 2  # sentences about what nobody does, which is no answer
    restatements: int = 0  # facts said a second time, after all of them were said
    questions: int = 6  # each about one of the people, drawn anew
    train_stories: int = 100000
    val_stories: int = 1000

    def check(self):
        """Raises ValueError with one sentence: the field, its value, the nearest legal value."""
        bounds = {
            "people": (1, min(map(len, (NAMES, VERBS, THINGS)))),
            "fewest": (1, self.people),
            "questions": (1, 99),
        }
        for name in ("people", "fewest", "distractors", "denials", "restatements", "questions"):
            value, (low, high) = getattr(self, name), bounds.get(name, (0, 99))
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
        people = t.choose(range(d.fewest, d.people + 1))
        names, verbs, things = list(NAMES), list(VERBS), list(THINGS)
        facts = [(t.take(names), t.take(verbs), t.take(things)) for _ in range(people)]
        untold, sentences = iter(facts), []
        kinds = ["fact"] * people + ["distractor"] * d.distractors + ["denial"] * d.denials
        while kinds:
            kind = kinds[int(uniform() * len(kinds))]
            t.nats += math.log(len(kinds) / kinds.count(kind))  # not all of `choose`: which of its like is no choice
            kinds.remove(kind)
            if kind == "fact":
                sentences.append(FACT.format(*next(untold)))
            elif kind == "distractor":
                sentences.append(t.choose(SCENES))
            else:
                sentences.append(DENIAL.format(t.choose(VERBS), t.choose(THINGS)))
        sentences += [FACT.format(*t.choose(facts)) for _ in range(d.restatements)]
        sentences += [QUESTION.format(*t.choose(facts)) for _ in range(d.questions)]
        yield " ".join(sentences) + "\n", t.nats


def expected(difficulty):
    """(nats, tokens) of a story on average, exactly."""
    d, told = difficulty, []
    retold = d.restatements + d.questions
    fact, denial, question = (len(words(template.format(*"abc"))) for template in (FACT, DENIAL, QUESTION))
    scene = sum(len(words(sentence)) for sentence in SCENES) / len(SCENES)
    for people in range(d.fewest, d.people + 1):
        kinds = (people, d.distractors, d.denials)
        nats = math.log(d.people + 1 - d.fewest)
        nats += sum(math.log(math.perm(len(options), people)) for options in (NAMES, VERBS, THINGS))
        nats += math.log(math.factorial(sum(kinds)) / math.prod(map(math.factorial, kinds)))  # the order of the kinds
        nats += d.distractors * math.log(len(SCENES)) + d.denials * math.log(len(VERBS) * len(THINGS))
        nats += retold * math.log(people)
        tokens = (people + d.restatements) * fact + d.denials * denial + d.distractors * scene + d.questions * question
        told.append((nats, tokens + 1))  # the newline
    return tuple(sum(numbers) / len(told) for numbers in zip(*told))


def guesses(texts):
    """How often answers are right that look nothing up, over the questions of some stories: {guess: share}.

    "any": one of the deeds mentioned so far, at random. "last": the one mentioned last. "most frequent": the one
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
