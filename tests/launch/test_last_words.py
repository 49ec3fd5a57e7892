"""What a process prints before it ends badly is held back, and nothing else is for long."""

import traceback

from windlass.launch.last_words import AT_ONCE_SECONDS, HOLD_SECONDS, LINES_MAX, LastWords

TRACEBACK = ["Traceback (most recent call last):", '  File "train.py", line 7, in <module>', "KeyError: 'that one'"]


def fed(words: LastWords, lines: list[str], at: float = 0.0) -> list[str]:
    """What is passed on of lines that come at once."""
    return [out for line in lines for out in words.add(line, at)]


def test_what_is_no_traceback_is_passed_on_at_once():
    words = LastWords()
    lines = ["epoch 1", "", "  indented", "ERROR of its own", "Traceback is a word"]
    assert fed(words, lines) == lines
    assert words.due() is None


def test_a_traceback_is_held_and_its_exception_named():
    words = LastWords()
    assert fed(words, ["epoch 1", *TRACEBACK]) == ["epoch 1"]
    assert words.error == "KeyError: 'that one'"
    assert words.take() == TRACEBACK
    assert words.take() == []
    assert fed(words, ["epoch 2"]) == ["epoch 2"]


def test_chained_exceptions_are_one_and_the_last_one_names_them():
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("two\nlines") from error
    except ValueError:
        lines = traceback.format_exc().splitlines()
    words = LastWords()
    assert fed(words, lines) == []
    assert words.error == "ValueError: two"
    assert words.take() == lines


def test_a_mistake_in_syntax_and_a_group_are_tracebacks_too():
    words = LastWords()
    lines = ['  File "train.py", line 1', "    def", "       ^", "SyntaxError: invalid syntax"]
    assert fed(words, lines) == []
    assert (words.error, words.take()) == (lines[-1], lines)
    try:
        raise ExceptionGroup("several", [KeyError("one"), ValueError("two")])
    except ExceptionGroup:
        lines = traceback.format_exc().splitlines()
    assert fed(words, lines) == []
    assert words.take() == lines


def test_who_logs_an_exception_and_goes_on_is_heard_in_order():
    words = LastWords()
    assert fed(words, TRACEBACK, 10.0) == []
    assert fed(words, ["epoch 2"], 10.0 + 2 * AT_ONCE_SECONDS) == [*TRACEBACK, "epoch 2"]
    assert words.due() is None


def test_who_logs_an_exception_and_is_quiet_is_heard_in_time():
    words = LastWords()
    fed(words, TRACEBACK, 10.0)
    assert words.due() == 10.0 + HOLD_SECONDS
    assert words.expire(10.0 + HOLD_SECONDS / 2) == []
    assert words.expire(10.0 + HOLD_SECONDS) == TRACEBACK
    assert words.due() is None


def test_what_follows_a_traceback_at_once_belongs_to_it():
    words = LastWords()
    lines = [*TRACEBACK, "a second line of its message", "sys:1: ResourceWarning"]
    assert fed(words, lines) == []
    assert (words.error, words.take()) == (TRACEBACK[-1], lines)


def test_a_traceback_without_an_end_is_passed_on():
    words = LastWords()
    lines = ["Traceback (most recent call last):", *["  more"] * LINES_MAX]
    assert fed(words, lines) == lines


def test_of_a_server_its_errors_are_held():
    words = LastWords(is_server=True)
    assert fed(words, ["WARNING of something", "ERROR allow: no such module"]) == ["WARNING of something"]
    assert words.error == "allow: no such module"
    assert words.take() == ["ERROR allow: no such module"]
