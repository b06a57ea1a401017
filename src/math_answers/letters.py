r"""Rename the letters that an answerer chooses to those of the reference: `settle_letters(ours, gold)`.

  * bound letters: \{t\mid t>2\} is \{x\mid x>2\}, f(t)=2t+1 is f(x)=2x+1, t\mapsto 2t is x\mapsto 2x
  * letters that are declared: 2n\pi, n\in\mathbb{Z} is 2k\pi, k\in\mathbb{Z}
  * constants of integration: \frac{x^3}{3}+c is \frac{x^3}{3}+C, y=Ce^{2x} is y=Ae^{2x}

Every other letter is the question's: 2n+1 is not 2x+1, g(x)=x not f(x)=x, and A not B. Texts are in normal form (`text.normalize`).
"""

import re
from collections.abc import Iterator
from itertools import permutations
from typing import NamedTuple

_LETTER = r"[A-Za-z](?:_(?:[A-Za-z0-9]|\{[A-Za-z0-9]+\}))?"
_TOKEN = re.compile(rf"\\text\{{[^{{}}]*\}}|\\[A-Za-z]+|(?P<letter>{_LETTER})")
_SET = r"\\in ?\\?(?:mathbb)?\{?(?P<set>[ZNQRC](?![A-Za-z])\}?(?:\^\{?[+*-]\}?|_\{?[^{}]*\}?)?)"
_DECLARED = re.compile(
    rf"(?<=.)[,(;]?(?:\\text\{{[\s,(]*(?:for|where|with)(?: any| all| every| each| some)?\s*\}})?(?:\\forall)? ?(?P<letter>[A-Za-z]) ?{_SET}\)?$",
    re.DOTALL,
)
r"""Matches ", k\in\mathbb{Z}" behind k\pi."""
_WHICH = r"(?:(?:an?|any|all|each|every|some|the|arbitrary|real)\s+)*"
_FROM_HERE = r"(?<=\S)\s*(?:[,;(]+\s*(?:(?:for|where|with)\s+)?|\b(?:for|where|with)\s+)"
_IN_WORDS = re.compile(
    rf"{_FROM_HERE}{_WHICH}"
    rf"(?:integers?\s+(?P<before>[a-z])|(?P<letter>[a-z])\s*(?:\s(?:is|are|be|being)\s+)?{_WHICH}\s*integers?|(?P<listed>[a-z])=0,\\pm ?1,\\pm ?2,\\ldots)[\s).]*$"
)
"""Matches ", where k is an integer"."""
_EXPLAINED = re.compile(
    rf"{_FROM_HERE}(?:{_LETTER}(?![A-Za-z])\s*+(?:(?:,|and(?![A-Za-z])|&)\s*+)?+)++"
    rf"(?:(?:is|are|=|being)\s+)?{_WHICH}constants?(?: of integration)?[\s).]*$|(?<=\S)[,;(]+[A-Z](?:_\d)?\\in ?\\mathbb\{{R\}}\)?$"
)
"""Matches ", where C is a constant"."""
_BAR = r"(?:\\mid|\||:|\\vert|\\colon)"
_BUILT = re.compile(rf"\\\{{\(?(?P<letters>{_LETTER}(?:,{_LETTER})*)\)?(?:\\in[^|:]*?)?{_BAR}.*\\\}}", re.DOTALL)
_MEMBERS = re.compile(rf"\\\{{(?P<member>[^|:]+?){_BAR} ?(?P<rest>(?:.*[,;])?[A-Za-z] ?{_SET})\\\}}", re.DOTALL)
r"""Matches \{2k\pi\mid k\in\mathbb{Z}\}, the set of what stands on the left."""
_DEFINED = re.compile(rf"(?P<name>{_LETTER}(?:'+|\^\{{-1\}})?)\((?P<letters>{_LETTER}(?:,{_LETTER})*)\)=.*", re.DOTALL)
_MAPPED = re.compile(r"(?:(?P<name>[A-Za-z]):)?(?P<letter>[a-z])\\mapsto ?(?P<value>.*)", re.DOTALL)
_INTEGERS = frozenset("jklmnpq")
"""Letters that stand for an integer where only the other side says so."""
_VARIABLES = frozenset("xytuzsrvw")
_CHOSEN = re.compile(r"[A-DKabck](?:_(?:\d|\{\d\}))?")
"""Matches letters that an answer may have for a constant of integration."""
_CONSTANT = re.compile(r"[CK]|[A-DKack]_(?:\d|\{\d\})")
_CONSTANT_IN_WORDS = re.compile(
    r"(?<=\+) ?(?:\\text\{\s*const(?:ant|\.)?\s*\}|const(?:ant|\.)?(?![A-Za-z]))", re.IGNORECASE
)


class Settled(NamedTuple):
    """The answer in each way in which its letters may be named, the reference, and the letter of any integer, or ""."""

    answers: tuple[str, ...]
    gold: str
    integer: str


