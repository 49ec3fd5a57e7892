"""What the scheduler refuses."""


class Wrong(Exception):
    """What is refused: the name of an error, and why."""

    def __init__(self, error: str, why: str) -> None:
        super().__init__(why)
        self.error = error
