"""What `planaria doctor` finds out: single checks, and paths between machines."""

import msgspec


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at.

    Attributes:
        subject: name of the thing.
        value: state in which it is.
        remedy: change that is needed; "": none.
        is_fatal: whether no job works until it is changed.
    """

    subject: str
    value: str
    remedy: str = ""
    is_fatal: bool = False

    @property
    def verdict(self) -> str:
        """The result in a word: "ok", "warning" or "problem"."""
        if not self.remedy:
            return "ok"
        return "problem" if self.is_fatal else "warning"
