"""The clock of a run's chat templates: one moment for all of them.

Some templates write the date into a prompt (`strftime_now`, in transformers the clock of the machine). A run would
then get other prompts after midnight, on another rank, in a later turn, or when it is resumed. Therefore all templates
of a run read one moment. The trainer gives it to the config, and the config gives it to the templates.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

# What transformers calls the clock in a template. An argument of the template with this name stands in its place.
NAME_IN_TEMPLATES = "strftime_now"


@dataclass(slots=True)
class TemplateClock:
    """A clock that stands still.

    Attributes:
        moment: local time without a zone, as transformers has it.
        is_earlier: whether an earlier start of the run had it.
        was_read: whether a template has asked for the time.
    """

    moment: datetime
    is_earlier: bool = False
    was_read: bool = False

    def strftime_now(self, form: str) -> str:
        """The moment in the form of `datetime.strftime`."""
        self.was_read = True
        return self.moment.strftime(form)