def settle_letters(ours: str, gold: str) -> Settled:
    """Name the letters of an answer as the reference does, where the answerer chooses them; leave out the domain of an integer."""
    (ours, our_letter, our_set), (gold, due_letter, due_set) = map(_declaration, (_plain(ours), _plain(gold)))
    integer = ""
    if our_set == due_set and our_letter:
        ours, integer = _renamed_one(ours, our_letter, due_letter), due_letter
    elif "Z" in (our_set, due_set) and not (our_set and due_set):
        only_ours, only_gold = letters_of(ours) - letters_of(gold), letters_of(gold) - letters_of(ours)
        integer = due_letter or our_letter
        if (
            len(only_ours) == len(only_gold) == 1
            and only_ours <= _INTEGERS | {our_letter}
            and only_gold <= _INTEGERS | {due_letter}
        ):
            ours, integer = rename(ours, dict(zip(only_ours, only_gold, strict=True))), due_letter or min(only_gold)
    if our_set != "Z" and our_set:
        ours = f"{ours},{due_letter if our_set == due_set else our_letter}\\in\\mathbb{{{our_set}}}"
    if due_set != "Z" and due_set:
        gold = f"{gold},{due_letter}\\in\\mathbb{{{due_set}}}"
    is_whole = "Z" in (our_set, due_set) and {our_set, due_set} <= {"Z", ""}
    return Settled(
        tuple(dict.fromkeys(_constants_named(_bound_named(ours, gold), gold))), gold, integer if is_whole else ""
    )


def letters_of(text: str) -> set[str]:
    """Return the single letters of a formula, with their indices."""
    return {token["letter"] for token in _TOKEN.finditer(text) if token["letter"]}


def rename(text: str, names: dict[str, str]) -> str:
    """Replace letters of a formula, all at once."""
    return _TOKEN.sub(lambda token: names.get(token[0], token[0]), text)


def _squeezed(text: str) -> str:
    return re.sub(r" (?=\\)", "", text)


def _before(pattern: re.Pattern[str], text: str) -> tuple[str, re.Match[str] | None]:
    r"""Return the formula before words that explain it, in `\text{}` or not, and the match of these words."""
    words = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    match = pattern.search(words)
    if match is None or not text.startswith(words[: match.start()].rstrip()):
        return text, None
    return words[: match.start()].rstrip(), match


def _plain(text: str) -> str:
    r"""Write a set of members as a declaration, and `t\mapsto 2t` as f(t)=2t."""
    text = _before(_EXPLAINED, _CONSTANT_IN_WORDS.sub("C", text))[0]
    if members := _MEMBERS.fullmatch(_squeezed(text)):
        rest = members["rest"]
        if re.fullmatch(_LETTER, members["member"]) and "," in rest:  # \{x\mid x=2k\pi, k\in\mathbb{Z}\}
            return rest
        if not re.fullmatch(rf"{_LETTER}|\(.*\)", members["member"]) and "," not in rest:
            return f"{members['member']},{rest}"
    if mapped := _MAPPED.fullmatch(_squeezed(text)):
        return f"{mapped['name'] or 'f'}({mapped['letter']})={mapped['value']}"
    return text


def _declaration(text: str) -> tuple[str, str, str]:
    """Split a text into its formula, the letter that is declared at its end, and the letter's set; both "" without one."""
    if declared := _DECLARED.search(squeezed := _squeezed(text)):
        return squeezed[: declared.start()], declared["letter"], re.sub(r"[{}]", "", declared["set"])
    formula, words = _before(_IN_WORDS, text)
    return (formula, words["letter"] or words["before"] or words["listed"], "Z") if words else (text, "", "")


def _renamed_one(text: str, letter: str, due: str) -> str:
    """Rename a bound letter unless the new name is free in the text already."""
    return rename(text, {letter: due}) if letter == due or due not in letters_of(text) else text


def _bound_named(ours: str, gold: str) -> str:
    """Give the bound letters of a set builder or of a function's definition the names of the reference's."""
    for pattern in (_BUILT, _DEFINED):
        match_ours, match_gold = pattern.fullmatch(_squeezed(ours)), pattern.fullmatch(_squeezed(gold))
        if match_ours and match_gold and match_ours.groupdict().get("name") == match_gold.groupdict().get("name"):
            names = match_ours["letters"].split(","), match_gold["letters"].split(",")
            if len(names[0]) == len(names[1]) and not (set(names[1]) - set(names[0])) & letters_of(ours):
                return rename(match_ours[0], dict(zip(*names, strict=True)))
    return ours


def _constants_named(ours: str, gold: str) -> Iterator[str]:
    """Yield the answer with its constants of integration named in each way as the reference's."""
    due = _constants(gold)
    formula = ours if "=" in gold else ours.rpartition("=")[2]
    free_letters = sorted(letters_of(formula) - (letters_of(gold) - set(due)))
    if due and len(free_letters) == len(due) <= 3 and all(map(_CHOSEN.fullmatch, free_letters)):
        for names in permutations(due):
            yield rename(ours, dict(zip(free_letters, names, strict=True)))
    else:
        yield ours


def _constants(gold: str) -> list[str]:
    """Return the constants of integration of a reference: in a formula of variables, C, K or letters with a number; A and B in
    exponential solutions; c or k as the last summand of a formula of one variable."""
    formula = gold.rpartition("=")[2]
    letters = letters_of(formula) - {"e", "i", "d"}
    if not letters & _VARIABLES:
        return []
    capitals = {letter for letter in letters if letter[0].isupper() or _CONSTANT.fullmatch(letter)}
    if capitals:
        others = {letter for letter in capitals if not _CONSTANT.fullmatch(letter)}
        is_solution = "e^" in formula or r"\exp" in formula or others == {"A", "B"}
        return sorted(capitals) if not others or (others <= {"A", "B", "D"} and is_solution) else []
    summands = re.findall(r"(?:^|[+])([ck])(?=$|[+-])", _without_brackets(formula))
    is_alone = (
        len(summands) == 1
        and len(letters) == 2
        and len(re.findall(rf"(?<![\\A-Za-z]){summands[0]}(?![A-Za-z])", formula)) == 1
    )
    return summands if is_alone else []


def _without_brackets(text: str) -> str:
    while (shorter := re.sub(r"\{[^{}]*\}|\([^()]*\)", "", text)) != text:
        text = shorter
    return text
