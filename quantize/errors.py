"""The one exception of this room. Its text is a single line for the user: what is wrong, where, what to do."""


class QuantizeError(Exception):
    """A checkpoint, recipe or calibration file that cannot be used as asked."""
