"""What a rank tells in one message. This package imports nothing else of the project."""


class EngineError(Exception):
    """A problem that the user can understand and mend: printed without a traceback."""


class DataError(EngineError):
    """Indexed data or index maps that cannot be used."""


class PeerLost(EngineError):
    """Another rank went away or did not answer in time: a symptom, the cause is with that rank."""
