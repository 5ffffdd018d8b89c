"""The commands, by what they are for: prepare a checkpoint, measure it, decide on it."""
