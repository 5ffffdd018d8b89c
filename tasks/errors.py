"""The error that this room raises: one line that says what is wrong, where, and what to do."""


class TaskError(Exception):
    """A suite, a workload or a task's own data that cannot be used."""
