"""Brings a prepared folder to where others find it."""

from aiter_prep.publication.card import default_branch
from aiter_prep.publication.run import CARDS, Pushed, check_folder, check_place, open_place, push

__all__ = [
    "CARDS",
    "Pushed",
    "check_folder",
    "check_place",
    "default_branch",
    "open_place",
    "push",
]
