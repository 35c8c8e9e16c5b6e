"""The one error meant for people."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the person can put right: what was found, and exactly one thing to do about it."""

    def __init__(self, message: str, hint: str):
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.add_note(f"hint: {hint}")  # for those who call from Python


def suggest(word: str, known: Iterable[str]) -> str:
    """` Did you mean ...?` for a word that nearly is a known one, else nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean `{near[0]}`?" if near else ""
