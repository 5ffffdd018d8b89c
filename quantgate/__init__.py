"""The front door: the command line, the campaign file and the pipeline that runs it."""

__version__ = "0.1.0"
