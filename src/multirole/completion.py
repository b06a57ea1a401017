"""`multirole completion SHELL`: a script that completes commands, names after -p, and the words that a parameter may be.

multirole completion bash > ~/.local/share/bash-completion/completions/multirole
multirole completion zsh > ~/.multirole.zsh      # and `source ~/.multirole.zsh` after compinit in .zshrc
multirole completion fish > ~/.config/fish/completions/multirole.fish
"""

import argparse
import sys
from collections.abc import Iterable

from multirole.experiment.cell import Cell, cell_parameters
from multirole.experiment.evaluation import Evaluation, evaluation_parameters
from multirole.experiment.launch import Launch
from multirole.experiment.presets import TASKS
from multirole.experiment.settings import choices
from multirole.workflows import WORKFLOWS

BASH = """\
_multirole() {{
  local words="" this="${{COMP_WORDS[COMP_CWORD]}}" last="${{COMP_WORDS[COMP_CWORD-1]}}"
  if [ "$COMP_CWORD" = 1 ]; then words="{commands}"
  elif [ "$last" = -p ]; then words="{names}"
  elif [ "${{COMP_WORDS[COMP_CWORD-2]}}" = -p ]; then case "$last" in
{values}
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "$this"))
}}
complete -o default -F _multirole multirole
"""
FISH = """\
complete -c multirole -f -n __fish_use_subcommand -a "{commands}"
complete -c multirole -x -s p -a "{names}"
{values}
"""
SHELLS = {  # the script, and its line for a parameter of few words
    "bash": (BASH, '    {name}) words="{words}" ;;'),
    "zsh": (f"autoload -U +X bashcompinit && bashcompinit\n{BASH}", '    {name}) words="{words}" ;;'),
    "fish": (FISH, 'complete -c multirole -x -n "test (commandline -opc)[-1] = {name}" -a "{words}"'),
}


def script(shell: str, commands: Iterable[str]) -> str:
    """The completion of one shell."""
    names = list(dict.fromkeys(one.name for one in [*evaluation_parameters(), *cell_parameters()]))
    fields = Evaluation.model_fields | Cell.model_fields | Launch.model_fields
    words = {name: choices(field.annotation) for name, field in fields.items()}
    words |= {"workflow": tuple(WORKFLOWS), "policy": ("sp", "ip"), "task": tuple(TASKS)}
    text, line = SHELLS[shell]
    values = "\n".join(line.format(name=name, words=" ".join(few)) for name, few in words.items() if few)
    return text.format(commands=" ".join(commands), names=" ".join(names), values=values)


def main(argv: list[str]) -> int:
    """Print a shell's completion script."""
    from multirole.__main__ import COMMANDS

    parser = argparse.ArgumentParser(
        prog="multirole completion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shell", choices=SHELLS)
    sys.stdout.write(script(parser.parse_args(argv).shell, COMMANDS))
    return 0
