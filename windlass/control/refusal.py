"""What the scheduler refuses."""


class Wrong(Exception):
    """What is refused: the name of an error, and why. retry_seconds: for how long it may be worth trying again."""

    def __init__(self, error: str, why: str, retry_seconds: float = 0.0) -> None:
        super().__init__(why)
        self.error = error
        self.retry_seconds = retry_seconds
