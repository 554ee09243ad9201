"""Word problems in arithmetic with worked answers, in the manner of GSM8K."""

from __future__ import annotations

from typing import NamedTuple

from thalweg.common.checks import check_integer
from thalweg.common.random import RNGLike, as_generator

NAMES = ("Tom", "Anna", "Ben", "Maria", "Omar", "Lucy", "Wei", "Ravi")
THINGS = ("pens", "apples", "books", "coins", "cards", "eggs", "stamps", "cups")


class WordProblem(NamedTuple):
    """A question and its worked answer, which ends in ``#### number``."""

    question: str
    answer: str


def word_problems(n: int, rng: RNGLike = None) -> list[WordProblem]:
    """Return n problems with one or two steps, drawn with replacement from about 10⁶.

    Examples
    --------
    >>> for part in word_problems(1, 1)[0]:
    ...     print(part)
    Omar has 68 stamps and loses 11. How many stamps?
    68 - 11 = 57. #### 57
    """
    check_integer("n", n, at_least=1)
    stream = as_generator(rng)
    problems = []
    for _ in range(n):
        kind = int(stream.integers(4))
        name, things = stream.choice(NAMES), stream.choice(THINGS)
        many, more = (int(x) for x in stream.integers(10, 60, 2))
        boxes, each = (int(x) for x in stream.integers(2, 13, 2))
        ask = f"How many {things}?"
        product = boxes * each
        problems.append(
            [
                WordProblem(
                    f"{name} has {many} {things} and finds {more} more. {ask}",
                    f"{many} + {more} = {many + more}. #### {many + more}",
                ),
                WordProblem(
                    f"{name} has {many + more} {things} and loses {more}. {ask}",
                    f"{many + more} - {more} = {many}. #### {many}",
                ),
                WordProblem(
                    f"{name} has {boxes} boxes with {each} {things} each. {ask}",
                    f"{boxes} * {each} = {product}. #### {product}",
                ),
                WordProblem(
                    f"{name} has {boxes} boxes with {each} {things} each and finds {more} more. "
                    f"{ask}",
                    f"{boxes} * {each} = {product}. {product} + {more} = {product + more}. "
                    f"#### {product + more}",
                ),
            ][kind]
        )
    return problems
