"""What a page says about an operation that it offers."""

from __future__ import annotations

from typing import NamedTuple


class Action(NamedTuple):
    label: str
    says: str  # what will change
    done: str
    what: str = ""  # the kind of record that it is done with, which has a name
    home: str = "/ui/runs"  # the page to go to, if the action was not asked for on another one
    leaves: bool = False  # the page it was asked for on is gone once it is done
    grave: bool = False  # cannot be taken back, or stops work
    shows: str = ""  # the page to go to instead: that of what was made
    previews: bool = True  # its form shows the preview of the command; not if the sentence says it all
