"""The one error of this house's `eval` floor.

Raised for a user's mistake or for evidence that cannot be trusted; its message is one line that says what is wrong,
where, and what to do.
"""


class EvalError(Exception):
    """A request, a result folder or a comparison that cannot be used; `str(error)` is one line for the user."""
