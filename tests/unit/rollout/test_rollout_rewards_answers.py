"""Rewards that look for an answer in a text: what counts as said, and what does not."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cosmos_rollout import (
    BoxedMathReward,
    Gsm8kReward,
    MathReward,
    MultipleChoiceReward,
    RewardError,
    RewardInput,
)

CHOICE, GSM8K = MultipleChoiceReward(), Gsm8kReward()
FLEXIBLE = Gsm8kReward(method="flexible")


def sample(response: str, answer: str) -> RewardInput:
    return RewardInput(prompt="p", response=response, answer=answer)


@pytest.mark.parametrize(
    ("config", "response", "answer", "value"),
    [
        (CHOICE, "B", "B", 1.0),
        (CHOICE, "(B).", "B", 1.0),
        (CHOICE, "B) because", "B", 1.0),
        (CHOICE, "The answer is (C), not the answer: D. Final answer: **B**", "B", 1.0),  # last
        (CHOICE, r"answer is A, so \boxed{B}", "B", 1.0),  # a box goes before words
        (CHOICE, r"\boxed{\text{B}}", "(B)", 1.0),
        (CHOICE, r"\boxed{\mathbf{(B)}}", "B", 1.0),
        (CHOICE, "**Answer:** B", "B", 1.0),
        (CHOICE, r"The answer is $\textbf{B}$", "B", 1.0),
        (CHOICE, r"**The answer is**: \(B\)", "B", 1.0),
        (CHOICE, "<answer> B </answer> A word more", "B", 1.0),
        (CHOICE, "**B.** Paris", "B", 1.0),
        (CHOICE, "The answer is B. Option A is wrong, as choice C is.", "B", 1.0),  # not an option
        (CHOICE, "Not option A, but option B", "B", 1.0),
        (CHOICE, "Because B is wrong, A", "A", 0.0),  # nothing marks it as the answer
        (CHOICE, "the answer is a matter of taste", "A", 0.0),  # no letter of its own
        (CHOICE, "answer: Because", "B", 0.0),  # a word, not a letter
        (CHOICE, "The answer is B. That is the answer I am sure of", "B", 1.0),  # no option I
        (CHOICE, "Option B is the option I'd take", "B", 1.0),
        (CHOICE, "Answer: I think that it cannot be told", "I", 0.0),
        (CHOICE, "The answer is I because option I is shorter. Answer: I", "I", 1.0),
        (CHOICE, "(B) Paris", "B", 1.0),
        (CHOICE, "**(B) Paris**\nA) was the capital once", "B", 1.0),
        (CHOICE, "(A) is wrong; (C) is right", "A", 0.0),
        (CHOICE, "A) Paris is wrong.\nB) London is right.", "A", 0.0),  # it lists the options
        (CHOICE, r"\boxed{\text{(B)}\ Paris}", "B", 1.0),
        (CHOICE, "Answer\uff1aB", "B", 1.0),
        (CHOICE, "\uff08B\uff09", "B", 1.0),
        (CHOICE, "\u6b63\u786e\u7b54\u6848\u662f B\u3002", "B", 1.0),
        (CHOICE, "So the answer must be B", "B", 1.0),
        (CHOICE, "The correct answer is therefore **B**", "B", 1.0),
        (CHOICE, "The answer is option B. Option A is wrong.", "B", 1.0),
        (CHOICE, "The answer is option B. Option A is wrong.", "A", 0.0),
        (CHOICE, "Answer: B\n\nThe answer A is wrong, since it rains.", "B", 1.0),
        (CHOICE, "## Answer\n\n**B**", "B", 1.0),
        (CHOICE, "I take answer B", "B", 1.0),
        (CHOICE, "The answer is not B.", "B", 0.0),
        (CHOICE, "The answer must be A. It cannot be option B", "B", 0.0),
        (CHOICE, "b", "B", 1.0),
        (CHOICE, r"\boxed{b}", "b", 1.0),  # many data sets have small letters
        (CHOICE, "The answer is (b).", "B", 1.0),
        (CHOICE, "**Answer:** c) Paris", "C", 1.0),
        (CHOICE, "So the answer is option b\nas it rains", "B", 1.0),
        (CHOICE, "(a) Paris\n(b) London", "A", 0.0),  # it lists the options
        (CHOICE, "The answer is e.g. Paris, or a city like it", "E", 0.0),
        (CHOICE, "The answer is B, and not, as in question a, the answer a.", "B", 1.0),  # capitals
        (MultipleChoiceReward(letters="AB"), "answer: C", "A", 0.0),  # no such letter
        (GSM8K, "2+2 #### 4", "4", 1.0),
        (GSM8K, "#### 1 no, #### $1,234.00", "1234", 1.0),  # the last mark
        (GSM8K, "#### -3", "#### -3", 1.0),
        (GSM8K, "#### 3", "... so 72/2 = 36\n#### 36", 0.0),
        (GSM8K, "36", "... so 72/2 = 36\n#### 36", 0.0),  # strict: no mark
        (FLEXIBLE, "72 / 2 = 36.", "36", 1.0),
        (FLEXIBLE, "#### 35 or 36", "36", 0.0),  # what is marked counts
        (FLEXIBLE, "none", "36", 0.0),
        (MathReward(), r"It is $\frac{1}{2}$.", "0.5", 1.0),
        (MathReward(), r"It is $x^2+2x+1$", "$(x+1)^2$", 1.0),
        (MathReward(), "It is 7", "8", 0.0),
        (MathReward(), r"It is $2\sqrt{3}$", r"2\sqrt{3}", 1.0),  # a bare answer counts whole
        (MathReward(), r"\boxed{2}", "2x", 0.0),
        (MathReward(), r"\boxed{(1,2)}", "(1, 2)", 1.0),
        (MathReward(), r"\boxed{1}", "y = 2x + 1", 0.0),
        (MathReward(), r"\boxed{10!}", "10!", 1.0),
        (MathReward(), r"\boxed{x=3}", r"x = 3 \text{ or so}", 1.0),
        (MathReward(), r"\boxed{36}", "72/2 = 36\n#### 36", 1.0),  # one in words by its number
        (MathReward(), r"\boxed{36}", "The area is 36 square units", 1.0),
        (BoxedMathReward(), r"\boxed{36}", "The area is 36 square units", 1.0),
        (BoxedMathReward(), r"\boxed{5}", r"\[5\]", 1.0),
        (BoxedMathReward(), r"\boxed{\text{no solution}}", "no solution", 1.0),
        (BoxedMathReward(), r"\boxed {7}", "7", 1.0),
        (BoxedMathReward(), r"so $\fbox{\frac{1}{2}}$", "0.5", 1.0),
        (BoxedMathReward(), r"$\boxed 12$, as said.", "12", 1.0),
        (BoxedMathReward(), r"it is \boxed 12.", "12", 1.0),
        (BoxedMathReward(), r"\boxed{3} and \boxed", "3", 1.0),
        (GSM8K, "#### \u22125", "-5", 1.0),
        (FLEXIBLE, "It takes 3-5 days", "5", 1.0),
        (FLEXIBLE, "10-5", "-5", 0.0),
        (FLEXIBLE, "that makes -5", "-5", 1.0),
        (FLEXIBLE, "(-5)", "-5", 1.0),
    ],
)
def test_what_counts_as_the_answer(config, response, answer, value):
    assert config.build()(sample(response, answer)) == value


@pytest.mark.parametrize("marks", ["*", "_ ", "$", " \n"])
def test_a_response_of_nothing_but_marks_is_read_at_once(marks):
    begun = time.monotonic()
    assert CHOICE.build()(sample("answer" + marks * 20_000, "B")) == 0.0
    assert time.monotonic() - begun < 5.0


@pytest.mark.parametrize(
    ("config", "answer", "words"),
    [
        (CHOICE, "yes", "the answer 'yes' is no letter of ABCDEFGHIJ"),
        (GSM8K, "many", "the answer 'many' has no number"),
    ],
)
def test_a_data_row_that_no_response_could_match_is_an_error_and_not_a_zero(config, answer, words):
    with pytest.raises(RewardError, match=words):
        config.build()(sample("B #### 1", answer))


def test_letters_are_capitals():
    with pytest.raises(ValueError, match="capital letters, found 'abc'"):
        MultipleChoiceReward(letters="abc")


@pytest.mark.parametrize("config", [MathReward(), BoxedMathReward()])
def test_a_tower_of_powers_is_given_up_before_it_holds_up_a_worker(config):
    reward = config.build()
    before = time.process_time()
    assert reward(sample(r"\boxed{9^{9^{9^{9}}}}", "4")) == 0.0
    assert time.process_time() - before < 4.0  # two seconds; math-verify's own limit is five


@pytest.mark.parametrize("config", [MathReward(), BoxedMathReward()])
def test_mathematics_in_a_thread_is_sent_to_the_pool(config):
    function = config.build()
    assert function(sample(r"\boxed{4}", "4")) == 1.0
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(function, sample(r"\boxed{4}", "4"))
        with pytest.raises(RewardError, match="use RewardPool"):
            asked.result()


@pytest.mark.parametrize("config", [MathReward(), BoxedMathReward()])
@pytest.mark.parametrize(
    ("boxed", "answer", "value"),
    [
        ("3 1/2", "3.5", 1.0),
        ("3 1/2", "2", 0.0),  # three less one, as math-verify has it
        ("3.5", "3 1/2 hours", 1.0),
        ("-3 1/2", "-3.5", 1.0),
        (r"x^2 1/2", "x^2/2", 1.0),
        (r"12\,345", "12345", 1.0),
        (r"12\,345", "357", 0.0),
        ("12 345", "12345", 1.0),
        (r"2\,\text{cm}", "2", 1.0),
        (r"(1,\ 200)", "(1, 200)", 1.0),
        (r"0.\overline{27}", r"0.\overline{72}", 0.0),
        (r"\frac{8}{11}", r"0.\overline{72}", 1.0),
        (r"0.1\overline{6}", "1/6", 1.0),
        (r"0.\overline{3}", "0", 0.0),
        (r"33\frac{2}{3}\%", r"33\frac13\%", 0.0),
        (r"33\frac{1}{3}\%", r"\frac{100}{3}", 1.0),
        ("1.5e3", "1500", 1.0),
        ("1500", "1.5e+3", 1.0),
        ("2e - 3", "2e-3", 1.0),  # Euler's number
        (r"3 1/2 \text{ and } " + "9" * 5000 + " 1/2", "3.5", 0.0),
    ],
)
def test_numbers_are_read_as_people_write_them(config, boxed, answer, value):
    assert config.build()(sample(rf"It is $\boxed{{{boxed}}}$.", answer)) == value


def test_numbers_in_words_are_read_as_people_write_them():
    score = MathReward().build()
    assert score(sample("The answer is 3 1/2.", "3.5")) == 1.0
    assert score(sample("The answer is 3 1/2.", "0.5")) == 0.0
    assert score(sample("The answer is 1.5e3.", "1500")) == 1.0
    assert score(sample(r"So $x = 1\,000$", "1000")) == 1.0
    assert score(sample("In 2019 300", "300")) == 1.0


def test_an_answer_that_is_no_text_is_told():
    with pytest.raises(RewardError, match='7 is of int; it has to be a text: "7"'):
        GSM8K.build()(RewardInput(prompt="p", response="#### 7", answer=7))
