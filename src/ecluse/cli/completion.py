"""Completion of commands and options in shells: scripts that ask `ecluse complete` for the words that may follow."""

from __future__ import annotations

from collections.abc import Sequence

from ecluse.cli.catalogue import Local, below, find
from ecluse.cli.remote import Json, parser_of

SCRIPTS = {
    "bash": r"""_ecluse() {
    local IFS=$'\n'
    COMPREPLY=($(ecluse complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2> /dev/null))
}
complete -o default -F _ecluse ecluse
""",
    "zsh": r"""#compdef ecluse
_ecluse() {
    local -a found
    found=("${(@f)$(ecluse complete -- "${(@)words[2,CURRENT]}" 2> /dev/null)}")
    compadd -a found
}
compdef _ecluse ecluse
""",
    "fish": r"""complete -c ecluse -f -a '(ecluse complete -- (commandline -opc)[2..] (commandline -ct) 2> /dev/null)'
""",
}


def candidates(commands: Sequence[Local | Json], words: Sequence[str]) -> list[str]:
    """Return the completions of the last of `words`, which may be empty or typed in part."""
    *before, last = words or [""]
    found = find(commands, before)
    if found.command is None:
        known = list(below(commands, found.words)) if not found.rest else []
    elif isinstance(found.command, Local):
        known = []
    else:
        field = next((one for one in found.command["fields"] if before and one["option"] == before[-1]), None)
        known = [str(one) for one in field.get("choices", ())] if field else []
        known = known or parser_of(found.command).options()
    return [word for word in known if word.startswith(last)]
