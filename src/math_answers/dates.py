"""Read dates, so that two formats of one date are equal: "March 5, 2024" is "5 March 2024" and 2024-03-05.

Which of two numbers is the day, in 3/5/2024, is known only where one of them cannot be a month; otherwise it is no date here.
Two numbers alone, such as 1/2 and 1.2, are numbers.
"""

import re
from datetime import date
from typing import NamedTuple

_MONTHS = [
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
]
_DAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
_MONTH = rf"(?P<month>{'|'.join(rf'{name[:3]}(?:{name[3:]})?' if name != 'september' else 'sept?(?:ember)?' for name in _MONTHS)})\.?"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(?P<year>\d{4})"
_FORMATS = tuple(
    re.compile(
        rf"(?:(?P<name>{'|'.join(rf'{name[:3]}[a-z]*' for name in _DAYS)})\.?,? )?(?:on )?(?:the )?(?:{pattern})",
        re.ASCII,
    )
    for pattern in (
        rf"{_MONTH} {_DAY}(?:,? {_YEAR})?",
        rf"{_DAY} (?:of )?{_MONTH}(?:,? (?:of )?{_YEAR})?",
        rf"{_MONTH},? (?:of )?{_YEAR}",
        rf"{_YEAR},? {_MONTH} {_DAY}",
        rf"{_DAY}-{_MONTH}-{_YEAR}",
        r"(?P<year>\d{4})(?P<mark>[-/.])(?P<number>\d\d)(?P=mark)(?P<day>\d\d)(?:t00:00(?::00)?z?)?",
        r"(?P<year>\d{4})年(?P<number>\d{1,2})月(?P<day>\d{1,2})日",
        r"(?P<first>\d{1,2})(?P<mark>[-/.])(?P<second>\d{1,2})(?P=mark)(?P<year>\d{4})",
    )
)


class Date(NamedTuple):
    """A date; year or day is None where it is not given."""

    year: int | None
    month: int
    day: int | None


def read_date(text: str) -> Date | None:
    """Return the date that a text is, or None, also for a date that does not exist or has another weekday than it says."""
    text = re.sub(r"\\text(?:bf|rm|it)?|\\mathrm|\^|[{}$]", "", re.sub(r"\\[,;: ]|~|\\q?quad", " ", text))
    text = re.sub(r"\s+", " ", re.sub(r"\s*,\s*", ", ", text)).strip(" .").lower()
    match = next(filter(None, (pattern.fullmatch(text) for pattern in _FORMATS)), None)
    if match is None:
        return None
    parts = match.groupdict()
    day: int | None
    if parts.get("first"):
        first, second = int(parts["first"]), int(parts["second"])
        if first <= 12 and second <= 12 and first != second:
            return None
        month, day = (first, second) if first <= 12 else (second, first)
    else:
        month = int(parts.get("number") or 1 + [name[:3] for name in _MONTHS].index(parts["month"][:3]))
        day = int(parts["day"]) if parts.get("day") else None
    year = int(parts["year"]) if parts.get("year") else None
    try:
        weekday = date(year or 2000, month, day or 1).weekday()  # a leap year
    except ValueError:
        return None
    name = parts.get("name")
    if name and not _DAYS[weekday].startswith(name[:3]) and year and day:
        return None
    return None if name and not year else Date(year, month, day)
